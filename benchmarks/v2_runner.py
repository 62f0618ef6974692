"""Run vLLM's V2 model runner, which GPUs use, on the CPU.

    with v2_runner(os.environ, async_scheduling=True):
        engine = await VllmEngine.start(...)        our engine; about half a second per step

The V2 runner (vllm/v1/worker/gpu/) has another sampler, other speculators and asynchronous scheduling. On CPUs vLLM
falls back to V1, because Triton has no CPU backend. Triton's interpreter runs the same kernels from their source.
STAND_INS adds missing parts of the interpreter, and asynchronous scheduling, which vLLM disables on CPUs. They replace
no part of vLLM's runner, sampler or speculators. tests/gpu_code checks that each is still `needed`.

vLLM's child processes get the stand-ins through a folder on PYTHONPATH with a `sitecustomize.py`, which Python imports
first. Our vLLM plugin initializes AMX in every process.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PLATFORM = "vllm.platforms.cpu"
_SETTINGS = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # vLLM gives up on a step after 5 minutes, which an interpreted one can take on a busy machine.
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1800",
}
_applied = False
_async_scheduling = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A replacement."""

    name: str
    why: str
    apply: Callable[[], None]
    needed: Callable[[], bool]
    """Called in a process with _SETTINGS and without stand-ins."""


def _add_backend() -> None:
    from triton.backends import backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    cast("dict[str, Any]", backends)["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)


def _vllm_switches_triton_off() -> bool:
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON


class _BooleanMasks:
    """Triton's interpreter in C++, called with boolean masks."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return self._interpreter.load(pointers, mask.astype(bool), other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        return self._interpreter.store(pointers, value, mask.astype(bool))


def _cast_masks() -> None:
    from triton.runtime import interpreter

    interpreter._interpreter = _BooleanMasks(interpreter._interpreter)


def _integer_masks_are_refused() -> bool:
    import numpy as np
    from triton.runtime import interpreter

    value = np.zeros(1, np.int32)
    address, mask = np.array([value.ctypes.data], np.uint64), np.ones(1, np.int32)
    try:
        interpreter._interpreter.store(address, np.array([7], np.int32), mask)
    except ValueError:  # "mask has unsupported dtype"
        return True
    return bool(value[0] != 7)


def _add_log1p() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice

    libdevice.log1p = lambda x: tl.log(x + 1.0)


def _log1p_answers_nothing() -> bool:
    from triton.language.extra import libdevice

    return libdevice.log1p(None) is None  # a declaration without a body, which a GPU's compiler fills in


def _keep_async_scheduling() -> None:
    if _PLATFORM in sys.modules:
        _patch_platform(sys.modules[_PLATFORM])
    else:
        sys.meta_path.insert(0, _PatchedWhenImported())


class _PatchedWhenImported(MetaPathFinder):
    """Patch the platform on import: importing it here would import vLLM into every process."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _PLATFORM:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None, f"vLLM has no {_PLATFORM} any more"
        execute = spec.loader.exec_module

        def execute_and_patch(module: types.ModuleType) -> None:
            execute(module)
            _patch_platform(module)

        spec.loader.exec_module = execute_and_patch
        return spec


def _patch_platform(module: types.ModuleType) -> None:
    """Keep vLLM's decision before it asks the platform: asynchronous except with n-grams."""
    check = module.CpuPlatform.check_and_update_config.__func__

    def check_and_keep(cls: type, config: VllmConfig) -> None:
        decided = config.scheduler_config.async_scheduling
        check(cls, config)
        if _async_scheduling:
            config.scheduler_config.async_scheduling = decided

    module.CpuPlatform.check_and_update_config = classmethod(check_and_keep)


def _platform_switches_async_scheduling_off() -> bool:
    platform = importlib.import_module(_PLATFORM).CpuPlatform
    return "scheduler_config.async_scheduling = False" in inspect.getsource(platform.check_and_update_config)


STAND_INS = (
    StandIn(
        name="backend",
        why="Triton has no backend named cpu, and without one vLLM's CPU build switches Triton off",
        apply=_add_backend,
        needed=_vllm_switches_triton_off,
    ),
    StandIn(
        name="masks",
        why="vLLM's kernels load and store with integer masks too, which compilers cast and the interpreter rejects",
        apply=_cast_masks,
        needed=_integer_masks_are_refused,
    ),
    StandIn(
        name="log1p",
        why="libdevice is a GPU library; V2's rejection sampler uses its log1p",
        apply=_add_log1p,
        needed=_log1p_answers_nothing,
    ),
    StandIn(
        name="async_scheduling",
        why="vLLM's CPU platform switches asynchronous scheduling off, which GPUs have on",
        apply=_keep_async_scheduling,
        needed=_platform_switches_async_scheduling_off,
    ),
)


def stand_in(*, async_scheduling: bool) -> None:
    """Apply all stand-ins, before this process imports Triton or vLLM. Later calls only set `async_scheduling`."""
    global _applied, _async_scheduling  # noqa: PLW0603  state of the process
    if not _applied:
        if too_early := {"triton", "vllm"} & sys.modules.keys():
            raise RuntimeError(
                f"{' and '.join(sorted(too_early))} imported before the stand-ins for vLLM's V2 runner: kernels that "
                "exist already are not interpreted; enter v2_runner() first (transformers' models import Triton too)"
            )
        for replacement in STAND_INS:
            replacement.apply()
        _applied = True
    _async_scheduling = async_scheduling


@contextmanager
def v2_runner(environ: MutableMapping[str, str], *, async_scheduling: bool) -> Iterator[None]:
    """Run engines that are started inside on V2, with `async_scheduling` as on a GPU.

    `environ` is `os.environ`, which vLLM's processes inherit; it is restored at the end. The stand-ins stay in this
    process, which cannot start V1 engines afterward."""
    package_root = Path(__file__).parents[1]
    with TemporaryDirectory(prefix="paceline-v2-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(
            f"from {__name__} import stand_in\n\nstand_in(async_scheduling={async_scheduling})\n"
        )
        paths = [folder, str(package_root), *filter(None, [environ.get("PYTHONPATH")])]
        settings = _SETTINGS | {"PYTHONPATH": os.pathsep.join(paths)}
        before = {name: environ.get(name) for name in settings}
        environ.update(settings)
        try:
            stand_in(async_scheduling=async_scheduling)
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del environ[name]
                else:
                    environ[name] = value
