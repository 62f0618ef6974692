"""Request ids inside vLLM: ours with a random suffix after a hyphen.

Relied upon: vllm/v1/engine/input_processor.py, which appends "-" and random characters to the id of every request. Goes
when the scheduler sees the id that `add_request` was given.
"""

from __future__ import annotations

from paceline.types import RolloutId


def rollout_id(request_id: str) -> RolloutId:
    """Return the rollout that the scheduler calls `request_id`."""
    return RolloutId.parse(request_id.split("-", maxsplit=1)[0])
