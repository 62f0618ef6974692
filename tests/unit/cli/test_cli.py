"""The command line: what it does to the environment, how signals end it, and what it says when a part is missing."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import subprocess
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from contexts import arena_config, make_context
from letters import Letters
from paceline import cli
from paceline.cli.parser import Command
from paceline.config import Config, EngineConfig, HubData
from paceline.context import CancelledError, Context, RunInterruptedError
from paceline.orchestrator.task import load_task
from paceline.plan.request import Request
from paceline.types import PacelineError, Prompt


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is the test's own; what main sets in it is undone."""
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if "OFFLINE" not in key})


def replaced(monkeypatch: pytest.MonkeyPatch, run) -> None:
    """Replace every command by a `paceline report` that calls `run`."""
    monkeypatch.setattr(cli, "COMMANDS", (Command(words="report", help="", examples="", run=run),))


def test_hub_stays_reachable_and_the_users_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With HF_HUB_OFFLINE, `data.kind = "datasets"` would fail for everything that is not in the cache."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "1"
    replaced(monkeypatch, lambda options, context: 0)
    assert cli.main(["report"]) == 0
    assert not [key for key in os.environ if "OFFLINE" in key]
    assert (os.environ["VLLM_NO_USAGE_STATS"], os.environ["RAY_USAGE_STATS_ENABLED"]) == ("1", "1")


def test_dataset_directory_is_loaded_without_the_hub(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": text} for text in "abcd"]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))

    task = load_task(HubData(path=str(tmp_path / "data"), reward="operator:eq"), Letters(), seed=0, num_heldout=1)
    assert [prompt.text for prompt in task.heldout] == ["d"]
    assert {next(task.prompts).text for _ in range(3)} == {"a", "b", "c"}


def raise_sigterm(options: argparse.Namespace, context: Context) -> int:
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        assert context.cancelled.is_set()
        with pytest.raises(CancelledError):
            context.progress("still going")
    return 0


def interrupt(options: argparse.Namespace, context: Context) -> int:
    raise KeyboardInterrupt


def fail(options: argparse.Namespace, context: Context) -> int:
    raise PacelineError("the policy is on fire")


def full_disk(options: argparse.Namespace, context: Context) -> int:
    raise OSError(errno.ENOSPC, "No space left on device", "runs/arena/report.html")


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (full_disk, 2, "paceline: runs/arena/report.html: No space left on device; check"),
        (raise_sigterm, 143, "interrupted"),
        (interrupt, 130, "interrupted"),
        (fail, 2, "the policy is on fire"),
    ],
)
def test_exit_codes(command, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    before = signal.getsignal(signal.SIGTERM)
    replaced(monkeypatch, command)
    assert cli.main(["report"]) == code
    assert says in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("waits", [True, False], ids=["waits for it", "forgets it"])
def test_nothing_that_a_command_has_started_outlives_its_sigterm(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of a bench lived on for up to 25 s: as long as they took to start, or to say farewell."""
    monkeypatch.setattr(cli, "_FAREWELL_S", 0.1)
    stranger, started = subprocess.Popen(["sleep", "600"]), []

    def start_and_end(options: argparse.Namespace, context: Context) -> int:
        started.append(subprocess.Popen(["sleep", "600"]))
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            if waits:
                assert started[0].wait(60) == -signal.SIGKILL
        return 0

    try:
        replaced(monkeypatch, start_and_end)
        assert cli.main(["report"]) == 143
        assert started[0].wait(60) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize(
    ("number", "directory", "code", "says"),
    [
        (signal.SIGTERM, Path("runs/x"), 75, "resume with: paceline train --resume runs/x"),
        (signal.SIGINT, Path("runs/x"), 130, "resume with: paceline train --resume runs/x"),
        (signal.SIGTERM, None, 143, "it cannot be resumed"),
    ],
)
def test_an_interrupted_run_says_how_to_go_on_and_lets_a_cluster_see_it(
    number: signal.Signals, directory: Path | None, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from paceline.sessions import train

    def interrupted(config: object, context: Context, *, resume: Path | None = None) -> Path:
        raise RunInterruptedError(number, directory)

    monkeypatch.setattr(train, "run", interrupted)
    assert cli.main(["train", "configs/arena.toml", "--verbose"]) == code
    assert says in capsys.readouterr().err


def test_what_follows_resume_is_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.sessions import train

    (tmp_path / "state").mkdir()
    (tmp_path / "config.json").write_text(arena_config(["run.steps=3", "run.seed=7"]).model_dump_json())
    seen: list[Config] = []

    def note(config: Config, context: Context, *, resume: Path | None = None) -> Path:
        assert resume == tmp_path
        seen.append(config)
        raise RunInterruptedError(signal.SIGINT, None)

    monkeypatch.setattr(train, "run", note)
    cli.main(["train", "--resume", str(tmp_path), "run.steps=9", "--verbose"])
    assert [(config.run.steps, config.run.seed) for config in seen] == [(9, 7)]


def test_every_option_of_plan_reaches_the_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = "plan M --gpus 8xH100 --batch 64 --group-size 8 --lengths 10/20 --prompt-tokens 9 --drafter ngram"
    words += " --accepted-length 2.5 --trained-length 2.6 --tensor-parallel 2 --learner-gpus 4 --max-age 3"
    words += " --costs a.json --costs b.json"
    options = cli.parse(words.split())
    asked = Request(**{option.name: getattr(options, option.name) for option in fields(Request)})
    assert asked == Request(
        model="M",
        gpus="8xH100",
        batch=64,
        group_size=8,
        lengths="10/20",
        prompt_tokens=9,
        drafter="ngram",
        accepted_length=2.5,
        trained_length=2.6,
        tensor_parallel=2,
        learner_gpus=4,
        max_age=3,
        costs=[Path("a.json"), Path("b.json")],
    )
    fewest = cli.parse(["plan", "M", "--gpus", "8xH100", "--lengths", "10/20"])
    assert fewest.costs == [] and fewest.batch is None and fewest.drafter == "eagle3"


def test_plan_writes_its_answer(tmp_path: Path, capsys) -> None:
    command = ["plan", "Qwen3-8B", "--gpus", "8xH100", "--batch", "64", "--lengths", "500/1000"]
    assert cli.main([*command, "--json", str(tmp_path / "plan.json")]) == 0
    assert "speculation" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["figures"]


def test_certify_logp_starts_the_engine_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine with settings of its own making would pass for the user's: a certificate of something else."""
    from paceline.cli import certify
    from paceline.rollout.engine import VllmEngine

    async def refuse(name: str, model_path: Path, config: EngineConfig, **rest: object) -> VllmEngine:
        raise PacelineError(f"{config.dtype} {config.tensor_parallel_size} {config.max_num_seqs} {config.weights}")

    prompt = Prompt(id="p", text="", token_ids=np.arange(4, dtype=np.int32), row={})
    monkeypatch.setattr(certify, "_policy_and_prompts", lambda *_: (tmp_path, [prompt]))
    monkeypatch.setattr(VllmEngine, "start", refuse)
    settings = [f"rollout.engine.{setting}" for setting in ("tensor_parallel_size=2", "max_num_seqs=7", "weights=fp8")]
    assert cli.main(["certify", "logp", *settings]) == 2
    assert "float32 2 7 full" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "verification", "longest"),
    [
        ([], "coupled", 7),
        (["--draft-length", "4"], "coupled", 4),
        (["--verification", "standard"], "standard", 3),
        (["--without-shim"], "standard", 3),
        (['speculation.drafter={kind="ngram"}'], "standard", 7),
        (['speculation.drafter={kind="ngram"}', "--verification", "coupled"], "coupled", 7),
    ],
)
def test_certify_is_exact_unless_the_config_verifies_otherwise(
    words: list[str], verification: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.certify import engines

    def certify(model_path: Path, prompts: object, config: Config, **_: object) -> None:
        assert config.speculation is not None
        raise PacelineError(f"{config.speculation.verification} {config.speculation.max_draft_length}")

    monkeypatch.setattr(engines, "certify", certify)
    options = cli.parse(["certify", *words])
    with pytest.raises(PacelineError, match=f"^{verification} {longest}$"):
        options.command(options, make_context())


def test_every_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([*command.words.split(), "--help"])
        assert f"\n  paceline {command.words.split()[0]} " in capsys.readouterr().out.partition("\nexample")[2]


def test_certify_without_an_action_is_lossless_and_verbose_stands_anywhere() -> None:
    assert cli.parse(["certify", "--quick"]) == cli.parse(["certify", "lossless", "--quick"])
    for words in (["--verbose", "certify", "logp"], ["certify", "--verbose"], ["certify", "logp", "--verbose"]):
        assert cli.parse(words).verbose
    assert not cli.parse(["certify", "logp"]).verbose


@pytest.mark.parametrize(
    ("files", "override", "said"),
    [
        ([], [], "must be a run's directory"),
        (["config.json", "state/x"], ["learner.learning_rate=1"], "cannot change at a resume"),
        (["config.json"], [], "run.checkpoint_every=0"),
    ],
)
def test_what_cannot_go_on_is_refused_before_anything_starts(
    tmp_path: Path, files: list[str], override: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert cli.main(["train", "--resume", str(tmp_path), *override]) == 2
    assert said in capsys.readouterr().err
