"""The doctor's own logic, on made-up checks: one failure never hides another, and a skipped check never counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from contexts import make_context
from paceline import cli
from paceline.config import Config, load_config
from paceline.context import CancelledError
from paceline.doctor import examine as doctor
from paceline.doctor import machine
from paceline.doctor.check import Check, CheckOutcome, check, counts, failed, passed, run_checks, select, skipped, table
from paceline.doctor.page import write_doctor_page
from paceline.doctor.subject import Setup
from paceline.doctor.troubles import foreign_drafter
from paceline.drafters.checkpoint import read_parts
from paceline.drafters.provenance import Evaluation, read_evaluation, write_evaluation
from paceline.files import verify_checksums
from random_policy import make_drafter, make_policy

Seen = list[str]


@check("made up", advice="mend it", otherwise="the engine did not start")
def broken(seen: Seen) -> CheckOutcome:
    """It breaks."""
    raise RuntimeError(f"no <such> device in {Path.home()}/cache")


@check("made up", advice="never shown")
def absent(seen: Seen) -> CheckOutcome:
    """It is not there."""
    return skipped("no GPU here")


@check("made up", advice="turn it on", needs=(broken,))
def after_broken(seen: Seen) -> CheckOutcome:
    """It needs what is broken."""
    seen.append("after-broken")
    return passed("must not run")


@check("made up", advice="turn it on", needs=(after_broken,))
def after_after(seen: Seen) -> CheckOutcome:
    """It needs what needs what is broken."""
    return passed("must not run")


@check("made up", advice="turn it on", needs=(absent,))
def after_absent(seen: Seen) -> CheckOutcome:
    """It needs what is not there."""
    return passed("must not run")


@check("other", advice="general advice")
def wrong(seen: Seen) -> CheckOutcome:
    """It is wrong."""
    return failed("got 3; must be 4", "special advice")


@check("other", advice="never shown")
def right(seen: Seen) -> CheckOutcome:
    """It is right."""
    seen.append("right")
    return passed("4 of 4", widgets=4.0)


CHECKS: tuple[Check[Seen], ...] = (broken, absent, after_broken, after_after, after_absent, wrong, right)


def silent(line: str) -> None: ...


def test_an_exception_fails_its_check_by_name_and_the_others_run() -> None:
    seen: Seen = []
    results = {result.name: result for result in run_checks(CHECKS, seen, progress=silent)}
    assert list(results) == [check.name for check in CHECKS]
    assert (results["broken"].status, results["broken"].advice) == ("failed", "mend it")
    assert results["broken"].evidence == "RuntimeError: no <such> device in ~/cache", "the page goes to others"
    assert "raise RuntimeError" in results["broken"].traceback
    assert results["wrong"].advice == "special advice"
    assert results["right"].advice == "" and results["right"].figures == {"widgets": 4.0}
    assert seen == ["right"]


def test_what_needs_a_failed_check_is_skipped_and_says_why() -> None:
    results = {result.name: result for result in run_checks(CHECKS, [], progress=silent)}
    for name in ("after-broken", "after-after"):
        assert (results[name].status, results[name].evidence) == ("skipped", "the engine did not start")
    assert (results["after-absent"].status, results["after-absent"].evidence) == ("skipped", "no GPU here")


def test_cancelling_is_no_failure_of_a_check() -> None:
    @check("made up", advice="none")
    def cancelled(seen: Seen) -> CheckOutcome:
        """It is cancelled."""
        raise CancelledError("cancelled")

    with pytest.raises(CancelledError):
        run_checks([cancelled, right], [], progress=silent)


def test_progress_names_each_check_before_it_runs() -> None:
    lines: list[str] = []
    run_checks(CHECKS[-2:], [], progress=lines.append)
    assert lines == ["1/2 wrong: It is wrong", "2/2 right: It is right"]


def test_selection_brings_what_is_needed_in_order() -> None:
    assert select(CHECKS, ["right", "after-after"]) == [broken, after_broken, after_after, right]
    with pytest.raises(ValueError, match="did you mean after-absent"):
        select(CHECKS, ["after-absnt"])


def test_table_shows_failures_with_advice() -> None:
    results = run_checks(CHECKS, [], progress=silent)
    text = table(results)
    assert counts(results) == {"passed": 1, "failed": 2, "skipped": 4}
    assert "FAILED   wrong" in text and "passed   right" in text
    assert text.count("made up") == 1, "a part is named once"
    advice = text.partition("what to do next")[2]
    assert "mend it" in advice and "special advice" in advice and "turn it on" not in advice


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", CHECKS)
    monkeypatch.setattr(doctor, "Setup", lambda config, context, plant: Nothing())


class Nothing(list):
    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.usefixtures("made_up")
def test_skipped_checks_count_for_nothing() -> None:
    _, result = doctor.examine(Config(), make_context())
    assert {name: value for name, value in result.figures.items() if name != "seconds"} == {
        "checks": 3.0,
        "failed": 2.0,
        "skipped": 4.0,
    }
    assert (result.met("failed"), result.met("checks")) == (False, False), "3 checks say nothing about a machine"
    assert result.details["failed"] == ["broken", "wrong"]
    _, few = doctor.examine(Config(), make_context(), only=["right"])
    assert few.all_met and "checks" not in few.goals


@pytest.mark.usefixtures("made_up")
def test_page_shows_every_check_and_escapes_what_they_say(tmp_path: Path) -> None:
    results, result = doctor.examine(Config(), make_context())
    write_doctor_page(results, result, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(f"<th>{check.name}</th>" in page for check in CHECKS)
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
    assert cli.main(["doctor", "--plant", "gremlin"]) == 2


def test_every_check_has_a_title_and_advice_and_needs_only_what_comes_before() -> None:
    """A need that came later would be looked up before it has a result."""
    before: set[str] = set()
    for item in doctor.CHECKS:
        assert item.title and item.advice, item.name
        assert {need.name for need in item.needs} <= before, item.name
        assert item.name not in before
        before.add(item.name)


@pytest.mark.parametrize("version", ["2.9.1+cpu", "3.0.0", None])
def test_package_of_another_version_fails_by_name(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "requires", lambda _: ["torch<3,>=2.10", "missing; extra == 'dev'"])
    monkeypatch.setattr(machine, "installed", lambda _: {} if version is None else {"torch": version})
    outcome = machine.packages.function(cast("Setup", None))
    assert outcome.status == "failed"
    assert f"torch<3,>=2.10 (installed: {'none' if version is None else version})" in outcome.evidence


def test_packages_of_this_environment_pass() -> None:
    assert machine.packages.function(cast("Setup", None)).status == "passed"


def test_full_shared_memory_fails_and_names_what_it_cannot_hold(tmp_path: Path) -> None:
    config = Config.model_validate({"policy": {"model": str(tmp_path)}})
    make_policy(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    names = ["shared-memory-round-trip"]
    results, _ = doctor.examine(config, make_context(), only=names, plant="shared-memory")
    found = {result.name: result for result in results}
    assert found["shared-memory"].status == "failed" and "0.00 GB free" in found["shared-memory"].evidence
    assert "--shm-size" in found["shared-memory"].advice
    assert found["shared-memory-round-trip"].evidence == "no room in shared memory"
    results, result = doctor.examine(config, make_context(), only=names)
    assert result.figures["failed"] == 0, results


def test_foreign_drafter_passes_for_one_of_this_policy(tmp_path: Path) -> None:
    """Otherwise the preflight would find it, and not what it drafts."""
    drafter = make_drafter(make_policy(tmp_path / "policy"), tmp_path / "drafter")
    promised = Evaluation(overlap=(0.5,), divergence=(1.0,), accepted_length=(1.5,), num_tokens=10)
    write_evaluation(drafter, promised)
    foreign = foreign_drafter(drafter, tmp_path / "foreign")
    assert verify_checksums(foreign)
    assert read_parts(foreign, "eagle3", who="")[2] == read_parts(drafter, "eagle3", who="")[2]
    assert read_evaluation(foreign).accepted_length == (1.5,)
    assert (foreign / "model.safetensors").read_bytes() != (drafter / "model.safetensors").read_bytes()


def test_policy_that_is_not_there_is_a_failed_check(tmp_path: Path) -> None:
    config = Config.model_validate({"policy": {"model": str(tmp_path / "nothing")}})
    results, _ = doctor.examine(config, make_context(), only=["policy", "engine-starts"])
    found = {result.name: result for result in results}
    assert found["policy"].status == "failed" and "has no config.json" in found["policy"].evidence
    assert (found["engine-starts"].status, found["engine-starts"].evidence) == ("skipped", "there is no policy")


def test_setup_without_speculation_drafts_with_what_it_has(tmp_path: Path) -> None:
    """A checkpoint of one's own has no learned drafter; the engine is examined with n-grams then."""
    with Setup(Config.model_validate({"policy": {"model": str(tmp_path)}}), make_context()) as setup:
        assert setup.kind == "ngram"
        assert setup.speculation("ngram", hold=True).selector.kind == "fixed"
        assert setup.speculation("history", hold=False).selector.kind == "measured"


def test_a_drafter_that_the_run_will_train_is_not_looked_for(tmp_path: Path) -> None:
    """A config that `paceline train` accepts must not fail for a checkpoint that is called new."""
    settings = ["speculation.drafter.kind=eagle3", "speculation.drafter.path=new", "speculation.training.mode=idle"]
    with Setup(load_config(None, [*settings, f'policy.model="{tmp_path}"']), make_context()) as setup:
        assert setup.drafter("eagle3") is None and setup.kind == "ngram"


def test_every_check_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [item.name for item in doctor.CHECKS if f"`{item.name}`" not in page] == []
