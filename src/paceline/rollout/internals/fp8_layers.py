"""Read the codes and scales of a running model's FP8 layers.

Relied upon:
  vllm/model_executor/layers/quantization/online/fp8.py   Fp8PerBlockOnlineLinearMethod; `weight`, `weight_scale_inv`
  vllm/model_executor/layers/linear.py                    LinearBase.quant_method
  CPU kernels of vllm/_C                                  order of codes in AMX tiles

Goes when vLLM's `compute_weight_checksums` (0.32) hashes codes and scales without the kernel's packing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def quantized_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield names and modules of the layers quantized at load."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod

    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_method, Fp8PerBlockOnlineLinearMethod):
            yield name, module


def held_codes(layer: torch.nn.Module) -> torch.Tensor:
    """Return the memory of the codes in the kernel's layout."""
    assert isinstance(layer.weight, torch.Tensor)
    return layer.weight.data


def held_scale(layer: torch.nn.Module) -> torch.Tensor:
    """Return the memory of the block scales."""
    assert isinstance(layer.weight_scale_inv, torch.Tensor)
    return layer.weight_scale_inv.data


def codes_in_order(layer: torch.nn.Module) -> torch.Tensor:
    """Return a layer's codes in matrix order.

    On the CPU vLLM keeps them only packed for AMX tiles, 32 rows by pairs of columns (tests/engine/test_fp8.py).
    """
    codes_NK = held_codes(layer)
    if codes_NK.device.type != "cpu":
        return codes_NK
    num_rows, num_columns = codes_NK.shape
    tiles = codes_NK.view(torch.uint8).view(num_rows // 32, num_columns // 2, 32, 2)
    return tiles.transpose(1, 2).reshape(num_rows, num_columns).view(codes_NK.dtype)
