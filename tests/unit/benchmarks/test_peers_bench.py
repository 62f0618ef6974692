"""What our loop and TRL's are compared by, and that both are given the same work."""

from pathlib import Path

import pytest

from benchmarks.harness import ARENA, Record
from benchmarks.peers import _SETTINGS, PeerRun, average, compare, run, trl_settings
from benchmarks.step import WARMUP
from benchmarks.stock_trl.training import StepTimes, right_answer
from paceline.config import load_config
from paceline.context import Context


def peer(step_s: float, generation_s: float, num_tokens: float = 100.0) -> PeerRun:
    return PeerRun(step_s=step_s, generation_s=generation_s, sync_s=0.1, num_tokens=num_tokens, engine_steps=10)


def test_generation_is_compared_by_token_and_the_rest_by_step():
    """Sampled lengths differ: an arm whose answers happen to be short would look fast."""
    runs = {
        "trl": [peer(12, 8), peer(36, 24), peer(120, 80)],
        "paceline": [peer(4, 2, 50), peer(12, 6, 50), peer(40, 20, 50)],
    }
    record = Record()
    compare(record, runs)
    figures, spread = record.figures, record.spread
    assert figures["generation_over_trl"] == pytest.approx(2) and spread["generation_over_trl"] == pytest.approx(0)
    assert figures["rest_of_step_over_trl"] == pytest.approx(0.5)
    assert figures["step_over_trl"] == pytest.approx(3) and figures["tokens_over_trl"] == pytest.approx(0.5)
    assert (figures["rest_s_trl"], figures["rest_s_paceline"]) == (12, 6)


def test_first_steps_of_trl_do_not_count():
    slow = {"step_s": 100.0, "generation_s": 90.0, "sync_s": 9.0, "num_tokens": 1.0, "engine_steps": 1.0}
    counted = {"step_s": 4.0, "generation_s": 3.0, "sync_s": 0.5, "num_tokens": 50.0, "engine_steps": 20.0}
    assert average([slow] * WARMUP + [counted, counted]) == PeerRun(**counted)


def test_run_without_a_counted_step_is_refused_before_anything_starts(tmp_path: Path):
    context = Context(report=lambda line: None, cache_root=tmp_path)
    with pytest.raises(ValueError, match=r"run\.steps: got 3"):
        run([f"run.steps={WARMUP}"], context)
    assert list(tmp_path.iterdir()) == []


def test_override_holds_for_both_arms():
    """Arms with different work would be compared."""
    changed = ["run.steps=4", "run.seed=2", "data.seed=5", "rollout.prompts_per_step=2", "rollout.group_size=3"]
    changed += ["rollout.max_tokens=50", "learner.learning_rate=0.001", "rollout.engine.dtype=float32"]
    config = load_config(ARENA, [*_SETTINGS, *changed])
    settings = trl_settings(config, Path("policy"), Path("out"))
    grpo = settings.grpo
    assert (grpo["max_steps"], settings.num_prompts, grpo["num_generations"]) == (4, 8, 3)
    assert (grpo["max_completion_length"], grpo["learning_rate"], settings.engine_dtype) == (50, 0.001, "float32")
    assert (grpo["seed"], settings.data_seed) == (2, 7)


def test_microbatch_divides_the_batch():
    """TRL rounds down: rollouts that fill no pass would be left out of the update."""
    for prompts, group_size in ((3, 4), (5, 6), (16, 8)):
        settings = [f"rollout.prompts_per_step={prompts}", f"rollout.group_size={group_size}"]
        config = load_config(ARENA, [*_SETTINGS, *settings])
        grpo = trl_settings(config, Path("policy"), Path("out")).grpo
        microbatch = grpo["per_device_train_batch_size"]
        assert 1 <= microbatch <= 8 and microbatch * grpo["gradient_accumulation_steps"] == prompts * group_size


def test_step_tells_what_generation_took_of_it():
    times = StepTimes()
    generate = times.timed("generation", lambda prompts: (prompts, [[1, 2], [3]], None))
    times.timed("sync", lambda: None)()
    assert generate(["a", "b"])[0] == ["a", "b"]
    engine_step = times.counted(lambda: "outputs")
    assert [engine_step(), engine_step()] == ["outputs"] * 2
    step = times.end()
    assert (step["num_tokens"], step["engine_steps"]) == (3, 2)
    assert step["sync_s"] > 0 and 0 < step["generation_s"] < step["step_s"]
    again = times.end()
    assert again["num_tokens"] == again["engine_steps"] == 0, "the next step begins with nothing"


def test_reward_in_the_form_of_trl_is_the_arenas():
    """TRL passes columns of the dataset as lists, and more that nobody asked for."""
    completions = [" (1)+8 from 47 makes 55\n ####55", " ####54"]
    assert right_answer(["a", "b"], completions, answer=[55, 55], trainer_state=None) == [1.0, 0.0]
