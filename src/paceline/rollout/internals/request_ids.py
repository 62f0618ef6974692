"""Names of requests inside vLLM: ours, "group:index", with something random behind a hyphen.

Relied upon: vllm/v1/engine/input_processor.py, which appends "-" and random characters to the id of every request. Goes
when the scheduler sees the id that `add_request` was given.
"""

from __future__ import annotations


def rollout_key(request_id: str) -> tuple[int, int]:
    """Group and index of the rollout that the scheduler calls `request_id`."""
    group_id, index = request_id.split("-", maxsplit=1)[0].split(":")
    return int(group_id), int(index)
