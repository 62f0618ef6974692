"""Everything that failed in a run without ending it, as one table: counts by metric key."""

from __future__ import annotations

import numpy as np

from paceline.report.recorded import RecordedRun

PER_STEP = {
    "selector/failures": "the selector raised; the step was not drafted for",
    "selector/trace_failures": "the scheduler could not write its trace",
    "history/failures": "the history drafter raised; the step was not drafted for",
    "history/broken_files": "rollouts of another engine could not be read",
    "draft/alarms": "a drafter died: its drafts were accepted, and then hardly any",
    "draft/restored": "a worker's drafter had lost weights in a reload or asleep; they were put back",
    "draft/restore_failures": "a drafter's weights could not be kept or put back",
    "draft/hand_over_failures": "hidden states could not be written for drafter training",
    "draft/failures": "drafter training failed somewhere; it went on at the next step, or ended",
    "engine/lost": "an engine was lost; its rollouts went to others",
    "learner/restarted": "the learner was lost; a new one is what it was",
    "rollout/quarantined_groups": "a group was left out because its prompt seems to kill engines",
    "engine/preemptions": "requests lost their KV cache for want of room and were computed anew",
    "engine/metrics_failed": "an engine did not tell its counters in time",
    "sync/failed": "an engine did not take a push of weights",
    "sync/refused": "a push was refused before it touched the model",
    "checkpoint/failed": "a checkpoint, or what a resumed run would reuse, could not be written",
}
"""Counts of each step, and what one of them means."""
SINCE_START = {
    "reward/failures": "the reward function raised, hung, ended its process or gave no finite number",
    "draft/broken_buffer_files": "files of drafter training that could not be read",
    "draft/checkpoints_failed": "checkpoints of the drafter that could not be written",
    "metrics/sink_errors": "records that a console or another sink did not take",
    "metrics/records_lost": "records that metrics.jsonl lacks because they could not be written",
}
"""Counts since the start of the run, and what one of them means."""

NO_FAILURES = [("none", "")]


def failure_rows(run: RecordedRun) -> list[tuple[str, str]]:
    """Those above 0; NO_FAILURES otherwise."""
    totals = {key: float(np.nansum(run.series(key))) for key in PER_STEP}
    totals |= {key: float(np.nan_to_num(run.series(key)).max()) for key in SINCE_START}
    meaning = PER_STEP | SINCE_START
    return [(key, f"{total:,.0f}: {meaning[key]}") for key, total in totals.items() if total > 0] or NO_FAILURES
