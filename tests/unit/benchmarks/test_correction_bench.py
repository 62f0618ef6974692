"""What the arms of the correction bench are compared by."""

import pytest

from benchmarks.harness import Record
from benchmarks.learning import PRECISIONS, Training, compare_precisions


def trained(*finals: float) -> list[Training]:
    return [
        Training(
            curve=((0, 0.5), (24, final)), step_s=5.0, k3=1e-3, idle_s=0.0, engine_s=1.0, num_too_old=0, age_mean=0.0
        )
        for final in finals
    ]


@pytest.mark.parametrize(("corrected", "within"), [(0.66, 1.0), (0.60, 0.0)])
def test_correction_is_within_the_spread_of_bf16_or_not(corrected: float, within: float) -> None:
    """BF16 seeds 0.66 to 0.70: mean 0.68, so 0.64 is the least that counts as the same."""
    arms = {
        "bf16": trained(0.66, 0.68, 0.70),
        "fp8": trained(0.5),
        "fp8_tis": trained(0.69),
        "fp8_mis": trained(corrected),
    }
    record = Record()
    compare_precisions(record, arms)
    figures, spread = record.figures, record.spread
    assert arms.keys() == PRECISIONS.keys()
    assert figures["accuracy_bf16"] == pytest.approx(0.68) and spread["accuracy_bf16"] == pytest.approx(0.04)
    assert figures["gain_fp8_tis"] == pytest.approx(19)
    assert figures["correction_within_spread"] == within
