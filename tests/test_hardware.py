"""Chips, the roofline model, and what the default policy makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fp8compile.hardware import CHIPS, Chip, get_chip
from fp8compile.recipe import E4M3, E5M2

H100 = CHIPS["h100"]
LLAMA_TOKENS = 8192
LLAMA_GEMMS = {"q": (4096, 4096), "k": (1024, 4096), "out": (4096, 4096), "up": (14336, 4096), "down": (4096, 14336)}
"""Output and input features of the Linears of a Llama-3-8B block."""


def gemms_of_layer(tokens: int, out_features: int, in_features: int) -> list[tuple[int, int, int]]:
    """M, N and K of a Linear's fprop, dgrad and wgrad."""
    return [
        (tokens, out_features, in_features),
        (tokens, in_features, out_features),
        (out_features, in_features, tokens),
    ]


def layer_gain(chip: Chip, tokens: int, out_features: int, in_features: int) -> float:
    """High-precision time of a Linear's three GEMMs over their FP8 time including the casts, each operand cast twice
    (once per layout) after one pass for its amax; activations, gradients and weights in bf16."""
    gemms = gemms_of_layer(tokens, out_features, in_features)
    high = sum(chip.matmul_seconds(1, *gemm, fp8=False) for gemm in gemms)
    fp8 = sum(chip.matmul_seconds(1, *gemm, fp8=True) for gemm in gemms)
    elements = [tokens * in_features, tokens * out_features, out_features * in_features]
    casts = sum(chip.memory_seconds(2 * n) + 2 * chip.memory_seconds(3 * n) for n in elements)
    return high / (fp8 + casts)


def test_rates_are_those_of_the_design() -> None:
    """DESIGN.md, section 6: 0.68 of 989 TFLOP/s, 0.65 of 1979, 0.85 of 3.35 TB/s."""
    launch = H100.launch
    compute = 2 * 8192**3
    assert H100.matmul_seconds(1, 8192, 8192, 8192, fp8=False) == pytest.approx(compute / (0.68 * 989e12) + launch)
    assert H100.matmul_seconds(1, 8192, 8192, 8192, fp8=True) == pytest.approx(compute / (0.65 * 1979e12) + launch)
    assert H100.memory_seconds(1e9) == pytest.approx(1e9 / (0.85 * 3.35e12) + launch)
    assert H100.memory_seconds(1e9, launches=3) == pytest.approx(1e9 / (0.85 * 3.35e12) + 3 * launch)


def test_gemm_ceiling_is_the_ratio_of_rates() -> None:
    """A GEMM bound by arithmetic gains 0.65·1979 / 0.68·989 = 1.91; NVIDIA measures a ceiling of 1.90."""
    gain = H100.matmul_seconds(1, 8192, 8192, 8192, fp8=False) / H100.matmul_seconds(1, 8192, 8192, 8192, fp8=True)
    assert gain == pytest.approx(1.91, abs=0.01)


def test_gemm_bound_by_memory_gains_what_its_operands_shrink() -> None:
    """One row: time is that of reading the weight, two bytes an element or one."""
    high, fp8 = (H100.matmul_seconds(1, 1, 65536, 16384, fp8=flag) - H100.launch for flag in (False, True))
    assert high / fp8 == pytest.approx(2.0, abs=0.01)
    assert high == pytest.approx(2 * 65536 * 16384 / (0.85 * 3.35e12), rel=0.01)


def test_matmul_seconds_adds_up_over_a_batch_and_grows_with_the_result() -> None:
    one, many = (H100.matmul_seconds(batch, 2048, 2048, 2048, fp8=True) - H100.launch for batch in (1, 8))
    assert many == pytest.approx(8 * one)
    narrow, wide = (H100.matmul_seconds(1, 8192, 8192, 16, fp8=True, out_bytes=size) for size in (2, 4))
    assert wide > narrow


@pytest.mark.parametrize("name", ["down", "out", "q", "up"])
def test_wide_llama_layers_gain_with_casts_of_their_own(name: str) -> None:
    assert 1.1 < layer_gain(H100, LLAMA_TOKENS, *LLAMA_GEMMS[name]) < 1.91


def test_narrow_llama_layers_need_to_share_a_cast() -> None:
    """k and v have 1024 output features: alone they do not pay for the cast of an input that q casts anyway."""
    assert layer_gain(H100, LLAMA_TOKENS, *LLAMA_GEMMS["k"]) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("gigabytes", "launches", "speedup"), [(8.61, 80, 1.52), (8.28, 75, 1.53), (7.77, 67, 1.56), (5.5, 19, 1.70)]
)
def test_llama_block_speeds_up_as_the_design_says(gigabytes: float, launches: int, speedup: float) -> None:
    """DESIGN.md, section 6: 21 GEMMs, and outside of them 19 kernels moving 4.32 GB in bf16, against torchao, two
    naive passes, and the floor if it took no more launches than bf16."""
    shapes = [LLAMA_GEMMS[name] for name in ("q", "k", "k", "out", "up", "up", "down")]
    gemms = [gemm for out, features in shapes for gemm in gemms_of_layer(LLAMA_TOKENS, out, features)]
    high, fp8 = (sum(H100.matmul_seconds(1, *gemm, fp8=flag) for gemm in gemms) for flag in (False, True))
    high += H100.memory_seconds(4.32e9, launches=19)
    fp8 += H100.memory_seconds(gigabytes * 1e9, launches=launches)
    assert len(gemms) == 21
    assert high / fp8 == pytest.approx(speedup, abs=0.015)


@pytest.mark.parametrize("size", [256, 512, 1024, 1536])
def test_small_layers_lose(size: int) -> None:
    """DESIGN.md, section 6: below about 2000 in every dimension FP8 is slower than bf16."""
    assert layer_gain(H100, size, size, size) < 1.0


@pytest.mark.parametrize("size", [4096, 8192])
def test_large_layers_gain(size: int) -> None:
    assert layer_gain(H100, size, size, size) > 1.0


def test_gain_of_square_layers_grows_with_size() -> None:
    gains = [layer_gain(H100, size, size, size) for size in range(512, 16385, 512)]
    assert gains == sorted(gains)


def test_chip_without_fp8_never_gains_and_says_why() -> None:
    a100 = CHIPS["a100"]
    assert not a100.has_fp8
    assert a100.matmul_seconds(1, 8192, 8192, 8192, fp8=True) == float("inf")
    assert a100.refuses(E4M3, E4M3) == "a100 has no FP8 tensor cores"


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_refusals_of_dtypes(name: str) -> None:
    chip = CHIPS[name]
    assert chip.refuses(E4M3, E4M3) is None
    assert chip.refuses(E4M3, E5M2) is None
    assert chip.refuses(E5M2, E4M3) is None
    assert "E5M2 by E5M2" in chip.refuses(E5M2, E5M2)
    assert "not an FP8 GEMM" in chip.refuses(torch.bfloat16, E4M3)


def test_get_chip_by_name() -> None:
    for name, chip in CHIPS.items():
        assert get_chip(name) is get_chip(name.upper()) is chip
        assert chip.name == name


def test_unknown_chip_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'v100'.*a100, h100, h200, b200"):
        get_chip("v100")


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA B200", (10, 0), "b200"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("Tesla T4", (7, 5), "a100"),
        ("NVIDIA GeForce RTX 3090", (8, 6), "a100"),
    ],
)
def test_present_gpu_is_recognized(monkeypatch: pytest.MonkeyPatch, device, capability, expected: str) -> None:
    """By its name, else as the nearest chip that is not more capable; never as one with FP8 if it has none."""
    from fp8compile import hardware

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    hardware._present_chip.cache_clear()
    try:
        assert get_chip().name == expected
        assert get_chip("h200").name == "h200"
    finally:
        hardware._present_chip.cache_clear()


def test_chips_are_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        H100.alignment = 8  # type: ignore[misc]
    for chip in CHIPS.values():
        assert chip.has_fp8 == (chip.fp8_flops > chip.high_flops)
