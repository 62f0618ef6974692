"""Response lengths: from a run's metrics.jsonl, a file or histogram, or log-normal by mean and maximum.

Every batch gets the same quantiles of the distribution in its own order, so two plans differ only by their inputs, not
by random draws. The longest response of a batch of N is the quantile 1 - 1/(2N).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from paceline.metrics import stream_metrics
from paceline.types import RolloutRequest

SIGMA = 1.0
"""Deviation of log length if only mean and maximum are given: the 75th percentile of reasoning rollouts is about twice
the median (arXiv 2511.16665, figure 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    values: npt.NDArray[np.float64]
    """Sorted; equally likely."""
    source: str

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def maximum(self) -> int:
        return int(self.values[-1])

    def scaled(self, factor: float) -> Lengths:
        """Scale all lengths but the maximum."""
        values = np.clip(self.values * factor, 1, self.values[-1])
        return Lengths(values=values, source=f"{self.source} x {factor:g}")

    def of_batch(self, num_rollouts: int) -> npt.NDArray[np.int64]:
        """Return the quantiles of one batch, shortest first."""
        places = (np.arange(num_rollouts) + 0.5) / num_rollouts * len(self.values)
        return np.maximum(self.values[places.astype(np.int64)], 1).round().astype(np.int64)

    def by_request(self, num_groups: int, group_size: int, seed: int = 0) -> Callable[[RolloutRequest], int]:
        """Return the length of each request; group ids count through all batches."""
        lengths = self.of_batch(num_groups * group_size)
        orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

        def length_of(request: RolloutRequest) -> int:
            batch, group = divmod(request.group_id.number, num_groups)
            draw = (batch, request.group_id.attempt)
            if draw not in orders:
                orders[draw] = np.random.default_rng([seed, *draw]).permutation(len(lengths))
            return int(lengths[orders[draw][group * group_size + request.index]])

        return length_of


def lognormal(mean: float, maximum: int, sigma: float = SIGMA) -> Lengths:
    """Return a log-normal clipped at `maximum`, with this mean after clipping."""
    if not 1 <= mean < maximum:
        raise ValueError(f"lengths: got mean {mean:g} and maximum {maximum}; must be 1 <= mean < maximum")
    normal = NormalDist()
    deviates = np.array([normal.inv_cdf((i + 0.5) / 4096) for i in range(4096)])
    low, high = 0.0, np.log(maximum) + 3 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        too_short = np.minimum(np.exp(middle + sigma * deviates), maximum).mean() < mean
        low, high = (middle, high) if too_short else (low, middle)
    values = np.minimum(np.exp(low + sigma * deviates), maximum)
    return Lengths(values=values, source=f"log-normal, mean {mean:g}, at most {maximum}")


def read_lengths(text: str) -> Lengths:
    """Parse `MEAN/MAX` as a log-normal, or read a file: metrics.jsonl of a run, a JSON list, or lines of `length` or
    `length count`."""
    path = Path(text)
    if path.is_file():
        values = _read_file(path)
        if not len(values) or not (values >= 1).all():
            raise ValueError(
                f"lengths: {path} holds no response lengths; must be a metrics.jsonl or lines with numbers of tokens"
            )
        return Lengths(values=np.sort(values), source=path.name)
    mean, slash, maximum = text.partition("/")
    try:
        return lognormal(float(mean), int(maximum) if slash else int(16 * float(mean)))
    except ValueError as error:
        if "must be" in str(error):
            raise
        raise ValueError(
            f"lengths: got {text!r}; must be a file (metrics.jsonl of a run, or one response length a line) or "
            "MEAN/MAX in tokens, for example 4000/32768"
        ) from None


def _read_file(path: Path) -> npt.NDArray[np.float64]:
    if path.suffix == ".jsonl":
        batches = [
            np.array(record["length"], np.float64) for kind, record in stream_metrics(path) if kind == "rollouts"
        ]
        return np.concatenate(batches) if batches else np.empty(0)
    content = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            return np.array(json.loads(content), np.float64).ravel()
        rows = [
            [float(word) for word in line.replace(",", " ").split()] for line in content.splitlines() if line.strip()
        ]
    except ValueError:
        raise ValueError(
            f"lengths: {path} holds something that is not a number; must be lines of `length` or `length count`"
        ) from None
    if any(len(row) not in (1, 2) for row in rows):
        raise ValueError(
            f"lengths: {path} has lines of more than two numbers; must be lines of `length` or `length count`"
        )
    return np.repeat([row[0] for row in rows], [int(row[1]) if len(row) == 2 else 1 for row in rows]).astype(np.float64)
