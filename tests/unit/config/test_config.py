"""What a user may write in a config, and what the error says when it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from contexts import arena_config
from paceline.config import Config, EngineConfig, HubData, JsonlData, load_config


def parsed(overrides: Sequence[str] = ()) -> Config:
    return load_config(overrides=["policy.model=Qwen/Qwen3-8B", *overrides])


def test_run_without_a_model_names_the_line_to_add(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^policy\.model: is missing; add this line") as caught:
        load_config(overrides=["run.steps=3"])
    line = str(caught.value).splitlines()[-1]
    file = tmp_path / "a.toml"
    file.write_text(f"{line}\n[run]\nsteps = 3\n")
    assert load_config(file).policy.model == load_config(overrides=[line]).policy.model == "Qwen/Qwen3-8B"


def test_defaults_are_not_the_arenas():
    """A run of a real model must not inherit the lengths, batch or precision of a toy."""
    real, arena = parsed(), arena_config()
    assert real.data is None
    for key in ("num_engines", "prompts_per_step", "max_tokens"):
        assert getattr(real.rollout, key) != getattr(arena.rollout, key), key
    for key in ("world_size", "dtype", "learning_rate", "microbatch_tokens"):
        assert getattr(real.learner, key) != getattr(arena.learner, key), key
    assert real.rollout.engine.max_model_len > real.rollout.max_tokens


def test_override_beats_the_file_and_the_file_beats_the_default(tmp_path: Path):
    file = tmp_path / "a.toml"
    file.write_text("policy.model = 'm'\n[run]\nsteps = 7\nseed = 3\n[rollout.engine]\nmax_num_seqs = 9\n")
    config = load_config(file, ["run.steps=11"])
    assert (config.run.steps, config.run.seed, config.rollout.engine.max_num_seqs, config.run.max_age) == (11, 3, 9, 0)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("run.steps=12", lambda c: c.run.steps, 12),
        ("learner.learning_rate=3e-5", lambda c: c.learner.learning_rate, 3e-5),
        ("objective.drop_uniform_groups=false", lambda c: c.objective.drop_uniform_groups, False),
        ("policy.model=arena:tiny", lambda c: c.policy.model, "arena:tiny"),
        ("policy.model=models/a=b", lambda c: c.policy.model, "models/a=b"),
        ('run.name="7"', lambda c: c.run.name, "7"),
        ("run.sinks=[]", lambda c: c.run.sinks, ()),
        ("learner.betas=[0.8, 0.9]", lambda c: c.learner.betas, (0.8, 0.9)),
        ("rollout.engine.compile=true", lambda c: c.rollout.engine.compile, True),
        ("run.directory=elsewhere/runs", lambda c: c.run.directory, Path("elsewhere/runs")),
        (" run.steps = 5 ", lambda c: c.run.steps, 5),
    ],
)
def test_override_is_read_as_toml_and_else_as_text(override: str, read, value: object):
    found = read(parsed([override]))
    assert found == value
    assert type(found) is type(value)


def test_kind_of_data_chooses_its_settings():
    config = parsed(["data.kind=jsonl", "data.path=a.jsonl", "data.reward=reward.py:score"])
    assert config.data == JsonlData(path=Path("a.jsonl"), reward="reward.py:score")


def test_another_kind_drops_the_files_keys_that_it_does_not_have(tmp_path: Path):
    file = tmp_path / "a.toml"
    file.write_text("policy.model = 'm'\n[data]\nkind = 'jsonl'\npath = 'a'\neval_path = 'b'\nreward = 'r.py:f'\n")
    config = load_config(file, ["data.split=test", "data.kind=datasets"])
    assert config.data == HubData(path="a", split="test", reward="r.py:f")
    with pytest.raises(ValueError, match=r"^data\.eval_path: unknown key"):
        load_config(file, ["data.eval_path=c", "data.kind=datasets"])


def test_arena_file_takes_another_kind_of_data():
    data = ["data.kind=jsonl", "data.path=a.jsonl", "data.reward=reward.py:score"]
    assert arena_config(data).data == JsonlData(path=Path("a.jsonl"), reward="reward.py:score")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.stepz=3"], r"^run\.stepz: unknown key; did you mean run\.steps\?$"),
        (
            ["rollout.engine.max_num_seq=3"],
            r"^rollout\.engine\.max_num_seq: unknown key; did you mean rollout\.engine\.max_num_seqs\?$",
        ),
        (["quantum=3"], r"^quantum: unknown key$"),
        (["run.steps=0"], r"^run\.steps: got 0; input should be greater than or equal to 1$"),
        (["run.steps=many"], r"^run\.steps: got 'many'; input should be a valid integer"),
        (["rollout.top_p=0.9"], r"^rollout\.top_p: unknown key"),
        (["speculation.max_draft_length=3"], r"^speculation\.drafter: is missing; must be set$"),
        (
            ["speculation.drafter.capacity_mb=3"],
            r"^speculation\.drafter\.kind: is missing; must be one of ngram, history, eagle3, dflash, vllm$",
        ),
        (
            ["speculation.drafter.kind=ngram", "speculation.selector.kind=fixed"],
            r"^speculation\.selector\.draft_length: is missing; must be set$",
        ),
        (["speculation.drafter.kind=eagle3"], r"^speculation\.drafter\.path: is missing; must be a checkpoint, or"),
        (
            ["speculation.drafter.kind=eagle3", "speculation.drafter.path=a", "speculation.drafter.init=random"],
            r"^speculation\.drafter\.path: got 'a' with init 'random'; must be left out",
        ),
        (
            ["speculation.drafter.kind=eagle3", "speculation.drafter.init=random"],
            r"^speculation\.drafter\.init: got 'random' with speculation\.training\.mode 'off'; must be",
        ),
        (
            [
                "speculation.drafter.kind=eagle3",
                "speculation.drafter.init=random",
                "speculation.training.mode=idle",
                "run.max_age=1",
            ],
            r"^speculation\.drafter\.init: got 'random' with run\.max_age 1; must be 'checkpoint' because",
        ),
        (["data.kind=jsonl", "data.reward=a.py:b"], r"^data\.path: is missing; must be set$"),
        (["data.kind=arena", "data.seeed=1"], r"^data\.seeed: unknown key; did you mean data\.seed\?$"),
        (["data.seed=1"], r"^data\.kind: is missing; must be one of arena, jsonl, datasets$"),
        (["run=3"], r"^run: got 3; "),
        (
            ["speculation.drafter.kind=ngram", "speculation.training.mode=idle"],
            r"^speculation\.training\.mode: got 'idle' with drafter\.kind 'ngram'; must be off because",
        ),
        (["rollout.temperature=inf"], r"^rollout\.temperature: got inf; input should be a finite number$"),
        (["learner.learning_rate=nan"], r"^learner\.learning_rate: got nan; input should be a finite number$"),
        (["learner.betas=[0.9, inf]"], r"^learner\.betas\.1: got inf; input should be a finite number$"),
        (["learner.betas=[5, -1]"], r"^learner\.betas: got \[5\.0, -1\.0\]; must be from 0 to below 1 because"),
        (["learner.betas=[0.9, 1]"], r"^learner\.betas: got \[0\.9, 1\.0\]; must be"),
        *(
            ([f'run.name="{name}"'], r"^run\.name: got .*; must be letters, digits")
            for name in ("../x", "a/b", "..", ".hidden", "", "-rf", "a b", "a\\n", "a\\u0000", "\u00e9")
        ),
        (["run.name=" + "x" * 101], r"^run\.name: got .*; string should have at most 100 characters$"),
        (["run.steps=3", "run.steps.x=3"], r"^override: 'run\.steps\.x' goes through 'steps', which is a value$"),
        (["run.steps"], r"^override: got 'run\.steps'; must be a\.b=value$"),
        (["=3"], r"^override: got '=3'; must be a\.b=value$"),
    ],
)
def test_error_names_the_key_as_the_user_writes_it(overrides: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        parsed(overrides)


def test_every_wrong_key_is_told_at_once():
    with pytest.raises(ValueError, match=r"run\.steps: got -1.*\nrollout\.group_size: got 0"):
        parsed(["run.steps=-1", "rollout.group_size=0"])


def test_missing_file_and_broken_file_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"config: got .*nowhere\.toml; must be a TOML file"):
        load_config(tmp_path / "nowhere.toml")
    (tmp_path / "broken.toml").write_text("[run\n")
    with pytest.raises(ValueError, match=r"config: .*broken\.toml is not TOML: .*line 1"):
        load_config(tmp_path / "broken.toml")


def test_config_cannot_change_during_a_run():
    config = parsed()
    with pytest.raises(ValidationError, match="frozen"):
        config.run.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_resolved_config_makes_the_same_config_again():
    config = parsed(["run.steps=3", "data.kind=jsonl", "data.path=a.jsonl", "data.reward=a.py:b"])
    assert type(config).model_validate_json(config.model_dump_json()) == config


def test_fp8_cache_is_always_recomputed() -> None:
    """New scales would misread what the old ones wrote, and every later token of the rollout with it."""
    with pytest.raises(ValueError, match="recompute_kv_at_sync: got false with kv_cache 'fp8'"):
        EngineConfig(kv_cache="fp8", recompute_kv_at_sync=False)


def test_engines_compile_on_gpus_by_default_as_plan_assumes() -> None:
    """`paceline plan` promises step times inside graphs."""
    assert EngineConfig().compiles(gpu=True) and not EngineConfig().compiles(gpu=False)
    assert EngineConfig(compile=True).compiles(gpu=False) and not EngineConfig(compile=False).compiles(gpu=True)
