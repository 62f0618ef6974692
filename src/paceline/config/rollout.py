"""Rollouts: how many, how they are sampled, and the vLLM engines that sample them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Adjustable, Section


class EngineConfig(Section):
    """Settings of each vLLM engine. What is not here keeps vLLM's default."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of weights and activations."""
    max_model_len: int = Field(default=768, ge=8)
    """Longest prompt plus response, in tokens."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Largest number of requests that the engine steps together."""
    kv_cache_gb: float = Field(default=1.0, gt=0)
    """KV cache of one engine on the CPU, in GiB. On GPUs vLLM sizes it by gpu_memory_utilization."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that vLLM may use."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of one engine, over which its weights are sharded."""
    weights: Literal["full", "fp8"] = "full"
    """`full` is `dtype`. `fp8` quantises the policy's linear layers in blocks of 128 x 128 at every sync."""
    kv_cache: Literal["full", "fp8"] = "full"
    """`full` is `dtype`. `fp8` holds twice as many tokens; the learner calibrates its scales after every update
    (`learner.calibration`)."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model and, on GPUs, capture CUDA graphs. `auto` does on GPUs and not on the CPU, where compiled steps
    are about twice as fast but the first start takes a minute or two longer."""
    cuda_graph_gb: float = Field(default=2.0, gt=0)
    """Memory of one GPU, in GB, that the CUDA graphs of a speculating engine may take by estimate. More of it allows
    more draft lengths (0, 1, 3, 7 or all) and larger batches to run in graphs."""
    recompute_kv_at_sync: bool = True
    """Compute the KV cache of running rollouts anew with new weights. `false` keeps what the old weights left: no pause
    for prefill, but later tokens of these rollouts are drawn from neither policy, which adds to the mismatch. Has no
    effect without `run.max_age`."""
    deterministic: bool = False
    """Sample each rollout by itself, with a seed that follows from `run.seed`, step, prompt and index, and without
    prefix caching. A run is then the same whenever it is run or resumed, and several times slower: for debugging and
    for tests."""
    start_deadline_s: Adjustable[float] = Field(default=900, gt=0)
    """Seconds within which an engine must have started; loading, compiling and capturing graphs count."""
    call_deadline_s: Adjustable[float] = Field(default=60, gt=0)
    """Seconds for calls that should answer at once: submit, pause, sleep, metrics."""
    push_deadline_s: Adjustable[float] = Field(default=300, gt=0)
    """Seconds within which a push of weights must have arrived and been loaded. Learner and engines wait half as long
    for each other in a broadcast, so raise it where weights take longer or many GPUs have to meet."""
    progress_deadline_s: Adjustable[float] = Field(default=120, gt=0)
    """An engine that has requests but produces no token for this many seconds is lost."""

    def compiles(self, *, gpu: bool) -> bool:
        """Whether an engine on a GPU, or on the CPU, compiles its model."""
        return gpu if self.compile == "auto" else self.compile

    @property
    def in_full_precision(self) -> EngineConfig:
        """The same engine without quantisation, to which the guard falls back when the mismatch is too large."""
        return self.model_copy(update={"weights": "full", "kv_cache": "full"})

    @model_validator(mode="after")
    def _fp8_fits(self) -> EngineConfig:
        if self.weights == "fp8" and self.dtype != "bfloat16":
            raise ValueError(
                f"rollout.engine.weights: got 'fp8' with dtype {self.dtype!r}; dtype must be 'bfloat16' because "
                "engines quantise from it"
            )
        if self.kv_cache == "fp8" and not self.recompute_kv_at_sync:
            raise ValueError(
                "rollout.engine.recompute_kv_at_sync: got false with kv_cache 'fp8'; must be true because new scales "
                "would misread what the old ones wrote"
            )
        return self


class RolloutConfig(Section):
    """How rollouts are sampled. Sampling is never truncated (no top_p, no top_k): the learner's log-probabilities are
    not, and importance ratios against a truncated sampler would be biased."""

    num_engines: Adjustable[int] = Field(default=2, ge=1)
    """Number of vLLM engines."""
    max_restarts: Adjustable[int] = Field(default=3, ge=0)
    """How often in a row another engine is started in the place of one that was lost, and another learner; ten minutes
    without a loss start the count anew. 0 goes on without the engine and ends with the learner, so that whatever kills
    them is seen at once."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts in the batch of one RL step."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts per prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the learner scores tokens at the same one."""
    max_tokens: int = Field(default=640, ge=1)
    """Longest response, in tokens."""
    engine: EngineConfig = EngineConfig()
