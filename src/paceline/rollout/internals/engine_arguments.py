"""Fill in engine arguments before vLLM makes its config, for hosts that do not pass on their users' arguments.

All front ends of vLLM (`LLM`, `AsyncLLM`, `vllm serve`) make their config by one method, which is wrapped: the filler's
values are set, and if vLLM refuses them, the old values are restored and the method is called again. So the host's
engine starts as without Paceline. Wrapped only if the variable PACELINE is set.

Relied upon: vllm/engine/arg_utils.py, `EngineArgs.create_engine_config`, which may be called again on the same object
(vLLM does so itself), and attributes of `EngineArgs` that can be set until then.

Goes when vLLM lets a plugin set defaults of engine arguments.
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
"""Attribute of the wrapped method: plugins may load twice, and others may wrap it too."""


def fill_before_use(filler: Callable[[Any], Mapping[str, Any]]) -> bool:
    """Set the filler's values before a config is made. Return False in workers, which make no config and have not
    imported vLLM's arguments."""
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
        config = stock(self, *args, **kwargs)  # raises again if the values were not the cause
        logger.warning("PACELINE: vLLM refused %s (%s); the engine starts without it", ", ".join(filled), refused)
        return config

    setattr(create_engine_config, _MARK, True)
    arguments_class.create_engine_config = create_engine_config
    return True
