"""A request to AsyncLLM and what it answers, as this release of vLLM has them.

Relied upon:
  vllm/inputs/engine.py                  tokens_input: rendered input, which skips vLLM's tokenizer threads
  vllm/v1/engine/async_llm.py            AsyncLLM.add_request returns a RequestOutputCollector
  vllm/v1/engine/output_processor.py     RequestOutputCollector.get: with RequestOutputKind.FINAL_ONLY one, the last
  vllm/outputs.py                        CompletionOutput: finish_reason, weight_versions (a label per run of tokens,
                                         set by AsyncLLM.update_weight_version; 0.30 and 0.31 have none, see
                                         `_versions`), spec_decode_metrics (num_draft_tokens,
                                         histogram of accepted tokens; `per_request_spec_decode_metrics="summary"`)
  vllm/logprobs.py                       FlatLogprobs.logprobs: with `logprobs=0` that of each sampled token

Goes when AsyncLLM hands out finished requests in a documented form that has versions and acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from paceline.types import PacelineError, Rollout, RolloutRequest

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector


async def add(
    llm: AsyncLLM, request: RolloutRequest, params: SamplingParams, *, cache_salt: str
) -> RequestOutputCollector:
    """Queue one request; its name is read back by `request_ids.rollout_key`. Cached prefixes are shared among requests
    of one salt only."""
    from vllm.inputs.engine import tokens_input

    prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=cache_salt)
    return await llm.add_request(f"{request.group_id}:{request.index}", prompt, params)


async def finished(
    engine: str,
    request: RolloutRequest,
    outputs: RequestOutputCollector,
    started_s: float,
    *,
    version: Callable[[], int],
) -> Rollout:
    """Wait for a request's end and return its rollout; raises when vLLM gave it up. `version` tells the policy version
    that the engine holds."""
    from vllm.logprobs import FlatLogprobs

    submitted = version()
    output = cast("RequestOutput", await outputs.get())
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise PacelineError(f"vLLM ended it with {completion.finish_reason!r}")
    assert isinstance(completion.logprobs, FlatLogprobs)
    first, last = _versions(completion, submitted, version())
    drafts = completion.spec_decode_metrics
    return Rollout(
        group_id=request.group_id,
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=np.asarray(completion.token_ids, np.int32),
        logp=np.asarray(completion.logprobs.logprobs, np.float32),
        finish_reason=completion.finish_reason,
        policy_version=first,
        policy_version_end=last,
        engine=engine,
        started_s=started_s,
        finished_s=time.monotonic(),
        num_verifications=sum(drafts.histogram) if drafts is not None else 0,
        num_drafted=drafts.num_draft_tokens if drafts is not None else 0,
        num_accepted=sum(count * num for count, num in enumerate(drafts.histogram)) if drafts is not None else 0,
    )


def _versions(completion: CompletionOutput, submitted: int, now: int) -> tuple[int, int]:
    """Policy versions of the first and the last token.

    vLLM 0.30 and 0.31 do not label tokens. There a rollout counts from the version at its submission, which is too old
    by a version for one that waited in vLLM's queue while new weights came (asynchronous training only).
    """
    if "weight_versions" not in vars(completion):
        return submitted, now
    assert completion.weight_versions, "vLLM labels every token with the version that the engine was told"
    return int(completion.weight_versions[0].version), int(completion.weight_versions[-1].version)
