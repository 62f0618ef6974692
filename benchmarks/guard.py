"""Does the guard find planted faults, answer rightly, recover, and leave clean runs alone?

No engine is needed. An engine is a copy of the policy in BF16 that samples with its own KV cache and remembers the
probability of what it drew; faults are planted into the copy; a real learner in FP32 scores the same tokens:

    int4       every matrix of both engines rounded to 4 bits           noise: raise precision
    kv-scales  keys and values of both engines saturate, because their
               scales are those of a policy with smaller ones           noise: raise precision
    stale      one tensor of one engine stopped arriving some updates ago  sync: skip and push again
    swapped    two layers of one engine have changed places             sync: skip and push again
    nan        one engine's log-probabilities are not numbers           sync: skip and push again

Rollouts are sampled once for each kind of engine. The steps of a run draw theirs from these pools with replacement, so
a thousand clean batches are a thousand resamplings of real gaps. A fault is there from one step on until the rung that
repairs it is reached: a push brings the tensors, full precision ends rounding. `max_steps_to_rung` counts from the
first batch with the fault in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.arena.prompts import arena_task
from paceline.config import LearnerConfig, ObjectiveConfig
from paceline.context import Context
from paceline.learner.correction import Ratios, diagnose, gaps_by_engine, histogram, worst_tokens
from paceline.learner.fsdp import FsdpLearner
from paceline.learner.guard import GuardDecision, GuardState, Level, decide
from paceline.measure import Result, environment
from paceline.orchestrator.task import Task
from paceline.sessions.train import load_tokenizer
from paceline.sessions.workloads import resolve_policy
from paceline.types import Floats, Prompt, Sample

_ENGINES = ("engine-0", "engine-1")
_ROLLOUTS = 64
"""Rollouts of an engine in a step, as in configs/arena.toml."""
_CALM_STEPS = 10
"""Calm steps before a fault: the guard's calibration and some more."""
_AFTER_STEPS = 10
_STALE_UPDATES = 24
"""Updates that a stale tensor is behind, a whole run of configs/arena.toml: one update is within BF16's rounding."""
_SATURATE = 2.0
"""Factor by which keys and values exceed the range of their stale scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    rung: Level
    """The right answer."""
    engines: tuple[str, ...]
    base: str
    """Pool of the engines before the fault."""


FAULTS: Mapping[str, Fault] = {
    "int4": Fault(rung=Level.RAISE_PRECISION, engines=_ENGINES, base="fp8"),
    "kv-scales": Fault(rung=Level.RAISE_PRECISION, engines=_ENGINES, base="fp8"),
    "stale": Fault(rung=Level.SKIP, engines=_ENGINES[1:], base="bf16"),
    "swapped": Fault(rung=Level.SKIP, engines=_ENGINES[1:], base="bf16"),
    "nan": Fault(rung=Level.SKIP, engines=_ENGINES[1:], base="bf16"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Rollouts of one kind of engine, with the learner's scores."""

    samples: Sequence[Sample]
    learner_logp: Sequence[Floats]

    def draw(self, engine: str, random: np.random.Generator) -> tuple[list[Sample], list[Floats]]:
        chosen = random.integers(0, len(self.samples), _ROLLOUTS)
        return [replace(self.samples[i], engine=engine) for i in chosen], [self.learner_logp[i] for i in chosen]


def run(
    *,
    context: Context,
    num_clean: int = 1000,
    repetitions: int = 20,
    pool_size: int = 256,
    seed: int = 2,
) -> Result:
    """Play every fault `repetitions` times, then `num_clean` clean batches of each precision."""
    model_path = resolve_policy("arena:small", context)
    task = arena_task(load_tokenizer(model_path), seed=seed, num_heldout=0)
    pools = make_pools(model_path, task, pool_size, seed, context)
    outcomes = {
        name: [play_fault(name, pools, np.random.default_rng((seed, number, i))) for i in range(repetitions)]
        for number, name in enumerate(FAULTS)
    }
    for name, found in outcomes.items():
        caught = sum(outcome.steps_to_rung is not None for outcome in found)
        recovered = sum(outcome.recovered for outcome in found)
        context.progress(f"{name}: {caught} of {repetitions} caught, {recovered} recovered")
    alarms = {base: false_alarms(pools[base], num_clean, np.random.default_rng((seed, 99))) for base in ("bf16", "fp8")}
    every = [outcome for found in outcomes.values() for outcome in found]
    steps = [outcome.steps_to_rung for outcome in every if outcome.steps_to_rung is not None]
    figures = {
        "faults_caught": len(steps) / len(every),
        "max_steps_to_rung": float(max(steps, default=99)),
        "recovered": sum(outcome.recovered for outcome in every) / len(every),
        "false_alarm_share": max(alarms.values()),
        "diagnostics_ms": time_diagnostics(pools["bf16"], np.random.default_rng(seed)),
    }
    figures |= {f"k3_{name.replace('-', '_')}": k3 for name, k3 in _k3(pools).items()}
    return Result(
        name="guard",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0),
        goals={
            "faults_caught": (">=", 1.0),
            "max_steps_to_rung": ("<=", 2.0),
            "recovered": (">=", 1.0),
            "false_alarm_share": ("<=", 0.01),
        },
        environment=environment(seeds=[seed], config={}),
        details={
            "caught": {name: _share(found, lambda o: o.steps_to_rung is not None) for name, found in outcomes.items()},
            "recovered": {name: _share(found, lambda o: o.recovered) for name, found in outcomes.items()},
            "steps_to_rung": {name: [outcome.steps_to_rung for outcome in found] for name, found in outcomes.items()},
            "rungs": {name: found[0].rungs for name, found in outcomes.items()},
            "false_alarms": alarms,
            "clean_batches": num_clean,
            "clean_batches_are": "drawn with replacement from a pool of rollouts that a BF16 or FP8 copy of the policy "
            "sampled",
            "pool_size": pool_size,
            "repetitions": repetitions,
            "stale_updates": _STALE_UPDATES,
        },
    )


# A run of the guard.


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    steps_to_rung: int | None
    """None: another rung came first, or none within the steps that were played."""
    recovered: bool
    """Whether the guard was then as calm as before the fault, and back in the configured precision."""
    rungs: list[str]


def play_fault(name: str, pools: Mapping[str, Pool], random: np.random.Generator) -> Outcome:
    """Play calm steps, the fault until it is repaired, and what comes after."""
    fault = FAULTS[name]
    state, decisions, base = GuardState(), [], fault.base
    faulty, steps_to_rung, num_faulty = False, None, 0
    for step in range(_CALM_STEPS + _AFTER_STEPS):
        faulty = step == _CALM_STEPS or faulty
        num_faulty += faulty
        kinds = {engine: name if faulty and engine in fault.engines else base for engine in _ENGINES}
        state, decision = _step(state, {engine: pools[kind] for engine, kind in kinds.items()}, random)
        decisions.append(decision)
        if faulty and decision.level == fault.rung and decision.engines == _suspects(fault):
            faulty, steps_to_rung = False, num_faulty
        if decision.precision is not None:
            base = "bf16" if decision.precision == "raise" else fault.base
    calm = max(decision.level for decision in decisions[_CALM_STEPS - 2 : _CALM_STEPS])
    return Outcome(
        steps_to_rung=steps_to_rung,
        recovered=not faulty and not state.raised and all(decision.level <= calm for decision in decisions[-3:]),
        rungs=[decision.level.words for decision in decisions],
    )


def false_alarms(pool: Pool, num: int, random: np.random.Generator) -> float:
    """Share of clean batches with a higher rung than the calibration's, in runs of a hundred."""
    alarms = 0
    for first in range(0, num, 100):
        state, expected = GuardState(), Level.OBSERVE
        for number in range(min(100, num - first) + _CALM_STEPS):
            state, decision = _step(state, dict.fromkeys(_ENGINES, pool), random)
            if number < _CALM_STEPS:
                expected = max(expected, min(decision.level, Level.CORRECT))  # FP8 may need correction
            alarms += number >= _CALM_STEPS and decision.level > expected
    return alarms / num


def _step(
    state: GuardState, pools: Mapping[str, Pool], random: np.random.Generator
) -> tuple[GuardState, GuardDecision]:
    drawn = [pool.draw(engine, random) for engine, pool in pools.items()]
    samples = [sample for part, _ in drawn for sample in part]
    ratios = Ratios.of([sample.logp for sample in samples], [logp for _, part in drawn for logp in part])
    return decide(state, gaps_by_engine(samples, ratios), can_raise=True)


def _suspects(fault: Fault) -> tuple[str, ...]:
    """Engines that the decision has to name; none when it is all of them."""
    return () if fault.engines == _ENGINES else fault.engines


def time_diagnostics(pool: Pool, random: np.random.Generator) -> float:
    """Milliseconds of all diagnostics of a step, without the noise floor, which is a pass of the learner."""
    samples, learner_logp = pool.draw(_ENGINES[0], random)
    times_ms = []
    for _ in range(9):
        began_s = perf_counter()
        ratios = Ratios.of([sample.logp for sample in samples], learner_logp)
        diagnose(ratios)
        gaps_by_engine(samples, ratios)
        histogram(ratios)
        worst_tokens(samples, learner_logp, ratios)
        times_ms.append(1000 * (perf_counter() - began_s))
    return float(np.median(times_ms))


def _k3(pools: Mapping[str, Pool]) -> dict[str, float]:
    ratios = {
        name: Ratios.of([s.logp for s in pool.samples], pool.learner_logp)
        for name, pool in pools.items()
        if name != "nan"
    }
    return {name: diagnose(found).k3 for name, found in ratios.items()}


def _share(outcomes: Sequence[Outcome], test: Callable[[Outcome], bool]) -> float:
    return sum(test(outcome) for outcome in outcomes) / len(outcomes)


# The pools: engines with faults in them, and the learner.


def make_pools(model_path: Path, task: Task, size: int, seed: int, context: Context) -> dict[str, Pool]:
    """Sample rollouts of every kind of engine, and score them by one learner."""
    learner = FsdpLearner(
        model_path,
        LearnerConfig(world_size=1, dtype="float32", learning_rate=5e-5, betas=(0.9, 0.99), microbatch_tokens=2048),
        ObjectiveConfig(),
        temperature=1.0,
        seed=seed,
    )
    try:
        earlier = dict(learner.weights(torch.float32))
        engine = _load(model_path)
        first = _sample(engine, task, _ROLLOUTS // 2, seed)
        for _ in range(_STALE_UPDATES):  # the policy moves on, so that there is something to be stale against
            learner.apply(first)
        current = dict(learner.weights(torch.float32))
        pools = {}
        for name in ("bf16", "fp8", *(name for name in FAULTS if name != "nan")):
            began_s = perf_counter()
            engine = _load(model_path, _planted(name, current, earlier))
            num = size if name in ("bf16", "fp8") else size // 2
            with _saturating(engine) if name == "kv-scales" else _as_it_is():
                samples = _sample(engine, task, num, seed + 1)
            pools[name] = Pool(samples=samples, learner_logp=learner.score(samples).logp)
            k3 = _k3({name: pools[name]})[name]
            context.progress(f"{name}: {num} rollouts, k3 {k3:.1e} ({perf_counter() - began_s:.0f} s)")
    finally:
        learner.close()
    clean = pools["bf16"]
    spoilt = [
        replace(sample, logp=np.where(np.arange(len(sample.logp)) == 1, np.nan, sample.logp))
        for sample in clean.samples
    ]
    return pools | {"nan": Pool(samples=spoilt, learner_logp=clean.learner_logp)}


def _planted(
    name: str, current: Mapping[str, torch.Tensor], earlier: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Weights of an engine with the fault in them."""
    weights = dict(current)
    matrices = [key for key in weights if ".layers." in key and weights[key].dim() == 2]
    match name:
        case "fp8" | "kv-scales":
            weights |= {key: _fp8(weights[key]) for key in matrices}
        case "int4":
            weights |= {key: _int4(weights[key]) for key in matrices}
        case "stale":
            key = next(key for key in matrices if key.endswith("layers.1.mlp.down_proj.weight"))
            weights[key] = earlier[key]
        case "swapped":
            for key in [key for key in weights if ".layers.1." in key]:
                other = key.replace(".layers.1.", ".layers.2.")
                weights[key], weights[other] = current[other], current[key]
    return weights


def _fp8(weight: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Round to E4M3 with a scale for each block of 128 x 128."""
    rounded = torch.empty_like(weight)
    for row in range(0, weight.shape[0], block):
        for column in range(0, weight.shape[1], block):
            part = weight[row : row + block, column : column + block]
            scale = part.abs().max().clamp(min=1e-12) / 448
            rounded[row : row + block, column : column + block] = (part / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded


def _int4(weight: torch.Tensor) -> torch.Tensor:
    """Round to 15 levels, with a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 7
    return (weight / scale).round() * scale


def _load(model_path: Path, weights: Mapping[str, torch.Tensor] | None = None) -> PreTrainedModel:
    """Load the policy in BF16 with these weights. Rotary frequencies stay in FP32, as in an engine."""
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.bfloat16, attn_implementation="sdpa", use_safetensors=True
    )
    if weights is not None:
        unknown = model.load_state_dict(dict(weights), strict=False).unexpected_keys
        assert not unknown, unknown
    return model.eval()


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _saturating(engine: PreTrainedModel) -> Iterator[None]:
    """Store keys and values in E4M3 under a scale that is too small for the largest of them."""

    def store(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        room = output.abs().max() / _SATURATE
        scale = room.clamp(min=1e-12).float() / 448
        return ((output.clamp(-room, room) / scale).to(torch.float8_e4m3fn).float() * scale).to(output.dtype)

    caches = [module for name, module in engine.named_modules() if name.endswith((".k_norm", ".v_proj"))]
    handles = [module.register_forward_hook(store) for module in caches]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _sample(
    engine: PreTrainedModel, task: Task, num: int, seed: int, *, batch: int = 64, max_tokens: int = 256
) -> list[Sample]:
    """Sample responses to the task's next prompts, with the probabilities that the engine drew them with."""
    torch.manual_seed(seed)
    samples: list[Sample] = []
    while len(samples) < num:
        samples += _sample_batch(
            engine, [next(task.prompts) for _ in range(min(batch, num - len(samples)))], max_tokens
        )
    rewards = np.random.default_rng(seed).choice(
        [-1.0, 1.0], len(samples)
    )  # which way the policy moves does not matter here
    return [replace(sample, advantage=float(reward)) for sample, reward in zip(samples, rewards, strict=True)]


def _sample_batch(engine: PreTrainedModel, prompts: Sequence[Prompt], max_tokens: int) -> list[Sample]:
    """Sample one batch, padded on the left."""
    width = max(len(prompt.token_ids) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt.token_ids) :] = torch.from_numpy(prompt.token_ids.astype(np.int64))
        mask[row, width - len(prompt.token_ids) :] = 1
    made = engine.generate(  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        input_ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens_BT = made.sequences[:, width:]
    logp_BT = torch.stack(made.logits, 1).float().log_softmax(-1).gather(-1, tokens_BT[..., None])[..., 0]
    ends = engine.generation_config.eos_token_id  # pyright: ignore[reportOptionalMemberAccess]
    is_end_BT = torch.isin(tokens_BT, torch.tensor(ends).flatten())
    samples = []
    for row, prompt in enumerate(prompts):
        found = is_end_BT[row].nonzero()
        length = int(found[0]) + 1 if len(found) else tokens_BT.shape[1]
        samples.append(
            Sample(
                token_ids=np.concatenate([prompt.token_ids, tokens_BT[row, :length].numpy().astype(np.int32)]),
                num_prompt_tokens=len(prompt.token_ids),
                logp=logp_BT[row, :length].numpy(),
                advantage=0.0,
            )
        )
    return samples
