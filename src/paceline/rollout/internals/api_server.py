"""The engine behind vLLM's API server, as a middleware of the server finds it.

Relied upon:
  vllm/entrypoints/launchers/api_server/app_state.py    state.engine_client of the FastAPI app, which vLLM's own routes
                                                        use as request.app.state.engine_client
  vllm/engine/protocol.py                               EngineClient.collective_rpc(method, timeout, args, kwargs)
  vllm/entrypoints/serve/middleware/register.py         --middleware takes the import path of a class

vLLM's endpoint plugins are given the engine by name. But they are loaded only if VLLM_PLUGINS names them, and then that
list must name every other plugin of the host too, the one that mends the sampler among them; and one that is installed
and not named costs a warning at every start of every server. Goes when an endpoint plugin can be asked for by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


def engine_of(app: Any) -> EngineClient:
    """Return the engine that a FastAPI app of vLLM serves."""
    return app.state.engine_client
