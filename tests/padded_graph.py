"""The CUDA graph that vLLM chooses for a step."""

from __future__ import annotations

from paceline.selector.graphs import CapturePlan, Pair


def graph_for(plan: CapturePlan, num_requests: int, draft_length: int) -> Pair | None:
    """Return the graph to which vLLM pads this step, None if it runs without a graph."""
    num_tokens = num_requests * (draft_length + 1)
    padded = min((n * (k + 1) for n, k in plan.pairs if n * (k + 1) >= num_tokens), default=0)
    pair = padded // (draft_length + 1), draft_length
    return pair if padded % (draft_length + 1) == 0 and pair in plan.pairs else None
