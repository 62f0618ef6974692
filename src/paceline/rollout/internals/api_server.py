"""Find the engine behind vLLM's API server, from a middleware.

Relied upon:
  vllm/entrypoints/launchers/api_server/app_state.py    state.engine_client of the FastAPI app, which vLLM's own routes
                                                        use as request.app.state.engine_client
  vllm/engine/protocol.py                               EngineClient.collective_rpc(method, timeout, args, kwargs)
  vllm/entrypoints/serve/middleware/register.py         --middleware takes the import path of a class

vLLM's endpoint plugins receive the engine. But they load only if VLLM_PLUGINS names them, the list must then name every
other plugin too (the sampler fix among them), and an installed plugin that is not named logs a warning at every start.

Goes when an endpoint plugin can be enabled by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


def engine_of(app: Any) -> EngineClient:
    """Return the engine that a FastAPI app of vLLM serves."""
    return app.state.engine_client
