"""Push a policy version to all engines, with one retry."""

from __future__ import annotations

from paceline.orchestrator.journal import Journal
from paceline.orchestrator.members import Members
from paceline.types import PacelineError, Sender


async def push_policy(sender: Sender, version: int, members: Members, journal: Journal) -> None:
    """Push a version and record the receipts; retry a refused push once, and drop engines that refuse it twice."""
    for last_try in (False, True):
        receipts = await sender.send(version)
        if receipts:
            journal.receipts(receipts, version)
        failed = [receipt for receipt in receipts if not receipt.ok]
        for receipt in failed:
            why = receipt.error or f"fingerprints differ: {', '.join(receipt.mismatched[:3])}"
            journal.event("push_failed", engine=receipt.engine, version=version, why=why)
            if receipt.lost or last_try:
                members.lose(receipt.engine, why)
        if all(receipt.lost for receipt in failed):
            break
    if members.hopeless:  # otherwise restarted engines get this version
        raise PacelineError(f"no engine took policy version {version}; the push_failed events in metrics.jsonl say why")
