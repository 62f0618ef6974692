"""AsyncLLM: find it behind vLLM's API server, submit requests, read their results, and shut it down.

vLLM's endpoint plugins receive the engine too, but load only if VLLM_PLUGINS names them and every other plugin.
`AsyncLLM.shutdown` ends EngineCore before it cancels the output handler, which then reports a crash with a traceback in
every successful run (vLLM issue 48745). When Python exits, `__del__` calls `shutdown` again, without module globals.

Relied upon:
  vllm/inputs/engine.py                  tokens_input: rendered input, which skips vLLM's tokenizer threads
  vllm/v1/engine/input_processor.py      appends "-" and random characters to every request id
  vllm/v1/engine/async_llm.py            AsyncLLM.add_request returns a RequestOutputCollector; abort takes the ids
                                         passed to add_request, and ignores finished ones; output_handler, the task
                                         that waits for outputs; `__del__` calls `shutdown`
  vllm/entrypoints/launchers/api_server/app_state.py    state.engine_client of the FastAPI app, as vLLM's own routes use
  vllm/v1/engine/output_processor.py     RequestOutputCollector.get: with RequestOutputKind.FINAL_ONLY one, the last
  vllm/outputs.py                        CompletionOutput: finish_reason, weight_versions (a label per run of tokens,
                                         set by AsyncLLM.update_weight_version; 0.30 and 0.31 have none, see
                                         `version_spans`), spec_decode_metrics (num_draft_tokens,
                                         histogram of accepted tokens; `per_request_spec_decode_metrics="summary"`)
  vllm/logprobs.py                       FlatLogprobs.logprobs: with `logprobs=0` of each sampled token

Goes when AsyncLLM returns finished requests in a documented form with versions and acceptance and shuts down once, and
an endpoint plugin can be enabled by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from paceline.types import PacelineError, Rollout, RolloutId, RolloutRequest, VersionSpans

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams
    from vllm.engine.protocol import EngineClient
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector


def engine_of(app: Any) -> EngineClient:
    """Return the engine that a FastAPI app of vLLM serves."""
    return app.state.engine_client


def rollout_id(request_id: str) -> RolloutId:
    """Return the rollout of the scheduler's `request_id`."""
    return RolloutId.parse(request_id.split("-", maxsplit=1)[0])


async def shut_down(llm: AsyncLLM, timeout_s: float) -> None:
    """Stop the engine's processes. EngineCore has `timeout_s` to stop by itself."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()
        await asyncio.wait([llm.output_handler])
    try:
        await asyncio.to_thread(llm.shutdown, timeout_s)
    finally:
        llm.shutdown = lambda timeout=None: None


async def abort(llm: AsyncLLM, ids: Sequence[RolloutId]) -> None:
    await llm.abort([str(one) for one in ids])


async def add(
    llm: AsyncLLM, request: RolloutRequest, params: SamplingParams, *, cache_salt: str
) -> RequestOutputCollector:
    """Queue one request; `rollout_id` reads its id. Cached prefixes are shared among requests with the same salt."""
    from vllm.inputs.engine import tokens_input

    prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=cache_salt)
    return await llm.add_request(str(request.id), prompt, params)


async def finished(
    engine: str,
    request: RolloutRequest,
    outputs: RequestOutputCollector,
    started_s: float,
    *,
    version: Callable[[], int],
) -> Rollout:
    """Return a finished request's rollout; raise if vLLM gave it up. `version` returns the engine's policy version."""
    from vllm.logprobs import FlatLogprobs

    submitted = version()
    output = cast("RequestOutput", await outputs.get())
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise PacelineError(f"vLLM ended it with {completion.finish_reason!r}")
    assert isinstance(completion.logprobs, FlatLogprobs)
    drafts = completion.spec_decode_metrics
    return Rollout(
        group_id=request.group_id,
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=np.asarray(completion.token_ids, np.int32),
        logp=np.asarray(completion.logprobs.logprobs, np.float32),
        finish_reason=completion.finish_reason,
        version_spans=version_spans(completion, submitted, version()),
        engine=engine,
        started_s=started_s,
        finished_s=time.monotonic(),
        num_verifications=sum(drafts.histogram) if drafts is not None else 0,
        num_drafted=drafts.num_draft_tokens if drafts is not None else 0,
        num_accepted=sum(count * num for count, num in enumerate(drafts.histogram)) if drafts is not None else 0,
    )


def version_spans(completion: CompletionOutput, submitted: int, now: int) -> VersionSpans:
    """Return the policy versions of a response's tokens.

    vLLM 0.30 and 0.31 do not label tokens. There all but the last count as sampled by the version at submission, which
    is too old for tokens after a sync or a wait in vLLM's queue (asynchronous training only).
    """
    num_tokens = len(completion.token_ids)
    if "weight_versions" not in vars(completion):
        if now == submitted or num_tokens < 2:
            return ((submitted, num_tokens),)
        return ((submitted, num_tokens - 1), (now, 1))
    assert completion.weight_versions, "vLLM labels every token with the engine's version"
    spans = tuple((int(s.version), s.end - s.start) for s in completion.weight_versions if s.end > s.start)
    assert sum(length for _, length in spans) == num_tokens, "labels cover all tokens"
    return spans
