"""Noise, verification and monitor of a worker, set before its model runner is built.

A worker samples by V1's code on CPUs (coupled_cpu.py) or by V2's (coupled_v2.py). Both look up replaceable functions,
but V2 captures its drafter in CUDA graphs when the runner starts, and V1 builds its sampler then, so the constructors
of both runners are wrapped. They know vLLM's config, which carries our settings.

Relied upon: the constructors of CPUModelRunner (vllm/v1/worker/cpu_model_runner.py), of V1's GPUModelRunner
(vllm/v1/worker/gpu_model_runner.py) and of V2's (vllm/v1/worker/gpu/model_runner.py), which take (vllm_config, device).
Goes with the two files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from paceline.rollout.internals import coupled_cpu, coupled_v2, verification_monitor
from paceline.rollout.internals.model_runner import Runner
from paceline.rollout.internals.platform import on_cpu
from paceline.rollout.speculation import own_settings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

_MARK = "_paceline_prepared"
_verification: Literal["standard", "coupled"] = "standard"
_has_keyed_noise = False


def install() -> None:
    """Prepare every model runner that this process builds."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        _prepare_before(GPUModelRunner, "v2", coupled_v2.couple)
    if on_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        _prepare_before(CPUModelRunner, "v1", coupled_cpu.couple, coupled_cpu.key_noise)
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1ModelRunner

        # V1 on GPUs draws by generators. It is watched, not coupled.
        _prepare_before(V1ModelRunner, "v1", lambda: None, lambda: False)


def verification() -> str:
    """Return how this process verifies drafts."""
    return _verification


def has_keyed_noise() -> bool:
    """Return whether tokens of a seeded request depend on its seed and their positions only."""
    return _has_keyed_noise


def _prepare_before(
    built: Any, runner: Runner, couple: Callable[[], None], key_noise: Callable[[], bool] = lambda: True
) -> None:
    stock = built.__init__
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def build(self: Any, vllm_config: VllmConfig, device: torch.device) -> None:
        global _verification, _has_keyed_noise  # noqa: PLW0603  state of the worker's process
        is_keyed = key_noise()
        if is_keyed and own_settings(vllm_config.additional_config).get("verification") == "coupled":
            couple()
            _verification = "coupled"
        _has_keyed_noise = is_keyed and (vllm_config.speculative_config is None or _verification == "coupled")
        if vllm_config.speculative_config is not None:
            verification_monitor.start(runner, draft_are_logits=_verification == "coupled")
        stock(self, vllm_config, device)

    setattr(build, _MARK, True)
    built.__init__ = build
