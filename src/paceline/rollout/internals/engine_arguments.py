"""Engine arguments filled in before vLLM makes its config of them, for hosts that pass no arguments of their users on.

Every front end of vLLM (`LLM`, `AsyncLLM`, `vllm serve`) makes its config by one method, which is wrapped: what the
filler returns is set, and if vLLM then refuses the arguments, they are put back as they were and it is asked again. So
the host's engine starts as it would have without us. Wrapped only where the variable PACELINE is set.

Relied upon: vllm/engine/arg_utils.py, `EngineArgs.create_engine_config`, which may be called again on the same object
(vLLM does so itself), and attributes of `EngineArgs` that can be set until then.

Goes when vLLM lets a plugin give defaults of engine arguments.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("vllm.plugins.paceline")
MODULE = "vllm.engine.arg_utils"
_MARK = "paceline_fills"
"""Attribute of the wrapped method: plugins may be loaded twice, and others may wrap it too."""


def fill_before_use(filler: Callable[[Any], Mapping[str, Any]]) -> bool:
    """Set what the filler returns, by name, before a config is made. False in a process that makes none: workers have
    not imported vLLM's arguments, and need not."""
    if MODULE not in sys.modules:
        return False
    arguments_class = sys.modules[MODULE].EngineArgs
    stock = arguments_class.create_engine_config
    if hasattr(stock, _MARK):
        return True

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(self))
        try:
            filled = filler(self)
            vars(self).update(filled)
        except Exception:
            logger.exception("PACELINE: filling engine arguments in failed; the engine starts without it")
            filled = {}
        try:
            return stock(self, *args, **kwargs)
        except Exception as error:
            if not filled:
                raise
            refused = error
        vars(self).update(before)
        config = stock(self, *args, **kwargs)  # raises again what was not our fault
        logger.warning("PACELINE: vLLM refused %s (%s); the engine starts without it", ", ".join(filled), refused)
        return config

    setattr(create_engine_config, _MARK, True)
    arguments_class.create_engine_config = create_engine_config
    return True
