"""FP8 layers of a running model: which layers are quantised, and the codes and scales that their kernels read.

Relies on
    vllm/model_executor/layers/quantization/online/fp8.py   Fp8PerBlockOnlineLinearMethod; `weight`, `weight_scale_inv`
    vllm/model_executor/layers/linear.py                    LinearBase.quant_method
    the CPU kernels of vllm/_C                              the order of codes in AMX tiles

because vLLM has no way to ask what a quantised layer holds. A method `weight_fingerprints` of its worker would let this
go.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def quantised_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Names and modules of the layers that were quantised as they were loaded."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod

    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_method, Fp8PerBlockOnlineLinearMethod):
            yield name, module


def held_codes(layer: torch.nn.Module) -> torch.Tensor:
    """The memory that a layer's kernel reads its codes from, as it lies there."""
    assert isinstance(layer.weight, torch.Tensor)
    return layer.weight.data


def held_scale(layer: torch.nn.Module) -> torch.Tensor:
    """The memory that a layer's kernel reads the scales of its blocks from."""
    assert isinstance(layer.weight_scale_inv, torch.Tensor)
    return layer.weight_scale_inv.data


def codes_in_order(layer: torch.nn.Module) -> torch.Tensor:
    """The codes of a layer in the order of the matrix.

    On the CPU vLLM packs them for AMX tiles, 32 rows by pairs of columns, and keeps nothing else;
    tests/engine/test_fp8.py fails if it packs them otherwise.
    """
    codes_NK = held_codes(layer)
    if codes_NK.device.type != "cpu":
        return codes_NK
    num_rows, num_columns = codes_NK.shape
    tiles = codes_NK.view(torch.uint8).view(num_rows // 32, num_columns // 2, 32, 2)
    return tiles.transpose(1, 2).reshape(num_rows, num_columns).view(codes_NK.dtype)
