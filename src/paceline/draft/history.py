"""Model-free drafter: what a prompt's sibling rollouts and its rollouts of earlier epochs said next.

In RL the same prompt is answered many times: by the rollouts of its group in this step, and again in every later epoch. This index
remembers those responses and proposes the continuation that they agree on. It is exact in the sense of speculative sampling: a
proposal is a one-hot draft that the policy accepts with its own probability, so a bad one costs time and nothing else.

**Which token is proposed.** The best one-hot draft is the argmax of the policy at this context, and the index has to guess it from
few samples drawn at temperature 1. A longest-suffix match (SuffixDecoding, arXiv:2411.04975) is misled by one sampled synonym: "16
gives" has never been seen although "16 yields 11" has been, eight times. So a match may have holes. A *place* in an earlier rollout
of the same prompt is a candidate if `min_match` tokens in a row agree with the context and end at most `MAX_GAP` tokens before its
end; the token that follows the place gets

    2 ** (agreement - 2 * gap)        agreement = equal tokens among the last `max_match`, compared place by place

votes, and the token with most votes is proposed, the newest place winning a tie. Then the proposed token joins the context and the
next one is voted for. Only the newest `MAX_PLACES` places are asked: the policy moves, and old rollouts describe an old policy.
Replayed on two epochs of the arena (k = 4) the accepted length is 2.2 for the longest match, 2.7 with gaps, and 2.9 with holes.

**Where rollouts live.** A ring of pages of tokens; a rollout takes one page after the other while it runs, so that siblings profit
at once, and the oldest page is overwritten when a new one is needed. Every place hangs in a chain of places with the same last
`min_match` tokens and the same prompt, newest first, as in LZ77 compressors:

    heads[hash(prompt, last tokens)] ──▶ place ──older──▶ place ──older──▶ ... until a page that was overwritten

Positions only grow (page number times page size), so a stale pointer is seen by its number, and nothing is ever deleted or moved.

**Whose tokens these are.** The caller sees rows of a batch, not requests: rows are moved and reused without a word. A row is known
again by its length and its last tokens (`_continues`). Two requests that cannot be told apart by these have the same last tokens,
and then the index, which never looks back further than `max_match`, does not care which is which. A row that is nobody's
continuation is a new request; it has just got its first tokens, and what is before them is its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

_PAGE_BITS = 6
PAGE = 1 << _PAGE_BITS
MAX_GAP = 2
MAX_PLACES = 32  # per gap; with 16 the accepted length falls by 2 %, and with 64 it hardly rises
_TAIL = 32  # tokens by which a row is known again; at least max_match where that is larger
_BYTES_PER_TOKEN = 4 + 8 + 8 + 1  # token, older and a head for each, and a share of what a page needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A rollout as engines hand it on: `num_context` tokens of its prompt, then its response."""

    prompt: int
    """Hash of the whole prompt; the same in every process."""
    num_context: int
    token_ids: np.ndarray


class _Pages(NamedTuple):
    """The ring. A position is `page number * PAGE + offset`; page numbers start at 1, so that position 0 is nowhere."""

    tokens: np.ndarray  # int32, a slot for each position modulo the size of the ring
    older: np.ndarray  # int64, likewise: the place before this one in its chain
    heads: np.ndarray  # int64: the newest place of each chain
    prompt: np.ndarray  # uint64, by page
    before: np.ndarray  # int64, by page: number of the page before it in the same rollout, or 0
    after: np.ndarray  # int64, likewise
    fill: np.ndarray  # int64, by page: tokens in it
    newest: np.ndarray  # int64, one element: number of the newest page


class _Rollouts(NamedTuple):
    """Requests that are running or have left the batch lately: a preempted one comes back."""

    prompt: np.ndarray  # uint64
    length: np.ndarray  # int64: tokens, prompt included; 0 is a free entry
    position: np.ndarray  # int64: of its last token
    tail: np.ndarray  # int32, by rollout and token: the last ones
    seen: np.ndarray  # int64: number of the step in which a row last continued it
    unshared: np.ndarray  # int64: tokens that `take_finished` has not handed out


class _Scratch(NamedTuple):
    """What a vote writes on, allocated once."""

    context: np.ndarray  # int32: the last tokens of a row and the draft so far
    candidates: np.ndarray  # int32
    votes: np.ndarray  # float64, by candidate
    powers: np.ndarray  # float64: of two


class History:
    """The index and the rows that feed it. One call of `propose` per engine step, in one thread."""

    def __init__(
        self, *, min_match: int, max_match: int, capacity_mb: float, max_rows: int, draft_length: int, vocabulary_size: int
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match: got {min_match}; must be from 1 to max_match ({max_match}) because it is the shorter one")
        # A power of two, so that slots are found by a mask.
        num_pages = 1 << max(2, (int(capacity_mb * 2**20) // (_BYTES_PER_TOKEN * PAGE)).bit_length() - 1)
        self._min_match, self._max_match = min_match, max_match
        self._vocabulary_size = vocabulary_size
        # Zeros are given out by the system when they are first touched: an index costs what is in it.
        self._pages = _Pages(
            tokens=np.zeros(num_pages * PAGE, np.int32),
            older=np.zeros(num_pages * PAGE, np.int64),
            heads=np.zeros(num_pages * PAGE, np.int64),
            prompt=np.zeros(num_pages, np.uint64),
            before=np.zeros(num_pages, np.int64),
            after=np.zeros(num_pages, np.int64),
            fill=np.zeros(num_pages, np.int64),
            newest=np.zeros(1, np.int64),
        )
        num_entries = 2 * max_rows
        self._rollouts = _Rollouts(
            prompt=np.zeros(num_entries, np.uint64),
            length=np.zeros(num_entries, np.int64),
            position=np.zeros(num_entries, np.int64),
            tail=np.zeros((num_entries, max(_TAIL, max_match)), np.int32),
            seen=np.zeros(num_entries, np.int64),
            unshared=np.zeros(num_entries, np.int64),
        )
        self._step = 0
        self._entry_of_row = np.full(max_rows, -1, np.int64)
        self._scratch = _Scratch(
            context=np.zeros(max_match + MAX_GAP + draft_length, np.int32),
            candidates=np.zeros((MAX_GAP + 1) * MAX_PLACES, np.int32),
            votes=np.zeros((MAX_GAP + 1) * MAX_PLACES),
            powers=2.0 ** np.arange(max_match + 2 * MAX_GAP + 1),
        )
        self._drafts = np.zeros((max_rows, draft_length), np.int32)
        self._num_drafts = np.zeros(max_rows, np.int64)

    def propose(self, num_sampled: np.ndarray, num_tokens: np.ndarray, token_ids: np.ndarray) -> list[list[int]]:
        """Take in what each row has got since the last call, and draft for it.

        Row i holds `num_tokens[i]` tokens, of which `num_sampled[i]` are new; a row without new ones (its prompt is not yet read)
        is left alone and gets no draft. Rows may have moved since the last call.
        """
        self._check(num_sampled, num_tokens, token_ids)
        self._step += 1
        num_rows = len(num_sampled)
        entry_of_row = self._entry_of_row
        _observe(self._pages, self._rollouts, entry_of_row, self._step, num_sampled, num_tokens, token_ids, self._min_match)
        _draft_rows(
            self._pages,
            self._rollouts,
            entry_of_row[:num_rows],
            num_tokens,
            token_ids,
            self._min_match,
            self._max_match,
            self._scratch,
            self._drafts,
            self._num_drafts,
        )
        drafts, counts = self._drafts[:num_rows].tolist(), self._num_drafts[:num_rows].tolist()
        return [draft[:count] for draft, count in zip(drafts, counts, strict=True)]

    def _check(self, num_sampled: np.ndarray, num_tokens: np.ndarray, token_ids: np.ndarray) -> None:
        """Compiled code does not look where it writes."""
        num_rows = len(num_sampled)
        lengths = num_tokens[:num_rows]
        shaped = token_ids.ndim == 2 and num_rows <= min(len(token_ids), len(num_tokens), len(self._entry_of_row))
        if not shaped or (lengths < num_sampled).any() or (lengths > token_ids.shape[1]).any():
            raise ValueError(
                f"token_ids: got shape {token_ids.shape} for {num_rows} rows of up to {lengths.max(initial=0)} tokens; must be a "
                f"matrix that holds them, of at most {len(self._entry_of_row)} rows, because the index was built for these"
            )

    def take_finished(self) -> list[Record]:
        """The rollouts that left the batch in the last call of `propose`; of one that came back, only what is new."""
        rollouts = self._rollouts
        records = []
        for entry in np.flatnonzero((rollouts.seen == self._step - 1) & (rollouts.unshared > 0)):
            wanted = int(rollouts.unshared[entry])
            token_ids = _read(self._pages, rollouts.position[entry], wanted + self._max_match)
            rollouts.unshared[entry] = 0
            if len(token_ids) > wanted:  # else the ring has already overwritten its start
                prompt = int(rollouts.prompt[entry])
                records.append(Record(prompt=prompt, num_context=len(token_ids) - wanted, token_ids=token_ids))
        return records

    def add(self, record: Record) -> None:
        """Take in a rollout of another engine. A token that the policy does not have would kill the engine that verifies it."""
        token_ids = np.ascontiguousarray(record.token_ids, np.int32)
        if token_ids.size == 0 or token_ids.min() < 0 or token_ids.max() >= self._vocabulary_size:
            raise ValueError(f"token_ids: got an empty rollout or ids beyond the vocabulary of {self._vocabulary_size}")
        _insert(self._pages, np.uint64(record.prompt), token_ids, record.num_context, self._min_match)


@njit
def _mix(state, value):
    state = (state ^ np.uint64(value)) * np.uint64(0x9E3779B97F4A7C15)
    return state ^ (state >> np.uint64(29))


@njit
def _hash_prompt(token_ids, num_tokens):
    state = np.uint64(num_tokens)
    for j in range(num_tokens):
        state = _mix(state, token_ids[j])
    return state


@njit
def _slot(pages, position):
    """Where the page of a position is in the ring."""
    return (position >> _PAGE_BITS) & (len(pages.fill) - 1)


@njit
def _token(pages, position):
    return pages.tokens[position & (len(pages.tokens) - 1)]


@njit
def _is_live(pages, position):
    """Whether the page of a position still holds what it held when somebody noted the position."""
    return position >= PAGE and position >> _PAGE_BITS > pages.newest[0] - len(pages.fill)


@njit
def _before(pages, position):
    """The position before this one in its rollout, or 0."""
    if position & (PAGE - 1):
        return position - 1
    page = pages.before[_slot(pages, position)]
    last = page * PAGE + PAGE - 1
    return last if _is_live(pages, last) else 0


@njit
def _forward(after, fill, position, num_steps):
    """The position so many tokens further on in its rollout, or 0 if it has not got that far."""
    for _ in range(num_steps):
        if position == 0:
            break
        page = (position >> _PAGE_BITS) & (len(fill) - 1)
        if (position & (PAGE - 1)) + 1 < fill[page]:
            position += 1
        else:
            position = after[page] << _PAGE_BITS  # set when the page is full, and newer than it: live as long as it
    return position


@njit
def _append(pages, prompt, last, token):
    """Write a token behind position `last` (0: a new rollout); returns its position."""
    if _is_live(pages, last) and (last & (PAGE - 1)) < PAGE - 1:
        pages.fill[_slot(pages, last)] += 1
        position = last + 1
    else:
        pages.newest[0] += 1
        page = pages.newest[0]
        slot = page & (len(pages.fill) - 1)
        pages.prompt[slot] = prompt
        pages.fill[slot] = 1
        pages.after[slot] = 0
        pages.before[slot] = 0
        if _is_live(pages, last):  # not if this page has just overwritten it
            pages.before[slot] = last >> _PAGE_BITS
            pages.after[_slot(pages, last)] = page
        position = page * PAGE
    pages.tokens[position & (len(pages.tokens) - 1)] = token
    return position


@njit
def _hang(pages, prompt, position, min_match):
    """Put a place into its chain, unless fewer than min_match tokens lead to it."""
    state, at = prompt, position
    for _ in range(min_match):
        if at == 0:
            return
        state = _mix(state, _token(pages, at))
        at = _before(pages, at)
    head = np.int64(state & np.uint64(len(pages.heads) - 1))
    pages.older[position & (len(pages.tokens) - 1)] = pages.heads[head]
    pages.heads[head] = position


@njit
def _insert(pages, prompt, token_ids, num_context, min_match):
    """A whole rollout; its first places, inside the prompt, can be matched from but not continued. Returns its last position."""
    position = 0
    for j in range(len(token_ids)):
        position = _append(pages, prompt, position, token_ids[j])
        if j >= num_context - 1:
            _hang(pages, prompt, position, min_match)
    return position


@njit
def _newest_place(heads, prompt, context, num_context, min_match):
    """The head of the chain of a context's last min_match tokens, or 0."""
    if num_context < min_match:
        return 0
    state = prompt
    for j in range(min_match):
        state = _mix(state, context[num_context - 1 - j])
    return heads[np.int64(state & np.uint64(len(heads) - 1))]


@njit
def _compare(tokens, before, newest_page, position, context, num_context, min_match):
    """How a place and a context agree, read backwards: (equal tokens, gap before the last min_match equal ones in a row, or -1).

    The inner loop of everything, so it works on slots and on plain arrays: numba counts references to each array of a tuple that
    it touches, which made this ten times slower.
    """
    oldest_page = newest_page - len(before)
    slot = position & (len(tokens) - 1)
    agreement, run, gap = 0, 0, -1
    for j in range(num_context):
        if tokens[slot] == context[num_context - 1 - j]:
            agreement += 1
            run += 1
            if run == min_match and gap < 0:
                gap = j + 1 - min_match
        else:
            run = 0
        if slot & (PAGE - 1):
            slot -= 1
        else:
            page = before[slot >> _PAGE_BITS]
            if page <= oldest_page or page == 0:
                break
            slot = ((page & (len(before) - 1)) << _PAGE_BITS) + PAGE - 1
    return agreement, gap


@njit
def _vote(pages, prompt, context, num_context, min_match, max_match, scratch):
    """The token that most places agree on, or -1."""
    powers, candidates, votes = scratch.powers, scratch.candidates, scratch.votes
    tokens, older, before, prompts, newest_page = pages.tokens, pages.older, pages.before, pages.prompt, pages.newest[0]
    after, fill = pages.after, pages.fill
    compared = context[max(0, num_context - max_match) : num_context]
    num_candidates = 0
    for gap in range(MAX_GAP + 1):
        place = _newest_place(pages.heads, prompt, context, num_context - gap, min_match)
        num_places = 0
        for _ in range(4 * MAX_PLACES):  # other contexts may hang in the same chain
            if num_places == MAX_PLACES or place < PAGE or place >> _PAGE_BITS <= newest_page - len(before):
                break
            end = place
            place = older[end & (len(tokens) - 1)]
            if prompts[(end >> _PAGE_BITS) & (len(before) - 1)] != prompt:
                continue
            end = _forward(after, fill, end, gap)
            following = _forward(after, fill, end, 1)
            if following == 0:
                continue
            agreement, first_gap = _compare(tokens, before, newest_page, end, compared, len(compared), min_match)
            if first_gap != gap:  # another context, or a place that a smaller gap has found
                continue
            num_places += 1
            token = tokens[following & (len(tokens) - 1)]
            index = 0
            while index < num_candidates and candidates[index] != token:
                index += 1
            if index == num_candidates:
                candidates[index] = token
                votes[index] = 0.0
                num_candidates += 1
            votes[index] += powers[agreement + 2 * (MAX_GAP - gap)]
    best = -1
    for index in range(num_candidates):
        if best < 0 or votes[index] > votes[best]:
            best = index
    return candidates[best] if best >= 0 else -1


@njit
def _draft_rows(pages, rollouts, entry_of_row, num_tokens, token_ids, min_match, max_match, scratch, drafts, num_drafts):
    """Fill the drafts of all rows. A row without a rollout gets none."""
    num_context = max_match + MAX_GAP
    context = scratch.context
    for row in range(len(entry_of_row)):
        num_drafts[row] = 0
        if entry_of_row[row] < 0:
            continue
        prompt = rollouts.prompt[entry_of_row[row]]
        end = num_tokens[row]
        start = max(0, end - num_context)
        length = end - start
        for j in range(length):  # numba compiles a slice assignment for seconds
            context[j] = token_ids[row, start + j]
        for draft in range(min(drafts.shape[1], token_ids.shape[1] - end)):
            token = _vote(pages, prompt, context, length + draft, min_match, max_match, scratch)
            if token < 0:
                break
            context[length + draft] = token
            drafts[row, draft] = token
            num_drafts[row] = draft + 1


@njit
def _continues(rollouts, entry, token_ids, num_known):
    """Whether the first num_known tokens of a row can be this rollout, or this rollout and a few tokens that nobody showed us."""
    length = rollouts.length[entry]
    if length == 0 or length > num_known:
        return False
    num_tail = min(length, rollouts.tail.shape[1])
    for j in range(num_tail):  # noqa: SIM110  numba has no generators in all()
        if rollouts.tail[entry, j] != token_ids[length - 1 - j]:
            return False
    return True


@njit
def _observe(pages, rollouts, entry_of_row, step, num_sampled, num_tokens, token_ids, min_match):
    """Find the rollout of every row, beginning new ones, and append what is new. Writes entry_of_row."""
    num_rows = len(num_sampled)
    for row in range(num_rows):  # most rows are where they were
        entry, num_known = entry_of_row[row], num_tokens[row] - num_sampled[row]
        stays = entry >= 0 and num_sampled[row] > 0 and rollouts.length[entry] == num_known
        if stays and _continues(rollouts, entry, token_ids[row], num_known):
            rollouts.seen[entry] = step
        else:
            entry_of_row[row] = -1
    entry_of_row[num_rows:] = -1
    for row in range(num_rows):
        if num_sampled[row] == 0:
            continue
        if entry_of_row[row] < 0:
            num_known = num_tokens[row] - num_sampled[row]
            entry = _find(rollouts, token_ids[row], num_known, step)
            if entry < 0:
                entry = _begin(pages, rollouts, token_ids[row], num_known, min_match)
            rollouts.seen[entry] = step
            entry_of_row[row] = entry
        _extend(pages, rollouts, entry_of_row[row], token_ids[row], num_tokens[row], min_match)


@njit
def _find(rollouts, token_ids, num_known, step):
    """The longest rollout that this row can be and that no other row is, or -1."""
    found = -1
    for entry in range(len(rollouts.length)):
        if rollouts.seen[entry] == step or (found >= 0 and rollouts.length[entry] <= rollouts.length[found]):
            continue
        if _continues(rollouts, entry, token_ids, num_known):
            found = entry
    return found


@njit
def _begin(pages, rollouts, token_ids, num_prompt, min_match):
    """A new rollout, in place of the one not seen for the longest time. The prompt is stored with the first of a group."""
    entry = 0
    for other in range(len(rollouts.seen)):
        if rollouts.seen[other] < rollouts.seen[entry]:
            entry = other
    prompt = _hash_prompt(token_ids, num_prompt)
    place = _newest_place(pages.heads, prompt, token_ids, num_prompt, min_match)
    for _ in range(4 * MAX_PLACES):
        if not _is_live(pages, place) or pages.prompt[_slot(pages, place)] == prompt:
            break
        place = pages.older[place & (len(pages.tokens) - 1)]
    if _is_live(pages, place) and pages.prompt[_slot(pages, place)] == prompt:
        num_context = min(num_prompt, rollouts.tail.shape[1])
        position = _insert(pages, prompt, token_ids[num_prompt - num_context : num_prompt], num_context, min_match)
    else:
        num_context = min(num_prompt, len(pages.tokens) // 2)
        position = _insert(pages, prompt, token_ids[num_prompt - num_context : num_prompt], 0, min_match)
    rollouts.prompt[entry] = prompt
    rollouts.length[entry] = num_prompt
    rollouts.position[entry] = position
    rollouts.unshared[entry] = 0
    return entry


@njit
def _extend(pages, rollouts, entry, token_ids, num_tokens, min_match):
    """Append what a row has beyond what its rollout had."""
    prompt, position = rollouts.prompt[entry], rollouts.position[entry]
    for j in range(rollouts.length[entry], num_tokens):
        position = _append(pages, prompt, position, token_ids[j])
        _hang(pages, prompt, position, min_match)
    rollouts.unshared[entry] += num_tokens - rollouts.length[entry]
    rollouts.position[entry] = position
    rollouts.length[entry] = num_tokens
    for j in range(min(num_tokens, rollouts.tail.shape[1])):
        rollouts.tail[entry, j] = token_ids[num_tokens - 1 - j]


@njit
def _read(pages, position, num_tokens):
    """Up to num_tokens tokens that end at a position, as far back as the ring still has them."""
    token_ids = np.zeros(num_tokens, np.int32)
    start = num_tokens
    while start > 0 and _is_live(pages, position):
        start -= 1
        token_ids[start] = _token(pages, position)
        position = _before(pages, position)
    return token_ids[start:]
