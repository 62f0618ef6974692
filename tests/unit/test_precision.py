"""The FP8 reference against the definition of E4M3, and KV scales against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.fp8 import (
    BLOCK,
    E4M3_MAX,
    WHOLE,
    KvScales,
    LayerStacker,
    Quantized,
    Sharding,
    kv_scale,
    quantize_blocks,
)

# Every finite value from 0 up by the definition: subnormals m/8 * 2**-6, then (1 + m/8) * 2**(e - 7), without the NaN
# on top.
VALUES = sorted(
    [m / 8 * 2**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)


def nearest(x: float) -> float:
    """To the nearest value, a tie to the one whose last bit is 0: values in order have codes 0, 1, 2, ..."""
    sign, x = np.sign(x), min(abs(x), E4M3_MAX)
    gaps = [abs(value - x) for value in VALUES]
    best = [code for code, gap in enumerate(gaps) if gap == min(gaps)]
    return sign * VALUES[next((code for code in best if code % 2 == 0), best[0])]


def dequantize_blocks(quantized: Quantized) -> torch.Tensor:
    """Return the values that the engine computes with, in float32."""
    num_rows, num_columns = quantized.codes_NK.shape
    scale_NK = quantized.scale.repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)[:, :num_columns]
    return quantized.codes_NK.float() * scale_NK


def round_trip(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return values after a round trip through the KV cache, saturating as cache kernels do."""
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def blocks(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)).bfloat16()


def test_e4m3_has_the_values_of_its_definition() -> None:
    assert (len(VALUES), VALUES[-1]) == (127, E4M3_MAX)


def test_codes_are_the_nearest_values_of_the_scaled_weights() -> None:
    """A reference that truncated, or broke ties upwards, would differ from every engine."""
    weight = blocks(40, 130, seed=1)
    quantized = quantize_blocks(weight)
    for row, column in [(0, 0), (39, 129), (17, 127), (17, 128), *zip(range(40), range(0, 120, 3), strict=True)]:
        scale = np.float32(quantized.scale[row // 128, column // 128])
        scaled = np.float32(weight[row, column].item()) * (np.float32(1) / scale)
        assert float(quantized.codes_NK[row, column]) == nearest(float(scaled))


def test_scale_of_a_block_is_its_largest_weight_over_448() -> None:
    weight = torch.zeros(256, 384, dtype=torch.bfloat16)
    weight[3, 5], weight[130, 383] = -2.0, 7.0
    quantized = quantize_blocks(weight)
    expected = torch.full((2, 3), 1e-4)
    expected[0, 0], expected[1, 2] = 2.0, 7.0
    assert torch.equal(quantized.scale, expected / 448)
    assert float(quantized.codes_NK[3, 5]) == -448.0


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (200, 130), (129, 64)])
def test_error_of_a_block_is_bounded_by_half_a_step(shape: tuple[int, int]) -> None:
    """A block edge in the wrong place would scale some weights by their neighbors' scale."""
    for seed in range(5):
        weight = blocks(*shape, seed=seed)
        quantized = quantize_blocks(weight)
        assert quantized.codes_NK.shape == weight.shape
        assert tuple(quantized.scale.shape) == (-(-shape[0] // 128), -(-shape[1] // 128))
        error = (dequantize_blocks(quantized) - weight.float()).abs()
        bound = weight.float().abs() / 16 + quantized.scale.max() * 2**-10
        assert bool((error <= bound * 1.001).all())


def test_quantizing_what_was_dequantized_changes_nothing() -> None:
    first = quantize_blocks(blocks(256, 256, seed=4))
    # The largest weight of a block is 448 scales again, so the scale is the same up to rounding and every code stays.
    second = quantize_blocks(dequantize_blocks(first))
    assert torch.equal(first.codes_NK.view(torch.uint8), second.codes_NK.view(torch.uint8))


def test_projections_are_stacked_as_engines_hold_them_and_the_rest_is_left_alone() -> None:
    """k and v with 64 rows each share a block of 128: quantized apart, their scales would differ from the engine's."""
    stacker = LayerStacker(WHOLE)
    prefix = "model.layers.3"
    names = {
        "model.embed_tokens.weight": (8, 4),
        f"{prefix}.self_attn.v_proj.weight": (2, 4),
        f"{prefix}.self_attn.q_proj.weight": (4, 4),
        f"{prefix}.self_attn.k_proj.weight": (2, 4),
        f"{prefix}.self_attn.k_proj.bias": (2,),
        f"{prefix}.self_attn.q_norm.weight": (4,),
        f"{prefix}.self_attn.o_proj.weight": (4, 4),
        f"{prefix}.mlp.gate.weight": (8, 4),
        f"{prefix}.mlp.up_proj.weight": (6, 4),
        f"{prefix}.mlp.gate_proj.weight": (6, 4),
        f"{prefix}.mlp.down_proj.weight": (4, 6),
        f"{prefix}.input_layernorm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    tensors = {name: torch.randn(shape) for name, shape in names.items()}
    layers = dict(filter(None, (stacker.add(name, tensor) for name, tensor in tensors.items())))
    assert list(layers) == [
        f"{prefix}.self_attn.qkv_proj",
        f"{prefix}.self_attn.o_proj",
        f"{prefix}.mlp.gate_up_proj",
        f"{prefix}.mlp.down_proj",
    ]
    expected = torch.cat([tensors[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"])
    (held,) = layers[f"{prefix}.self_attn.qkv_proj"]
    assert torch.equal(held, expected.bfloat16())


def test_workers_hold_the_rows_of_their_heads_and_the_columns_that_read_them() -> None:
    """A reference of the whole layer, cut afterward, would have blocks that begin elsewhere than a worker's. Four
    workers on two key-value heads: two hold the same head."""
    heads = Sharding(num_workers=4, num_kv_heads=2)
    rows, columns = torch.arange(8)[:, None].expand(8, 3), torch.arange(8).expand(3, 8)
    assert [heads.part("q_proj", rows, rank)[:, 0].tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [heads.part("k_proj", rows, rank)[0, 0].item() for rank in range(4)] == [0, 0, 4, 4]
    assert [heads.part("down_proj", columns, rank)[0].tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match="fc1: got a layer in FP8 with 4 tensor-parallel workers"):
        heads.part("fc1", rows, 0)


def test_each_worker_stacks_its_own_parts() -> None:
    """The first half of a stacked layer is no worker's part of it: that would be queries alone."""
    stacker = LayerStacker(Sharding(num_workers=2, num_kv_heads=2))
    q, k, v = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4)
    for part, weight in zip("qk", (q, k), strict=True):
        assert stacker.add(f"model.layers.0.self_attn.{part}_proj.weight", weight) is None
    layer = stacker.add("model.layers.0.self_attn.v_proj.weight", v)
    assert layer is not None
    for rank, held in enumerate(layer[1]):
        own = [weight.chunk(2)[rank] for weight in (q, k, v)]
        assert torch.equal(held, torch.cat(own).bfloat16())


def test_scale_holds_what_it_was_calibrated_on_and_no_more() -> None:
    x = torch.linspace(-30, 30, 1001)
    scale = kv_scale(30.0, 1.0)
    assert scale == float(np.float32(30 / 448))
    assert float(round_trip(x, scale * 1.001).max()) == pytest.approx(30, rel=0.01)
    assert float(round_trip(x, scale / 2).max()) == pytest.approx(15, rel=0.01)
    assert kv_scale(0.0, 1.25) > 0


def round_trip_error(x: torch.Tensor, scale: float) -> float:
    """Root mean square of the error over that of the values."""
    return float((round_trip(x, scale) - x).square().mean().sqrt() / x.square().mean().sqrt())


def test_round_trip_error_is_that_of_three_bits_until_values_saturate_or_underflow() -> None:
    """E4M3 has no best scale, only bad ones: that is why margins are free and why a scale of 1 often looks fine."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    fitting = kv_scale(float(x.abs().max()), 1.25)
    assert round_trip_error(x, fitting) == pytest.approx(0.026, abs=0.002)
    assert round_trip_error(x, fitting * 4) == pytest.approx(0.026, abs=0.002)
    assert round_trip_error(x, fitting / 8) > 0.3
    assert round_trip_error(x, fitting * 2**17) > 0.1
    assert float(round_trip(torch.tensor([1e9]), 1.0)) == 448.0


def test_scales_have_a_name_each() -> None:
    named = KvScales(version=2, q=(1.0, 2.0), k=(3.0, 4.0), v=(5.0, 6.0)).named()
    assert (len(named), named["kv_scales.layers.1.k"], named["kv_scales.layers.0.v"]) == (6, 4.0, 5.0)
