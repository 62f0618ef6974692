"""Entry points `vllm.general_plugins`: vLLM calls them in every process, of our engines and others.

There are two so that VLLM_PLUGINS can disable one: `VLLM_PLUGINS=paceline` keeps the stock sampler, which certify must
find wrong.

vLLM does not catch errors of plugins, so an error here would stop engines unrelated to Paceline. Plugins therefore
never raise, do nothing in an unsupported vLLM, import only the standard library at first, and log once per process what
they did. Our own engines check their needs themselves (`VllmEngine._check_sampler`, `check_version`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.plugins.paceline")
"""Child of vLLM's logger, with its level and handler."""
_BACKEND = "paceline"
"""Name in `weight_transfer_config`."""
_said: set[str] = set()


def register() -> None:
    """Initialize AMX, register the weight-transfer backend, and, if PACELINE is set, fill in engine arguments and watch
    the sampler. Without the variable, engines that do not name the backend are unaffected."""
    _run("paceline", _initialize_amx, _register_backend, _watch_arguments, _prepare_runners)


def mend() -> None:
    """Fix vLLM's sampler if it is wrong under speculation."""
    _run("paceline_sampler", _mend_sampler)


def _run(plugin: str, *steps: Callable[[], str]) -> None:
    """Run all steps. A failed step disables one feature, not the host's engine."""
    level, said = logging.INFO, list[str]()
    try:
        import vllm

        from paceline.rollout.internals.version import KNOWN_HOSTS, OLDEST_HOST, is_known

        known = is_known(vllm.__version__, OLDEST_HOST)
        unknown = f"knows vLLM {KNOWN_HOSTS}, not {vllm.__version__}"
    except Exception as error:  # noqa: BLE001  an unknown vLLM
        known, unknown = False, f"cannot tell which vLLM this is: {error!r}"
    if not known:
        level = logging.WARNING if os.environ.get("PACELINE") else logging.INFO
        said = [f"nothing done, because Paceline {unknown}"]
    for step in steps if known else ():
        try:
            said.append(step())
        except Exception as error:  # noqa: BLE001  as above
            level = logging.WARNING
            said.append(f"{step.__name__.strip('_').replace('_', ' ')} failed: {error!r}")
    _say(level, f"plugin {plugin}: {'; '.join(said)}")


def _say(level: int, line: str) -> None:
    """Log a line once per process: vLLM may call plugins and make configs repeatedly."""
    if line not in _said:
        _said.add(line)
        logger.log(level, line)


def _initialize_amx() -> str:
    from paceline.rollout.internals.platform import initialize_amx

    return "AMX initialized" if initialize_amx() else "no AMX"


def _register_backend() -> str:
    import vllm

    from paceline.rollout.internals.transfer_engine import register_backend
    from paceline.rollout.internals.version import KNOWN, is_known

    if not is_known(vllm.__version__):
        return f"no weight-transfer backend, because Paceline's own engines need vLLM {KNOWN}"
    register_backend(_BACKEND, "paceline.rollout.receiver", "PushReceiver")
    return f"weight-transfer backend {_BACKEND} registered"


def _mend_sampler() -> str:
    from paceline.rollout.internals.sampler_fix import mend_sampler

    if mend_sampler():
        return "expand_batch_to_tokens replaced, which reads uninitialized memory on the CPU (vLLM issue 55005)"
    return "the sampler is left as it is"


def _watch_arguments() -> str:
    if not os.environ.get("PACELINE"):
        return "PACELINE is not set"
    from paceline.rollout.internals.engine_arguments import fill_before_use

    return "PACELINE is set" if fill_before_use(_fill) else "PACELINE is for the process that makes the engine's config"


def _prepare_runners() -> str:
    if not os.environ.get("PACELINE"):
        return "vLLM verifies as it does"
    from paceline.rollout.internals.processes import inside_vllm

    if not inside_vllm():
        return "runners are prepared in vLLM's processes"
    from paceline.rollout.internals.coupling import install

    install()
    return "verification by the engine's settings, and the losslessness monitor"


def _fill(arguments: Any) -> dict[str, Any]:
    """Return the engine arguments that PACELINE sets, and log them.

    The variable is read here because `rollout/arguments.py` removes it for our own engines."""
    setting = os.environ.get("PACELINE")
    if not setting:
        return {}
    import vllm

    from paceline.rollout.hosts import fill, given
    from paceline.rollout.internals.drafter_model import loads_apart
    from paceline.rollout.internals.platform import on_cpu
    from paceline.rollout.internals.sampler_fix import needs_mending
    from paceline.rollout.internals.version import is_known

    filling = fill(
        given(arguments),
        setting,
        on_gpu=not on_cpu(),
        sound_sampler=not needs_mending(),
        drafter_loads_apart=loads_apart(),
        last_block_stays=is_known(vllm.__version__),
    )
    _say(logging.WARNING if filling.refused else logging.INFO, filling.line(setting))
    return filling.arguments
