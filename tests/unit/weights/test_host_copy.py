"""A host copy puts back what was lost, bit for bit, and never undoes what was changed on purpose."""

from __future__ import annotations

import pytest
import torch

from paceline.types import PacelineError
from paceline.weights.fingerprint import HostCopy


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(5, 7, generator=generator)
    full[0, 0] = float("nan")  # equal to nothing, itself included
    return {
        "full": torch.nn.Parameter(full),
        "half": torch.randn(8, 4, generator=generator).bfloat16().t(),  # not contiguous
        "fp8": torch.randn(6, generator=generator).to(torch.float8_e4m3fn),
    }


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: tensor.detach().contiguous().view(torch.uint8).flatten().tolist() for name, tensor in tensors.items()}


def wipe(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.zero_()


def test_lost_tensors_come_back_bit_for_bit_and_in_place() -> None:
    """Captured graphs read an address: a new tensor in the old one's place would not be seen."""
    tensors, kept = weights(), HostCopy()
    before, addresses = bits(tensors), [tensor.data_ptr() for tensor in tensors.values()]
    kept.keep(tensors)
    assert kept.restore(tensors) == []
    wipe(tensors["full"])
    wipe(tensors["half"])
    assert kept.restore(tensors) == ["full", "half"]
    assert bits(tensors) == before
    assert [tensor.data_ptr() for tensor in tensors.values()] == addresses


def test_what_changed_before_it_was_kept_is_kept() -> None:
    """An update of the drafter would otherwise be undone by the next reload of the policy."""
    tensors, kept = weights(), HostCopy()
    kept.keep(tensors)
    with torch.no_grad():
        tensors["full"].fill_(3.0)
    kept.keep(tensors)
    wipe(tensors["full"])
    kept.restore(tensors)
    assert (tensors["full"] == 3.0).all()


def test_tensor_that_left_is_left_alone() -> None:
    """A drafter's head that has become the policy's must not get the drafter's old one."""
    tensors, kept = weights(), HostCopy()
    kept.keep(tensors)
    gone = tensors.pop("half")
    wipe(gone)
    assert kept.restore(tensors) == [] and not gone.any()


def test_failed_copy_is_none_at_all() -> None:
    """The copy from before would bring back an old drafter."""
    tensors, kept = weights(), HostCopy()
    kept.keep(tensors)
    with pytest.raises(AttributeError):
        kept.keep({**tensors, "broken": None})  # type: ignore[dict-item]
    wipe(tensors["full"])
    assert kept.restore(tensors) == [] and not tensors["full"].any()


def test_tensor_that_does_not_take_its_value_is_an_error() -> None:
    tensors, kept = weights(), HostCopy()
    kept.keep(tensors)
    with pytest.raises(PacelineError, match="full"):
        kept.restore({**tensors, "full": torch.zeros(5, 7, dtype=torch.float64)})
