"""Inner loops of the history drafter, compiled by numba. history.py explains the algorithm."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

_PAGE_BITS = 6
PAGE = 1 << _PAGE_BITS
MAX_GAP = 2
MAX_PLACES = 32  # per gap; with 16 the accepted length falls by 2 %, and with 64 it hardly rises


class Pages(NamedTuple):
    """The ring. A position is `page number * PAGE + offset`; page numbers start at 1, so position 0 means none."""

    tokens: np.ndarray  # int32, a slot for each position modulo the size of the ring
    older: np.ndarray  # int64, by position: the previous place in its chain
    heads: np.ndarray  # int64: the newest place of each chain
    prompt: np.ndarray  # uint64, by page
    before: np.ndarray  # int64, by page: number of the page before it in the same rollout, or 0
    after: np.ndarray  # int64, by page: number of the next page, or 0
    fill: np.ndarray  # int64, by page: tokens in it
    newest: np.ndarray  # int64, one element: number of the newest page


class Rollouts(NamedTuple):
    """Requests that are running or have left the batch recently: a preempted one comes back."""

    prompt: np.ndarray  # uint64
    length: np.ndarray  # int64: tokens, prompt included; 0 is a free entry
    position: np.ndarray  # int64: of its last token
    tail: np.ndarray  # int32, by rollout and token: the last ones
    seen: np.ndarray  # int64: number of the step in which a row last continued it
    unshared: np.ndarray  # int64: tokens that `take_finished` has not handed out


class Scratch(NamedTuple):
    """Working memory of a vote, allocated once."""

    context: np.ndarray  # int32: the last tokens of a row and the draft so far
    candidates: np.ndarray  # int32
    votes: np.ndarray  # float64, by candidate
    powers: np.ndarray  # float64: of two


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
    """Return the index in the ring of a position's page."""
    return (position >> _PAGE_BITS) & (len(pages.fill) - 1)


@njit
def _token(pages, position):
    return pages.tokens[position & (len(pages.tokens) - 1)]


@njit
def _is_live(pages, position):
    """Return whether the page of a position has not been overwritten."""
    return position >= PAGE and position >> _PAGE_BITS > pages.newest[0] - len(pages.fill)


@njit
def _before(pages, position):
    """Return the previous position in the rollout, or 0."""
    if position & (PAGE - 1):
        return position - 1
    page = pages.before[_slot(pages, position)]
    last = page * PAGE + PAGE - 1
    return last if _is_live(pages, last) else 0


@njit
def _forward(after, fill, position, num_steps):
    """Return the position `num_steps` tokens later in the rollout, or 0 beyond its end."""
    for _ in range(num_steps):
        if position == 0:
            break
        page = (position >> _PAGE_BITS) & (len(fill) - 1)
        if (position & (PAGE - 1)) + 1 < fill[page]:
            position += 1
        else:
            position = after[page] << _PAGE_BITS  # set when the page is full; the next page is newer and lives longer
    return position


@njit
def _append(pages, prompt, last, token):
    """Write a token after position `last` (0: a new rollout) and return its position."""
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
        if _is_live(pages, last):  # false if this page has just overwritten it
            pages.before[slot] = last >> _PAGE_BITS
            pages.after[_slot(pages, last)] = page
        position = page * PAGE
    pages.tokens[position & (len(pages.tokens) - 1)] = token
    return position


@njit
def _link(pages, prompt, position, min_match):
    """Link a place into its chain, if at least min_match tokens precede it."""
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
def insert(pages, prompt, token_ids, num_context, min_match):
    """Insert a rollout and return its last position. Places inside the prompt are not linked."""
    position = 0
    for j in range(len(token_ids)):
        position = _append(pages, prompt, position, token_ids[j])
        if j >= num_context - 1:
            _link(pages, prompt, position, min_match)
    return position


@njit
def _newest_place(heads, prompt, context, num_context, min_match):
    """Return the head of the chain of a context's last min_match tokens, or 0."""
    if num_context < min_match:
        return 0
    state = prompt
    for j in range(min_match):
        state = _mix(state, context[num_context - 1 - j])
    return heads[np.int64(state & np.uint64(len(heads) - 1))]


@njit
def _compare(tokens, before, newest_page, position, context, num_context, min_match):
    """Compare a place and a context backward: (equal tokens, gap before the last min_match equal ones in a row, or
    -1).

    The inner loop of everything, so it works on slots and on plain arrays: numba counts references to each array of a
    tuple that it touches, which made this ten times slower."""
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
    """Return the token with most votes, or -1."""
    powers, candidates, votes = scratch.powers, scratch.candidates, scratch.votes
    tokens, older, before, prompts, newest_page = pages.tokens, pages.older, pages.before, pages.prompt, pages.newest[0]
    after, fill = pages.after, pages.fill
    compared = context[max(0, num_context - max_match) : num_context]
    num_candidates = 0
    for gap in range(MAX_GAP + 1):
        place = _newest_place(pages.heads, prompt, context, num_context - gap, min_match)
        num_places = 0
        for _ in range(4 * MAX_PLACES):  # other contexts may be in the same chain
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
def draft_rows(pages, rollouts, entry_of_row, num_tokens, token_ids, min_match, max_match, scratch, drafts, num_drafts):
    """Fill the drafts of all rows that have a rollout."""
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
    """Return whether a row's first num_known tokens match this rollout, or this rollout plus a few unseen tokens."""
    length = rollouts.length[entry]
    if length == 0 or length > num_known:
        return False
    num_tail = min(length, rollouts.tail.shape[1])
    for j in range(num_tail):  # noqa: SIM110  numba has no generators in all()
        if rollouts.tail[entry, j] != token_ids[length - 1 - j]:
            return False
    return True


@njit
def observe(pages, rollouts, entry_of_row, step, num_sampled, num_tokens, token_ids, min_match):
    """Find or start the rollout of every row, write it to entry_of_row, and append new tokens."""
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
    """Return the longest rollout that matches this row and no other row, or -1."""
    found = -1
    for entry in range(len(rollouts.length)):
        if rollouts.seen[entry] == step or (found >= 0 and rollouts.length[entry] <= rollouts.length[found]):
            continue
        if _continues(rollouts, entry, token_ids, num_known):
            found = entry
    return found


@njit
def _begin(pages, rollouts, token_ids, num_prompt, min_match):
    """Start a rollout in the least recently seen entry. The first rollout of a group stores the prompt."""
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
    known = _is_live(pages, place) and pages.prompt[_slot(pages, place)] == prompt
    num_kept = min(num_prompt, rollouts.tail.shape[1] if known else len(pages.tokens) // 2)
    kept = token_ids[num_prompt - num_kept : num_prompt]
    position = insert(pages, prompt, kept, num_kept if known else 0, min_match)
    rollouts.prompt[entry] = prompt
    rollouts.length[entry] = num_prompt
    rollouts.position[entry] = position
    rollouts.unshared[entry] = 0
    return entry


@njit
def _extend(pages, rollouts, entry, token_ids, num_tokens, min_match):
    """Append a row's new tokens to its rollout."""
    prompt, position = rollouts.prompt[entry], rollouts.position[entry]
    for j in range(rollouts.length[entry], num_tokens):
        position = _append(pages, prompt, position, token_ids[j])
        _link(pages, prompt, position, min_match)
    rollouts.unshared[entry] += num_tokens - rollouts.length[entry]
    rollouts.position[entry] = position
    rollouts.length[entry] = num_tokens
    for j in range(min(num_tokens, rollouts.tail.shape[1])):
        rollouts.tail[entry, j] = token_ids[num_tokens - 1 - j]


@njit
def read(pages, position, num_tokens):
    """Return up to num_tokens tokens that end at a position, as far back as the ring holds them."""
    token_ids = np.zeros(num_tokens, np.int32)
    start = num_tokens
    while start > 0 and _is_live(pages, position):
        start -= 1
        token_ids[start] = _token(pages, position)
        position = _before(pages, position)
    return token_ids[start:]
