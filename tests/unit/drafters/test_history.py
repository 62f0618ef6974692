"""The history drafter against a slow twin, and what engines leave for one another."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters import history_exchange as exchange_module
from paceline.drafters.history import MAX_GAP, MAX_PLACES, History, Record
from paceline.drafters.history_exchange import HistoryExchange, decode, encode

MIN_MATCH, MAX_MATCH, DRAFT_LENGTH, MAX_ROWS, WIDTH = 2, 6, 3, 6, 64


def make_history(capacity_mb: float = 1.0) -> History:
    return History(
        min_match=MIN_MATCH,
        max_match=MAX_MATCH,
        capacity_mb=capacity_mb,
        max_rows=MAX_ROWS,
        draft_length=DRAFT_LENGTH,
        vocabulary_size=100,
    )


class SlowHistory:
    """The same drafter in plain Python: told which request is which, one list per rollout, chains as lists."""

    def __init__(self) -> None:
        self.rollouts: dict[int, list[int]] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.chains: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)

    def hang(self, request: int, index: int) -> None:
        tokens = self.rollouts[request]
        if index + 1 >= MIN_MATCH:
            self.chains[self.prompts[request], tuple(tokens[index + 1 - MIN_MATCH : index + 1])].append(
                (request, index)
            )

    def observe(self, request: int, prompt: list[int], tokens: list[int]) -> None:
        if request not in self.rollouts:
            self.prompts[request], self.rollouts[request] = tuple(prompt), list(prompt)
            known = self.chains[tuple(prompt), tuple(prompt[-MIN_MATCH:])]
            for index in range(len(prompt) - 1 if known else 0, len(prompt)):
                self.hang(request, index)
        held = self.rollouts[request]
        for token in tokens[len(held) :]:
            held.append(token)
            self.hang(request, len(held) - 1)

    def vote(self, prompt: tuple[int, ...], context: list[int]) -> int | None:
        votes: dict[int, float] = defaultdict(float)
        for gap in range(MAX_GAP + 1):
            cut = context[: len(context) - gap]
            places = []
            for request, index in reversed(
                self.chains[prompt, tuple(cut[-MIN_MATCH:])] if len(cut) >= MIN_MATCH else []
            ):
                tokens, end = self.rollouts[request], index + gap
                if end + 1 >= len(tokens):
                    continue
                reach = min(MAX_MATCH, len(context), end + 1)
                equal = [tokens[end - j] == context[-1 - j] for j in range(reach)]
                gaps = [j for j in range(reach - MIN_MATCH + 1) if all(equal[j : j + MIN_MATCH])]
                if gaps and gaps[0] == gap:
                    places.append((tokens[end + 1], sum(equal)))
            for token, agreement in places[:MAX_PLACES]:
                votes[token] += 2.0 ** (agreement - 2 * gap)
        return max(votes, key=lambda token: votes[token]) if votes else None

    def draft(self, request: int) -> list[int]:
        context, draft = list(self.rollouts[request]), []
        while len(draft) < DRAFT_LENGTH and (token := self.vote(self.prompts[request], context)) is not None:
            draft.append(token)
            context.append(token)
        return draft


class Batch:
    """Rows as vLLM keeps them: reused, moved, with rubbish behind the tokens."""

    def __init__(self) -> None:
        self.token_ids = np.full((MAX_ROWS, WIDTH), 77, np.int32)
        self.num_tokens = np.zeros(MAX_ROWS, np.int32)

    def propose(self, history: History, rows: list[tuple[list[int], int]]) -> list[list[int]]:
        """Each row is its tokens and how many of them are new."""
        for row, (tokens, _) in enumerate(rows):
            self.token_ids[row, : len(tokens)] = tokens
            self.num_tokens[row] = len(tokens)
        return history.propose(np.array([new for _, new in rows], np.int64), self.num_tokens, self.token_ids)


def replay(history: History, prompt: list[int], response: list[int]) -> None:
    """One request alone in the batch, a token at a time."""
    batch = Batch()
    for length in range(1, len(response) + 1):
        batch.propose(history, [(prompt + response[:length], 1)])


@settings(max_examples=60)
@given(st.data())
def test_drafts_equal_those_of_the_slow_twin(data: st.DataObject) -> None:
    """Rows start, move, pause, end and are reused at random; every draft must be the one that plain lists give."""
    history, slow, batch = make_history(8.0), SlowHistory(), Batch()
    token = st.integers(0, 2)
    tokens: dict[int, list[int]] = {}
    prompts = {group: [10 + group, *data.draw(st.lists(token, min_size=1, max_size=9))] for group in range(2)}
    prompt_of: dict[int, list[int]] = {}
    running: list[int] = []
    for _ in range(data.draw(st.integers(3, 14))):
        if len(running) < MAX_ROWS and data.draw(st.booleans()):
            request = len(tokens)
            prompt_of[request] = prompts[data.draw(st.integers(0, 1))]
            tokens[request] = list(prompt_of[request])
            running.append(request)
        if running and data.draw(st.booleans()):
            running.pop(data.draw(st.integers(0, len(running) - 1)))
        running = data.draw(st.permutations(running))
        new = [data.draw(st.lists(token, min_size=1, max_size=DRAFT_LENGTH + 1)) for _ in running]
        rows = []
        for request, sampled in zip(running, new, strict=True):
            tokens[request] += sampled
            rows.append((tokens[request], len(sampled)))
            slow.observe(request, prompt_of[request], tokens[request])
        drafts = batch.propose(history, rows)
        assert drafts == [slow.draft(request) for request in running]


def test_second_epoch_is_drafted_from_the_first() -> None:
    history = make_history()
    prompt, response = [1, 2, 3], list(range(10, 30))
    replay(history, prompt, response)
    assert Batch().propose(history, [(prompt + response[:5], 5)]) == [response[5 : 5 + DRAFT_LENGTH]]


def test_other_prompts_are_not_asked() -> None:
    """The same tokens after another prompt mean something else: a draft from there would be a wrong answer's."""
    history = make_history()
    replay(history, [1, 2, 3], list(range(10, 30)))
    assert Batch().propose(history, [([1, 2, 4, 10, 11, 12], 3)]) == [[]]


def test_a_sampled_synonym_does_not_lose_the_thread() -> None:
    history = make_history()
    replay(history, [1, 2, 3], [10, 11, 12, 13, 14, 15, 16])
    assert Batch().propose(history, [([1, 2, 3, 10, 11, 50], 3)]) == [[13, 14, 15]]


def test_many_agreeing_rollouts_outvote_a_slightly_longer_match() -> None:
    history = make_history()
    for _ in range(5):
        replay(history, [1, 2, 3], [20, 10, 11, 12])
    replay(history, [1, 2, 3], [21, 10, 11, 40])
    assert Batch().propose(history, [([1, 2, 3, 21, 10, 11], 3)])[0][0] == 12


def test_newer_rollouts_replace_older_ones() -> None:
    """The policy has moved: after MAX_PLACES rollouts that say something else, what it said before must be
    forgotten."""
    history = make_history()
    for _ in range(MAX_PLACES):
        replay(history, [1, 2, 3], [10, 11, 12])
    for _ in range(MAX_PLACES):
        replay(history, [1, 2, 3], [10, 11, 40])
    assert Batch().propose(history, [([1, 2, 3, 10, 11], 2)])[0][0] == 40


def test_siblings_in_flight_help_at_once() -> None:
    history, batch = make_history(), Batch()
    ahead, behind = [1, 2, 3, 10, 11, 12, 13], [1, 2, 3, 10]
    assert batch.propose(history, [(ahead, 4), (behind, 1)])[1] == [11, 12, 13]


def test_tokens_that_were_not_shown_are_caught_up() -> None:
    """Near max_model_len vLLM skips the drafter for some steps; the row then has more new tokens than it says."""
    history, batch = make_history(), Batch()
    batch.propose(history, [([1, 2, 3, 10, 11], 2)])
    batch.propose(history, [([1, 2, 3, 10, 11, 12, 13, 14], 1)])
    assert Batch().propose(history, [([1, 2, 3, 10], 1)]) == [[11, 12, 13]]


def test_a_row_without_new_tokens_waits_for_its_prompt() -> None:
    """Taken at once, half a prompt would be a prompt of its own, and its rollout would find no sibling."""
    history, batch = make_history(), Batch()
    replay(history, [1, 2, 3, 4], [10, 11, 12, 13])
    assert batch.propose(history, [([1, 2], 0)]) == [[]]
    assert batch.propose(history, [([1, 2, 3, 4, 10], 1)]) == [[11, 12, 13]]


def test_no_draft_beyond_the_longest_sequence() -> None:
    history = make_history()
    response = list(range(WIDTH - 3))
    replay(history, [1, 2, 3], response)
    assert Batch().propose(history, [([1, 2, 3, *response[:-1]], len(response) - 1)]) == [response[-1:]]


def test_memory_is_bounded_and_the_oldest_leave() -> None:
    """Overwritten pages must never be read as if they were still what a chain points to."""
    history = make_history(capacity_mb=0.01)  # 8 pages
    rng = np.random.default_rng(0)
    for prompt in range(200):
        response = rng.integers(0, 50, 40).tolist()
        replay(history, [60, prompt % 100, 61], response)
        assert Batch().propose(history, [([60, prompt % 100, 61, *response[:20]], 20)]) == [response[20:23]]
    assert Batch().propose(history, [([60, 0, 61, 5, 6, 7], 3)]) == [[]]


@pytest.mark.parametrize(("rows", "length", "width"), [(MAX_ROWS + 1, 5, WIDTH), (1, WIDTH + 1, WIDTH), (1, 0, WIDTH)])
def test_rows_that_do_not_fit_are_refused(rows: int, length: int, width: int) -> None:
    """Compiled code would write past its arrays, and the worker would die of it or, worse, not."""
    with pytest.raises(ValueError, match="token_ids: got shape"):
        make_history().propose(
            np.ones(rows, np.int64), np.full(rows, length, np.int32), np.zeros((rows, width), np.int32)
        )


def test_settings_that_cannot_match_are_refused() -> None:
    with pytest.raises(ValueError, match="min_match: got 3; must be from 1 to max_match"):
        History(min_match=3, max_match=2, capacity_mb=1, max_rows=1, draft_length=1, vocabulary_size=9)


def test_finished_rollouts_carry_over_to_another_engine() -> None:
    first, second, batch = make_history(), make_history(), Batch()
    prompt, response = [1, 2, 3], list(range(10, 30))
    batch.propose(first, [(prompt + response, len(response))])
    assert first.take_finished() == [], "it is still running"
    batch.propose(first, [])
    (record,) = first.take_finished()
    assert first.take_finished() == [], "handed out once"
    assert record.token_ids.tolist() == prompt + response
    assert record.num_context == len(prompt)
    second.add(record)
    assert Batch().propose(second, [([*prompt, 10], 1)]) == [[11, 12, 13]]


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    """The policy would look them up in its embedding and die."""
    for bad in ([], [1, 100], [-1, 5]):
        with pytest.raises(ValueError, match="token_ids"):
            make_history().add(Record(prompt=1, num_context=1, token_ids=np.array(bad, np.int32)))


def records(*lengths: int) -> list[Record]:
    return [Record(prompt=2**63 + n, num_context=1, token_ids=np.arange(n, dtype=np.int32) % 100) for n in lengths]


def plain(found: list[Record]) -> list[tuple[int, int, list[int]]]:
    return [(record.prompt, record.num_context, record.token_ids.tolist()) for record in found]


def make_exchange(directory: Path, capacity_mb: float = 1.0) -> HistoryExchange:
    return HistoryExchange(directory, vocabulary_size=100, capacity_mb=capacity_mb)


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "PERIOD_S", 0.0)


@pytest.mark.usefixtures("no_wait")
def test_every_other_engine_gets_each_rollout_once(tmp_path: Path) -> None:
    first, second = make_exchange(tmp_path), make_exchange(tmp_path)
    first.put(records(3, 5))
    assert first.take() == [], "an engine does not read its own"
    assert plain(second.take()) == plain(records(3, 5))
    assert second.take() == []
    assert plain(make_exchange(tmp_path).take()) == plain(records(3, 5)), "one that starts later too"


@pytest.mark.usefixtures("no_wait")
def test_one_call_reads_one_file_and_files_are_small(tmp_path: Path) -> None:
    first, second = make_exchange(tmp_path), make_exchange(tmp_path)
    first.put(records(10_000, 10_000, 40_000))
    first.take()
    assert [[len(record.token_ids) for record in second.take()] for _ in range(4)] == [[10_000], [10_000], [40_000], []]


@pytest.mark.usefixtures("no_wait")
def test_only_the_owner_can_read_what_engines_share(tmp_path: Path) -> None:
    exchange = make_exchange(tmp_path / "shared")
    exchange.put(records(5))
    exchange.take()
    (file,) = (tmp_path / "shared").iterdir()
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.usefixtures("no_wait")
def test_damaged_files_are_skipped_and_counted(tmp_path: Path) -> None:
    whole = encode(records(5), 100)
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    for index, content in enumerate(
        (b"", whole[:-2], bytes(flipped), b"something else", encode(records(5), 99), whole)
    ):
        (tmp_path / f"{index}-x.rollouts").write_bytes(content)
    exchange = make_exchange(tmp_path)
    found = [record for _ in range(7) for record in exchange.take()]
    assert plain(found) == plain(records(5))
    assert exchange.num_broken == 5


@pytest.mark.usefixtures("no_wait")
def test_the_directory_is_bounded(tmp_path: Path) -> None:
    exchange = make_exchange(tmp_path, capacity_mb=0.1)
    for _ in range(20):
        exchange.put(records(9_000))
        exchange.take()
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert 0 < sum(sizes) <= 0.1 * 2**20
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "words",
    [
        [100, 0, 0, 0],
        [100, 0, 0, 1, 0],
        [100, 0, 0, 3, 2, 5, 5],
        [100, 0, 0, 0, 2, 5, 100],
        [100, 0, 0, 0, 9, 1],
        [100, 0, 0, 0, -1],
    ],
)
def test_a_record_that_cannot_be_is_refused_although_its_checksum_is_right(words: list[int]) -> None:
    import xxhash

    body = np.array(words, "<i4").tobytes()
    with pytest.raises(ValueError, match="rollouts"):
        decode(b"paceline-history" + xxhash.xxh3_64_digest(body) + body, 100)
