"""Deliver a push to one engine over any transport and return its receipt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from paceline.types import EngineLostError, Receipt
from paceline.weights.distributed import GroupAddress
from paceline.weights.fingerprint import mismatched
from paceline.weights.message import Push, PushReport


class PushTarget(Protocol):
    """The methods of `VllmEngine` that a push needs."""

    @property
    def name(self) -> str: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def rpc(self, method: str, *args: Any) -> list[Any]: ...

    async def on_new_weights(self, version: int) -> None: ...


async def join(engine: PushTarget, address: GroupAddress, first_rank: int) -> str | None:
    """Add the workers of one engine to a process group; return the error, which another member may have caused."""
    try:
        await engine.rpc("init_weight_transfer_engine", {"address": asdict(address), "first_rank": first_rank})
    except EngineLostError:
        raise
    except Exception as error:  # noqa: BLE001  vLLM's rpc converts every error of a worker
        return f"{type(error).__name__}: {error}"
    return None


def read_reports(push: Push, reports: Sequence[PushReport]) -> tuple[str | None, bool, tuple[str, ...]]:
    """Return the error of a push (None on success), whether the engine's weights are now undefined, and the tensors
    with wrong fingerprints, from the reports of the engine's workers."""
    refusals = [report.refused for report in reports if report.refused is not None]
    if refusals and len(refusals) == len(reports):
        return refusals[0], False, ()
    if refusals:
        return f"only some of the engine's workers refused: {refusals[0]}", True, ()
    wrong = (mismatched(push.fingerprints_of(rank), report.fingerprints) for rank, report in enumerate(reports))
    names = tuple(sorted({name for worker in wrong for name in worker}))
    return (f"{names[0]}: fingerprint differs from the sender's", True, names) if names else (None, False, ())


async def deliver(engine: PushTarget, push: Push) -> Receipt:
    """Deliver a push to one engine between two of its steps. Errors of the engine are returned in the receipt.

    When this returns, the engine runs with the new version or, after a refusal, with the previous one. If `lost`, it
    stays paused and its weights are undefined.
    """
    started_s = time.monotonic()

    def receipt(*, error: str | None = None, lost: bool = False, names: tuple[str, ...] = ()) -> Receipt:
        return Receipt(
            engine=engine.name,
            version=push.version,
            num_tensors=len(push.entries),
            num_bytes=push.num_bytes,
            seconds=time.monotonic() - started_s,
            scales_version=None if push.kv_scales is None else push.kv_scales.version,
            mismatched=names,
            error=error,
            lost=lost,
        )

    try:
        await engine.pause()
        reports = [PushReport.from_dict(plain) for plain in await engine.rpc("receive_push", push.to_dict())]
        error, lost, names = read_reports(push, reports)
        if lost:
            return receipt(error=error, lost=True, names=names)
        if error is not None:
            await engine.resume()
            return receipt(error=error)
        if push.target == "policy":
            await engine.on_new_weights(push.version)
        await engine.resume()
        return receipt()
    except Exception as error:  # noqa: BLE001  after any error the engine's weights are undefined
        return receipt(error=f"{type(error).__name__}: {error}", lost=True)
