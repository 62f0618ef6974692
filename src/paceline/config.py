"""Every knob of a run: frozen, unknown keys refused, read from a TOML file plus `a.b=value` overrides.

    config = load_config("configs/arena.toml", ["run.steps=10", "objective.clip_high=0.28"])

The resolved config is written beside every run and every measurement, so that a figure can be made again.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails


class Section(BaseModel):
    """Base of every part of the config."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class RunConfig(Section):
    name: str = "run"
    """Names the run's directory."""
    directory: Path = Path("runs")
    """Where run directories are made. An existing run is never overwritten: a number is added to the name."""
    steps: int = Field(default=40, ge=1)
    """RL steps, each one policy update."""
    seed: int = 0
    """Seeds the order of the data, the engines' sampling and the learner."""
    lag: int = Field(default=0, ge=0)
    """How many batches the engines may be ahead of the learner. 0 is synchronous: a batch is sampled by one policy version. With
    lag n, n + 1 batches are in flight, and a sync pauses engines in the middle of their rollouts instead of waiting for them."""
    save_every: int = Field(default=0, ge=0)
    """Save the policy every this many steps; 0 saves at the end only."""
    sinks: tuple[Literal["console", "wandb"], ...] = ("console",)
    """Where metrics go besides metrics.jsonl."""


class PolicyConfig(Section):
    model: str = "arena:small"
    """A Hugging Face checkpoint directory, or `arena:tiny`, `arena:small`, `arena:large` for the built-in policies."""


class ArenaData(Section):
    kind: Literal["arena"] = "arena"
    seed: int = 0
    """Which stream of training problems; the held-out set does not depend on it."""


class JsonlData(Section):
    kind: Literal["jsonl"] = "jsonl"
    path: Path
    """One JSON object a line."""
    prompt_key: str = "prompt"
    """The field that holds the prompt text."""
    reward: str
    """`file.py:function` or `package.module:function`; called as reward(prompt, completion) or reward(prompt, completion, row)."""
    eval_path: Path | None = None
    """Held-out rows of the same form. Without it the last `eval.num_prompts` rows of `path` are held out."""


class HubData(Section):
    kind: Literal["datasets"] = "datasets"
    path: str
    """First argument of `datasets.load_dataset`, or a directory made by `Dataset.save_to_disk`."""
    split: str = "train"
    prompt_key: str = "prompt"
    reward: str
    """As in the jsonl kind."""


DataConfig = Annotated[ArenaData | JsonlData | HubData, Field(discriminator="kind")]


class NgramDrafter(Section):
    kind: Literal["ngram"] = "ngram"
    min_match: int = Field(default=2, ge=1)
    """Shortest repeated run of tokens that is continued, within the request itself."""
    max_match: int = Field(default=4, ge=1)


class HistoryDrafter(Section):
    kind: Literal["history"] = "history"
    min_match: int = Field(default=2, ge=1)
    """Shortest run of tokens that is looked up in the prompt's sibling and earlier rollouts."""
    max_match: int = Field(default=16, ge=1)
    capacity_mb: float = Field(default=256, gt=0)
    """Memory of the index in each engine; the oldest rollouts leave first."""
    share_directory: Path | None = None
    """Where engines on one node leave what they have seen for one another. None keeps each engine's history to itself."""


class LearnedDrafter(Section):
    path: str
    """A speculators checkpoint (`paceline draft train` makes one), or `arena` for the one that belongs to an arena policy."""
    draft_sampling: Literal["probabilistic", "greedy"] = "probabilistic"
    """How the drafter proposes. Probabilistic accepts clearly more at temperature 1; both are lossless."""
    weights: Literal["full", "fp8"] = "full"
    """Precision of the drafter's weights in engines, chosen apart from the policy's. It changes speed and acceptance, never what is
    sampled."""


class EagleDrafter(LearnedDrafter):
    """One token a pass, each knowing those before it."""

    kind: Literal["eagle3"] = "eagle3"


class ParallelDrafter(LearnedDrafter):
    """All k tokens in one pass, none knowing the others."""

    kind: Literal["dflash"] = "dflash"


DrafterConfig = Annotated[NgramDrafter | HistoryDrafter | EagleDrafter | ParallelDrafter, Field(discriminator="kind")]


class MeasuredSelector(Section):
    """The draft length that measured best at this batch size, learnt while the engine runs."""

    kind: Literal["measured"] = "measured"
    costs: Path | None = None
    """A cost file of `paceline bench costs` as the prior; without one the selector learns from nothing within 200 steps."""
    explore: float = Field(default=0.02, ge=0, lt=0.5)
    """Largest share of steps spent on a draft length that is not the best known one."""
    margin: float = Field(default=0.03, ge=0)
    """A new draft length must promise this much more to be taken: hysteresis against flapping."""


class FixedSelector(Section):
    """One draft length, always."""

    kind: Literal["fixed"] = "fixed"
    draft_length: int = Field(ge=0)


class TableSelector(Section):
    """Draft lengths by batch size, fixed at start, as vLLM's own table."""

    kind: Literal["table"] = "table"
    ranges: tuple[tuple[int, int, int], ...]
    """(smallest batch, largest batch, draft length) each; the last one holds beyond its end."""


class BanditSelector(Section):
    """BEG-MAB of the TLT paper: epsilon-greedy over buckets of batch sizes, by the median reward of a sliding window."""

    kind: Literal["beg_mab"] = "beg_mab"
    thresholds: tuple[int, ...] = (4, 16)
    """Batch sizes at which a new bucket starts (after the first)."""
    epsilon: float = Field(default=0.1, ge=0, le=1)
    window: int = Field(default=10, ge=1)


SelectorConfig = Annotated[MeasuredSelector | FixedSelector | TableSelector | BanditSelector, Field(discriminator="kind")]


class BufferConfig(Section):
    """Where rollouts with the policy's hidden states wait for drafter training."""

    directory: Path = Path("/dev/shm/paceline")  # noqa: S108  shared memory: its files are made by this run in a folder of its own
    """Each run makes a folder of its own in it. Shared memory by default; a folder on a disk spills."""
    capacity_mb: float = Field(default=1024, gt=0)
    """Of all that is kept. A token takes 4 bytes x hidden size x (taps + 1): 4 KB for arena:small."""
    step_mb: float = Field(default=256, gt=0)
    """Handed over by the learner in one step, at most."""
    step_share: float = Field(default=0.5, gt=0, le=1)
    """Of a step's rollouts that are handed over, if they fit into `step_mb`."""
    keep_versions: int = Field(default=8, ge=1)
    """Policy versions after which a rollout goes, however much room there is: it says what an older policy said."""
    long_share: float = Field(default=0.25, ge=0, lt=1)
    """Of the room, kept for the longest rollouts of earlier versions: short ones are many and would crowd them out."""
    heldout_share: float = Field(default=0.1, gt=0, lt=1)
    """Of the prompts (and of the room) that judge the drafter and never train it."""


class LeaseConfig(Section):
    """When an idle engine's place is lent to drafter training, and how soon it is given back."""

    settle_s: float = Field(default=0.02, ge=0)
    """How long an engine must have been idle: between two rollouts it is for a moment."""
    lease_s: float = Field(default=60, gt=0)
    """Longest lease. The trainer is recalled then, whether or not the engine has work."""
    grace_s: float = Field(default=0.1, ge=0)
    """How long a recalled trainer may take to let go. After that it is killed, because the engine's rollouts do not wait for it."""


class DriftConfig(Section):
    """When the drafter is worth training, and when what was trained is worth publishing."""

    noise: float = Field(default=0.01, ge=0)
    """Relative change of accepted length that means nothing."""
    horizon_steps: int = Field(default=5, ge=1)
    """RL steps over which an update has to earn its cost: by then the policy has moved on."""
    heldout_tokens: int = Field(default=2048, ge=1)
    """Tokens of the held-out slice on which old and new drafter are compared."""


class DrafterTrainingConfig(Section):
    """Training of a learned drafter while RL moves the policy away from it."""

    mode: Literal["idle", "inline", "off"] = "off"
    """`idle` trains on engines that wait for the tail of a phase; `inline` after the policy update, which costs its time."""
    when: Literal["worth it", "always"] = "worth it"
    """`worth it` trains when what it is expected to gain, by acceptance measured against its baseline, exceeds its cost."""
    inline_s: float = Field(default=2.0, gt=0)
    """How long every engine's place is lent after each policy update in mode `inline`."""
    round_tokens: int = Field(default=8192, ge=1)
    """Tokens trained on, by all workers together, until what came of them is judged on the held-out slice."""
    tokens_per_step: int = Field(default=1024, ge=1)
    """Of one optimizer step, which is one micro-batch if memory allows."""
    matrix_lr: float = Field(default=0.03, gt=0)
    """Of Muon, for the matrices inside the drafter's layer. Lower than offline, because it never falls."""
    other_lr: float = Field(default=0.003, gt=0)
    """Of AdamW, for embeddings, output head and norms."""
    buffer: BufferConfig = BufferConfig()
    lease: LeaseConfig = LeaseConfig()
    drift: DriftConfig = DriftConfig()


class SpeculationConfig(Section):
    drafter: DrafterConfig
    max_draft_length: int = Field(default=7, ge=1, le=16)
    """Largest number of tokens proposed per verification. The selector chooses from 0 to this."""
    selector: SelectorConfig = MeasuredSelector()
    training: DrafterTrainingConfig = DrafterTrainingConfig()

    @model_validator(mode="after")
    def _trainable(self) -> SpeculationConfig:
        if self.training.mode != "off" and not isinstance(self.drafter, LearnedDrafter):
            raise ValueError(
                f"speculation.training.mode: got {self.training.mode!r} with drafter.kind {self.drafter.kind!r}; must be off "
                "because only learned drafters (eagle3, dflash) have weights to train"
            )
        return self


class EngineConfig(Section):
    """Settings of each vLLM engine. What is not here keeps vLLM's default."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_model_len: int = Field(default=768, ge=8)
    """Longest prompt plus response."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Requests that the engine steps together."""
    kv_cache_gb: float = Field(default=1.0, gt=0)
    """KV cache of one engine on the CPU. On GPUs vLLM sizes it by gpu_memory_utilization."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    weights: Literal["full", "fp8"] = "full"
    """`full` is `dtype`. `fp8` quantises the policy's linear layers in blocks of 128 x 128 at every sync."""
    kv_cache: Literal["full", "fp8"] = "full"
    """`fp8` holds twice as many tokens; its scales are calibrated by the learner after every update (`learner.calibration`)."""
    compile: bool = False
    """Compiled steps are about twice as fast on the CPU but cost a minute or two at start."""
    start_deadline_s: float = Field(default=300, gt=0)
    call_deadline_s: float = Field(default=60, gt=0)
    """For calls that should answer at once: submit, pause, sleep, metrics."""
    progress_deadline_s: float = Field(default=120, gt=0)
    """An engine that has requests but finishes no token for this long is lost."""

    @property
    def in_full_precision(self) -> EngineConfig:
        """The same without quantisation: where the guard goes when the mismatch is too large."""
        return self.model_copy(update={"weights": "full", "kv_cache": "full"})

    @model_validator(mode="after")
    def _fp8_fits(self) -> EngineConfig:
        if self.weights == "fp8" and self.dtype != "bfloat16":
            raise ValueError(
                f"rollout.engine.weights: got 'fp8' with dtype {self.dtype!r}; dtype must be 'bfloat16' because engines quantise "
                "from it"
            )
        if self.weights == "fp8" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"rollout.engine.weights: got 'fp8' with tensor_parallel_size {self.tensor_parallel_size}; must be 'full' because "
                "quantised shards cannot be checked against the reference yet"
            )
        return self


class RolloutConfig(Section):
    num_engines: int = Field(default=2, ge=1)
    prompts_per_step: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=1)
    """Rollouts per prompt."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must stay 1: the learner does not truncate, so importance ratios against truncated sampling are biased."""
    max_tokens: int = Field(default=640, ge=1)
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _no_truncation(self) -> RolloutConfig:
        if self.top_p != 1.0:
            raise ValueError(
                f"rollout.top_p: got {self.top_p}; must be 1.0 because the learner's log-probabilities are not truncated, "
                "and the importance ratio against a truncated sampler is biased"
            )
        return self


class CalibrationConfig(Section):
    """KV scales after every update, from a share of the step's own batch. Unused unless `rollout.engine.kv_cache` is fp8."""

    share: float = Field(default=0.05, gt=0, le=1)
    """Of the batch's tokens that are looked at, in whole samples: a forward pass over as many."""
    max_tokens: int = Field(default=4096, ge=1)
    """No more than these, however large the batch."""
    percentile: float = Field(default=100.0, gt=0, le=100)
    """Over tokens, of a token's largest key or value. Below 100 the largest ones saturate."""
    margin: float = Field(default=1.25, ge=1)
    """Room above that for tokens that were not looked at. E4M3 loses nothing by it until small values underflow."""


class LearnerConfig(Section):
    world_size: int = Field(default=1, ge=1)
    """FSDP2 processes."""
    cpus: int | None = Field(default=None, ge=1)
    """Cores of each process, where there is no GPU; None shares all cores out. Engines on other cores may be lent to drafter
    training while the learner works."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward pass. Master weights and optimizer state are float32 in either case."""
    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch."""
    microbatch_tokens: int = Field(default=8192, ge=1)
    """Padded tokens in one forward pass; bounds memory. A longer sample gets a pass of its own."""
    deadline_s: float = Field(default=600, gt=0)
    calibration: CalibrationConfig = CalibrationConfig()


class ObjectiveConfig(Section):
    advantage: Literal["grpo", "centered"] = "grpo"
    """`grpo` divides the centred reward by the group's deviation; `centered` does not (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    """DAPO's clip-higher: above clip_low lets unlikely tokens grow (0.28 in the paper)."""
    loss: Literal["token", "sequence"] = "token"
    """`token`: every token of the batch weighs the same (DAPO). `sequence`: every rollout does (GRPO)."""
    drop_uniform_groups: bool = True
    """Leave out groups whose rewards are all equal: they carry no gradient (DAPO's dynamic sampling without the re-sampling)."""


class CorrectionConfig(Section):
    """What the loss does about engine and learner giving the same tokens different probabilities (policy/correction.py)."""

    kind: Literal["none", "token-tis", "sequence-tis", "token-mis", "sequence-mis", "geometric-mis"] = "none"
    """`none` takes the clipped ratio straight against the engine's log-probabilities. The others take it against the learner's own
    from before the update, and weigh each token by learner over engine: truncated (tis) or masked (mis)."""
    cap: float = Field(default=2.0, gt=1)
    """Largest weight of the truncated kinds, and of what geometric-mis keeps."""
    low: float | None = Field(default=None, gt=0, lt=1)
    """Lower end of the band that the masked kinds keep; unset, 0.5 for token and sequence, 0.99 for geometric, which is a mean
    over the rollout and needs a narrower band for responses of thousands of tokens."""
    high: float | None = Field(default=None, gt=1)
    """Upper end of it; unset, 2 and 1.01."""

    @property
    def band(self) -> tuple[float, float]:
        low, high = (0.99, 1.01) if self.kind == "geometric-mis" else (0.5, 2.0)
        return self.low or low, self.high or high


class GuardConfig(Section):
    """What to do when the mismatch grows (policy/guard.py). Limits are k3 of a step in nats per token. Once the first steps have
    shown what is normal for the run, those of correct, mask and raise_precision are 3, 5 and 10 times that, if it is less."""

    mode: Literal["observe", "act"] = "observe"
    """`observe` records what it would do; `act` does it."""
    correct: float = Field(default=0.002, gt=0)
    """Above it the batch is corrected by token-tis, if the config corrects nothing. NeMo-RL's accepted error of 1.05, as a k3."""
    mask: float = Field(default=0.01, gt=0)
    """Above it tokens outside the band are masked (token-mis)."""
    raise_precision: float = Field(default=0.03, gt=0)
    """Above it for two steps, FP8 engines are started again in BF16."""
    skip: float = Field(default=0.1, gt=0)
    """Above it the batch is not learnt from and the policy is pushed again. verl's alarm."""
    calibration_steps: int = Field(default=8, ge=2)
    """Calm steps from which the run learns what is normal."""
    hold_steps: int = Field(default=20, ge=1)
    """Calm steps after which engines go back to FP8; doubled whenever they had to leave it again."""
    max_pushes: int = Field(default=2, ge=1)
    """Skipped updates in a row before the run stops and saves the batch."""

    @model_validator(mode="after")
    def _rises(self) -> GuardConfig:
        if not self.correct < self.mask < self.raise_precision < self.skip:
            limits = f"{self.correct}, {self.mask}, {self.raise_precision}, {self.skip}"
            raise ValueError(
                f"guard: got {limits} for correct, mask, raise_precision, skip; must rise because each is for more than the last"
            )
        return self


class EvalConfig(Section):
    every: int = Field(default=10, ge=0)
    """Evaluate on held-out prompts every this many steps, and at the start and the end; 0 is never."""
    num_prompts: int = Field(default=256, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, gt=0)


class ClusterConfig(Section):
    address: str | None = None
    """A running Ray cluster (`auto` or host:port). None starts one on this machine that ends with the run."""


class Config(Section):
    run: RunConfig = RunConfig()
    policy: PolicyConfig = PolicyConfig()
    data: DataConfig = ArenaData()
    rollout: RolloutConfig = RolloutConfig()
    speculation: SpeculationConfig | None = None
    """None is plain decoding."""
    learner: LearnerConfig = LearnerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    correction: CorrectionConfig = CorrectionConfig()
    guard: GuardConfig = GuardConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply `a.b=value` overrides; errors name the key and what it must be."""
    tree: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise ValueError(f"config: got {file}; must be a TOML file (configs/arena.toml is a start)")
        try:
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"config: {file} is not TOML: {error}") from None
    for override in overrides:
        _apply(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(detail) for detail in error.errors())) from None


def _explain(detail: ErrorDetails) -> str:
    """One line for one wrong key: its path as the user writes it, what it got and what it must be."""
    parts = [str(part) for part in detail["loc"]]
    for union in (["data"], ["speculation", "drafter"], ["speculation", "selector"]):
        place = len(union)
        if parts[:place] == union and len(parts) > place + 1:
            del parts[place]  # pydantic puts the kind of a union into the path: data.jsonl.path is the user's data.path
    key = ".".join(parts)
    match detail["type"]:
        case "value_error":
            return str(detail["ctx"]["error"])  # our own validators name their key  # pyright: ignore[reportTypedDictNotRequiredAccess]
        case "missing":
            return f"{key}: is missing; must be set"
        case "union_tag_not_found":
            return f"{key}.kind: is missing; must be one of {', '.join(_kinds(key))}"
        case "extra_forbidden":
            near = difflib.get_close_matches(key, _keys(Config), n=1)
            return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
        case _:
            return f"{key}: got {detail['input']!r}; {detail['msg'][:1].lower()}{detail['msg'][1:]}"


def _kinds(key: str) -> list[str]:
    """The variants of the union at a dotted key."""
    union = {"data": DataConfig, "speculation.drafter": DrafterConfig, "speculation.selector": SelectorConfig}[key]
    return [variant.model_fields["kind"].default for variant in get_args(get_args(union)[0])]


def _keys(section: type[Section], prefix: str = "") -> list[str]:
    """Dotted keys of a section, those of its sections and variants included."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        for variant in get_args(info.annotation) or (info.annotation,):
            if isinstance(variant, type) and issubclass(variant, Section):
                keys += _keys(variant, f"{prefix}{name}.")
    return keys


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is read as TOML, and as a bare string where that fails."""
    key, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not key:
        raise ValueError(f"override: got {override!r}; must be a.b=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, leaf = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ValueError(f"override: {key!r} goes through {part!r}, which is a value")
    tree[leaf] = value
