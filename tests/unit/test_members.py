"""Who is alive is said in one place, once for each loss, and never by an engine's predecessor."""

from __future__ import annotations

import pytest

from paceline.orchestrator.members import Members
from paceline.plan.simulate import SimulatedEngine


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


def test_an_engine_that_is_back_has_the_next_incarnation(members: Members) -> None:
    assert members.incarnation("a") == 0
    members.lose("a", "killed")
    assert members.join(engine("a")) == 1
    assert members.is_alive("a", incarnation=1) and not members.is_alive("a", incarnation=0)
    assert members.names == ["b", "a"]


def test_news_about_an_earlier_incarnation_is_ignored(members: Members) -> None:
    members.lose("a", "killed", incarnation=0)
    members.join(engine("a"))
    assert not members.lose("a", "a call to the first one timed out", incarnation=0)
    assert members.is_alive("a")
    assert members.lose("a", "killed", incarnation=1)


def test_names_are_unique_among_the_living(members: Members) -> None:
    with pytest.raises(AssertionError, match="alive"):
        members.join(engine("a"))
