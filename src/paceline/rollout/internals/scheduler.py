"""Access vLLM's scheduler: requests in the batch, draft length, results of a step, cached prefixes.

Relied upon:
  vllm/v1/core/sched/scheduler.py    Scheduler: `running` and `waiting` (requests with `num_tokens`), `num_spec_tokens`,
                                     `max_num_running_reqs` (slots) and `max_num_active_reqs` (admission),
                                     `vllm_config`; `dynamic_sd_lookup`, a list by batch size
                                     that `schedule` reads for SchedulerOutput.num_spec_tokens_to_schedule; the methods
                                     schedule, update_from_output and update_draft_token_ids, which AsyncScheduler
                                     has; `kv_cache_manager` (evict_blocks; block_pool.num_gpu_blocks)
  vllm/v1/core/sched/output.py       SchedulerOutput: num_scheduled_tokens, total_num_scheduled_tokens,
                                     scheduled_spec_decode_tokens, num_spec_tokens_to_schedule
  vllm/v1/outputs.py                 ModelRunnerOutput: sampled_token_ids, req_id_to_index; DraftTokenIds

Steps have no number in vLLM. A SchedulerOutput passes through the engine as one object, so the scheduler identifies a
step by that object and keeps it until the results arrive.

Goes when vLLM has a `set_draft_length` and reports the duration of a step to the scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.selector.cost import Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


def num_requests(scheduler: Scheduler) -> int:
    """Return the number of requests in the next step."""
    return min(len(scheduler.running) + len(scheduler.waiting), scheduler.max_num_running_reqs)


def context_tokens(scheduler: Scheduler) -> int:
    """Return the tokens of all running requests."""
    return sum(request.num_tokens for request in scheduler.running)


def limit_requests(scheduler: Scheduler, most: int) -> None:
    """Run at most this many requests at once from the next step; the others wait."""
    assert most <= scheduler.scheduler_config.max_num_seqs
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = most


def forget_prefixes(scheduler: Scheduler) -> None:
    """Evict all cached prefixes. Unlike vLLM's `reset_prefix_cache`, this works with running requests, which keep their
    blocks."""
    manager = scheduler.kv_cache_manager
    manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))


def set_draft_length(scheduler: Scheduler, table: list[int] | None) -> None:
    """Set the draft length per batch size for the next step. None without speculation."""
    scheduler.dynamic_sd_lookup = table


def cut_drafts(scheduler: Scheduler, drafts: DraftTokenIds) -> None:
    """Drop draft tokens beyond the chosen length: proposers of vLLM's `custom_class` do not receive the length."""
    if scheduler.dynamic_sd_lookup is not None:
        for tokens in drafts.draft_token_ids:
            del tokens[scheduler.dynamic_sd_lookup[-1] :]


def emitted(output: SchedulerOutput, results: ModelRunnerOutput) -> dict[str, int]:
    """Return the emitted tokens per request; empty for a step without sampling."""
    sampled = results.sampled_token_ids
    if not sampled:
        return {}
    rows = results.req_id_to_index
    return {request_id: len(sampled[rows[request_id]]) for request_id in output.num_scheduled_tokens}


def drafted(output: SchedulerOutput) -> dict[str, int]:
    """Return the verified draft tokens per request with drafts."""
    return {request_id: len(tokens) for request_id, tokens in output.scheduled_spec_decode_tokens.items()}


def step(output: SchedulerOutput, emitted: dict[str, int], context_tokens: int, seconds: float) -> Step:
    """Summarize a step for the selector."""
    drafts = drafted(output)
    verified = max(drafts.values(), default=0)
    proposed_at, accepted_at = [0] * verified, [0] * verified
    for request_id, length in drafts.items():
        for position in range(length):
            proposed_at[position] += 1
        for position in range(min(emitted[request_id] - 1, length)):
            accepted_at[position] += 1
    num_in_batch = len(output.num_scheduled_tokens)
    return Step(
        num_requests=num_in_batch,
        num_prefill_tokens=max(0, output.total_num_scheduled_tokens - num_in_batch - sum(drafts.values())),
        context_tokens=context_tokens,
        verified=verified,
        drafted=output.num_spec_tokens_to_schedule,
        seconds=seconds,
        proposed_at=tuple(proposed_at),
        accepted_at=tuple(accepted_at),
        num_emitted=sum(emitted.values()),
    )
