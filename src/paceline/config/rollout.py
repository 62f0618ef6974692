"""Rollouts: how many, how they are sampled, and the vLLM engines that sample them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Adjustable, Section


class EngineConfig(Section):
    """Settings of each vLLM engine. All others keep vLLM's defaults."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of weights and activations."""
    max_model_len: int = Field(default=5120, ge=8)
    """Longest prompt plus response in tokens. The default leaves 1,024 tokens for prompts."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of requests in a batch."""
    kv_cache_gb: float = Field(default=4.0, gt=0)
    """KV cache of one engine on the CPU, in GiB. On GPUs `gpu_memory_utilization` determines it."""
    gpu_memory_utilization: float = Field(default=0.7, gt=0, le=1)
    """Share of GPU memory that vLLM uses. A push needs room for a second copy of the weights beside it: 16.4 GB for
    Qwen3-8B in bfloat16."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs over which one engine shards its weights."""
    weights: Literal["full", "fp8"] = "full"
    """`full` is `dtype`. `fp8` quantizes the policy's linear layers in blocks of 128 x 128 at every sync."""
    kv_cache: Literal["full", "fp8"] = "full"
    """`full` is `dtype`. `fp8` holds twice as many tokens; the learner calibrates its scales after every update."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model and, on GPUs, capture CUDA graphs. `auto` compiles on GPUs only: on CPUs compilation halves
    step times but adds one to two minutes to the first start."""
    cuda_graph_gb: float = Field(default=2.0, gt=0)
    """Estimated GPU memory for the CUDA graphs of a speculating engine, in GB. More memory allows more draft lengths
    and larger batches in graphs."""
    recompute_kv_at_sync: bool = True
    """Recompute the KV cache of running rollouts after a sync. `false` avoids the prefill, but later tokens of these
    rollouts come from neither policy, which adds to the mismatch. Has no effect if `run.max_age` is 0."""
    deterministic: bool = False
    """Sample each rollout alone, without prefix caching, so that no rounding depends on the batch. A run is several
    times slower; use it for debugging and tests. Rollouts have seeds in any case, which vLLM follows without
    speculation, with `speculation.verification = "coupled"` and here."""
    deadline_s: Adjustable[float] = Field(default=120, gt=0)
    """Seconds without a new token, despite running requests, after which an engine counts as lost. The timeouts of its
    calls (half as long), of pushes (2.5 times) and of its start (7.5 times) follow from it. Raise it where models load
    slowly or weights take minutes to transfer."""

    @property
    def call_deadline_s(self) -> float:
        """Timeout of calls that should return immediately: submit, pause, sleep, metrics."""
        return self.deadline_s / 2

    @property
    def push_deadline_s(self) -> float:
        """Timeout of a push; learner and engines wait half as long for each other in a broadcast."""
        return 2.5 * self.deadline_s

    @property
    def start_deadline_s(self) -> float:
        """Timeout of a start, including loading, compilation and graph capture."""
        return 7.5 * self.deadline_s

    def compiles(self, *, gpu: bool) -> bool:
        """Return whether an engine on a GPU, or on the CPU, compiles its model."""
        return gpu if self.compile == "auto" else self.compile

    @property
    def in_full_precision(self) -> EngineConfig:
        """The same engine without quantization, for the guard to fall back to."""
        return self.model_copy(update={"weights": "full", "kv_cache": "full"})

    @model_validator(mode="after")
    def _fp8_fits(self) -> EngineConfig:
        if self.weights == "fp8" and self.dtype != "bfloat16":
            raise ValueError(
                f"rollout.engine.weights: got 'fp8' with dtype {self.dtype!r}; dtype must be 'bfloat16' because "
                "engines quantize from it"
            )
        if self.kv_cache == "fp8" and not self.recompute_kv_at_sync:
            raise ValueError(
                "rollout.engine.recompute_kv_at_sync: got false with kv_cache 'fp8'; must be true because entries "
                "written under the old scales cannot be read under new ones"
            )
        return self


class RolloutConfig(Section):
    """Sampling of rollouts, always without top_p and top_k: the learner's log-probabilities are not truncated, so
    importance ratios against a truncated sampler would be biased."""

    num_engines: Adjustable[int] = Field(default=4, ge=1)
    """Number of vLLM engines. The default shares 8 GPUs with a learner on 4."""
    max_restarts: Adjustable[int] = Field(default=3, ge=0)
    """Consecutive restarts of a lost engine, or of a lost learner; ten minutes without a loss reset the count. With 0
    the run continues without lost engines and ends if the learner is lost."""
    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts per RL step."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts per prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, also used by the learner when it scores tokens."""
    max_tokens: int = Field(default=4096, ge=1)
    """Longest response in tokens. The learner stores the activations of a whole rollout: with 8 billion parameters on
    four 80 GB GPUs about 5,000 tokens fit."""
    engine: EngineConfig = EngineConfig()
