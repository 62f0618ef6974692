"""Who is alive is said in one place, once for each loss, and never by an engine's predecessor."""

from __future__ import annotations

import pytest

from benchmarks.simulated import SimulatedEngine
from paceline.orchestrator.members import Members, incarnation_name, place_of


def engine(name: str) -> SimulatedEngine:
    return SimulatedEngine(name=name, length_of=lambda request: 1, max_num_seqs=1, seconds_per_token=0.0)


@pytest.fixture
def members() -> Members:
    return Members([engine("a"), engine("b")])


def test_a_loss_is_told_once_to_every_listener_in_their_order(members: Members) -> None:
    told: list[tuple[str, str, str]] = []
    members.on_lost(lambda name, why: told.append(("first", name, why)))
    members.on_lost(lambda name, why: told.append(("second", name, why)))
    assert members.lose("a", "froze")
    assert not members.lose("a", "froze again")
    assert told == [("first", "a", "froze"), ("second", "a", "froze")]
    assert members.names == ["b"] and [e.name for e in members.engines] == ["b"]


def test_a_listener_finds_the_engine_gone_already(members: Members) -> None:
    alive: list[bool] = []
    members.on_lost(lambda name, why: alive.append(members.is_alive(name)))
    members.lose("a", "killed")
    assert alive == [False]


def test_an_engine_that_takes_a_lost_ones_place_is_told_to_every_listener(members: Members) -> None:
    told: list[str] = []
    members.on_joined(lambda engine: told.append(engine.name))
    members.lose("a", "killed")
    members.join(engine("a#2"))
    assert told == ["a#2"] and members.names == ["b", "a#2"]


def test_news_about_an_earlier_life_is_ignored(members: Members) -> None:
    members.lose("a", "killed")
    members.join(engine("a#2"))
    assert not members.lose("a", "a call to the first one timed out")
    assert members.is_alive("a#2")


def test_no_name_is_used_twice_and_no_place_holds_two(members: Members) -> None:
    with pytest.raises(AssertionError, match="taken"):
        members.join(engine("a#2"))
    members.lose("a", "killed")
    with pytest.raises(AssertionError, match="unique"):
        members.join(engine("a"))


def test_there_is_hope_while_a_lost_engine_may_come_back(members: Members) -> None:
    told: list[bool] = []
    members.on_hopeless(lambda: told.append(members.hopeless))
    members.healed = True
    members.lose("a", "killed")
    members.lose("b", "killed")
    assert not members.hopeless
    members.give_up("a")
    assert not members.hopeless and not told
    members.give_up("b")
    assert told == [True]


def test_names_of_lives() -> None:
    assert [incarnation_name("engine-3", life) for life in (1, 2)] == ["engine-3", "engine-3#2"]
    assert {place_of(name) for name in ("engine-3", "engine-3#2", "engine-3#12")} == {"engine-3"}
