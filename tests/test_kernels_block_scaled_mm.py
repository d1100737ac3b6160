"""The GEMM with block scales under Triton's interpreter, against float64: every block its own scale, also where K and N
end within a block. Its machine code is tested in test_machine_code.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8compile.kernels.block_scaled_mm import BLOCK, choose_block_scaled_config, launch_block_scaled_mm
from fp8compile.kernels.configs import SQUARE, TOKENS_16, TOKENS_64
from fp8compile.preview.interpreter import InterpreterProcess
from fp8compile.recipe import E4M3, E5M2

LAUNCH = "fp8compile.kernels.block_scaled_mm:launch_block_scaled_mm"
CONFIGURED = __name__ + ":launch_configured"


def launch_configured(*arguments: Any) -> Any:
    """In the interpreter: keyword arguments come last, as a dictionary."""
    *positional, keywords = arguments
    return launch_block_scaled_mm(*positional, **keywords)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterProcess]:
    with InterpreterProcess() as process:
        yield process


def integers(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


def blocks(size: int) -> int:
    return -(-size // BLOCK)


def scales(*shape: int) -> torch.Tensor:
    """Powers of two, near enough for sums of a few blocks to be exact."""
    return torch.ldexp(torch.ones(shape), torch.randint(-3, 4, shape, dtype=torch.int32))


def reference(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """Dequantize each block, multiply in float64."""

    def wide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        by_row = scale if len(scale) == len(x) else scale.repeat_interleave(BLOCK, 0)[: len(x)]
        return x.double() * by_row.double().repeat_interleave(BLOCK, 1)[:, : x.shape[1]]

    return wide(a, scale_a) @ wide(b, scale_b).T


def inputs(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    return integers(m, k), integers(n, k), scales(m, blocks(k)), scales(blocks(n), blocks(k))


SHAPES = [(1, 16, 16), (5, 48, 128), (16, 144, 304), (40, 272, 160), (64, 13, 512), (150, 144, 400), (130, 3, 1040)]


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_any_shape_is_exact_on_integers(interpreter: InterpreterProcess, m: int, n: int, k: int) -> None:
    """K and N multiples of 128 or not: the last block's scale is for its own elements only."""
    arguments = inputs(m, n, k)
    out = interpreter.call(LAUNCH, *arguments, None, torch.float32)
    assert torch.equal(out, reference(*arguments).float())


@pytest.mark.parametrize(("m", "n", "k"), [(5, 48, 128), (64, 144, 512), (150, 272, 304)])
@pytest.mark.parametrize(("blocks_a", "blocks_b"), [(False, False), (True, True), (True, False)])
def test_both_operands_take_either_kind_of_block(
    interpreter: InterpreterProcess, m: int, n: int, k: int, blocks_a: bool, blocks_b: bool
) -> None:
    """wgrad multiplies two tensors with a scale per row and 128; a weight may come first. Strides do not matter."""
    rows = [blocks(size) if by_block else size for size, by_block in ((m, blocks_a), (n, blocks_b))]
    a, b, scale_a, scale_b = integers(m, k), integers(n, k), scales(rows[0], blocks(k)), scales(blocks(k), rows[1]).T
    out = interpreter.call(LAUNCH, a, b, scale_a, scale_b, None, torch.float32)
    assert torch.equal(out, reference(a, b, scale_a, scale_b).float())


@pytest.mark.parametrize("config", [TOKENS_16, TOKENS_64, SQUARE], ids=["16", "64", "square"])
def test_tiles_do_not_change_the_result(interpreter: InterpreterProcess, config: Any) -> None:
    arguments = inputs(9 * 16 + 1, 272, 144)
    out = interpreter.call(CONFIGURED, *arguments, None, torch.float32, {"config": config})
    assert torch.equal(out, reference(*arguments).float())


@pytest.mark.parametrize("m", [10, 80])
def test_each_block_gets_its_own_scale(interpreter: InterpreterProcess, m: int) -> None:
    """All scales distinct; random data; within float32's rounding."""
    a, b = torch.randn(m, 304).to(E4M3), torch.randn(144, 304).to(E4M3)
    scale_a = 1 + torch.arange(m * 3, dtype=torch.float32).reshape(m, 3)
    scale_b = (2.0 + torch.arange(6, dtype=torch.float32)).reshape(2, 3) / 8
    out = interpreter.call(LAUNCH, a, b, scale_a, scale_b, None, torch.float32)
    expected = reference(a, b, scale_a, scale_b)
    largest = expected.abs().amax()
    assert ((out - expected).abs() <= 1e-5 * largest).all()


def test_scales_in_columns_are_read_as_well(interpreter: InterpreterProcess) -> None:
    """Contiguous along M, which the GEMM reads fastest."""
    a, b, scale_a, scale_b = inputs(70, 48, 304)
    columns = scale_a.T.contiguous().T
    assert columns.stride() == (1, 70)
    out = interpreter.call(LAUNCH, a, b, columns, scale_b, None, torch.float32)
    assert torch.equal(out, reference(a, b, scale_a, scale_b).float())


@pytest.mark.parametrize("m", [7, 70])
def test_nan_around_operands_never_reaches_the_output(interpreter: InterpreterProcess, m: int) -> None:
    """Rows of 16-byte multiples in memory that is NaN elsewhere, scales included."""
    a, b, scale_a, scale_b = inputs(m, 40, 144)

    def framed(x: torch.Tensor) -> torch.Tensor:
        frame = torch.full((x.shape[0] + 130, 192), 0x7F, dtype=torch.uint8).view(E4M3)
        frame[1 : 1 + x.shape[0], 16 : 16 + x.shape[1]] = x
        return frame[1 : 1 + x.shape[0], 16 : 16 + x.shape[1]]

    room = torch.full((m + 9, 9), float("nan"))
    room[:m, :2] = scale_a
    out = interpreter.call(LAUNCH, framed(a), framed(b), room[:m, :2], scale_b, None, torch.float32)
    assert torch.equal(out, reference(a, b, scale_a, scale_b).float())


def test_non_finite_block_spreads_along_its_row_only(interpreter: InterpreterProcess) -> None:
    a, b, scale_a, scale_b = inputs(20, 32, 304)
    a[3, 290], scale_a[5, 1] = float("nan"), float("inf")
    finite = torch.isfinite(interpreter.call(LAUNCH, a, b, scale_a, scale_b, None, torch.float32))
    assert finite.all(dim=1).tolist() == [row not in (3, 5) for row in range(20)]


@pytest.mark.parametrize(("first", "second"), [(E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_and_bias(
    interpreter: InterpreterProcess, first: torch.dtype, second: torch.dtype, out_dtype: torch.dtype
) -> None:
    a, b, bias = integers(9, 160, dtype=first), integers(48, 160, dtype=second), integers(48, dtype=torch.bfloat16)
    scale_a, scale_b = scales(9, 2), scales(1, 2)
    out = interpreter.call(LAUNCH, a, b, scale_a, scale_b, bias, out_dtype)
    assert torch.equal(out, (reference(a, b, scale_a, scale_b) + bias.double()).to(out_dtype))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 32), (5, 0, 32), (5, 16, 0)])
def test_nothing_makes_nothing_or_the_bias(m: int, n: int, k: int) -> None:
    """Without a launch, which could not succeed here."""
    bias = torch.randn(n, dtype=torch.bfloat16)
    assert torch.equal(launch_block_scaled_mm(*inputs(m, n, k), bias, torch.bfloat16), bias.expand(m, n))


def test_long_sum_stays_within_the_bound_of_float32(interpreter: InterpreterProcess) -> None:
    """K = 16384 of equal signs: 128 roundings within a block, one for each scale and each block."""
    k = 16384
    a, b = torch.randn(4, k).abs().to(E4M3), torch.randn(16, k).abs().to(E4M3)
    scale_a, scale_b = torch.rand(4, 128) + 0.5, torch.rand(1, 128) + 0.5
    out = interpreter.call(LAUNCH, a, b, scale_a, scale_b, None, torch.float32)
    exact = reference(a, b, scale_a, scale_b)
    assert ((out.double() - exact).abs() <= (128 + 2 + 128) * 2.0**-24 * exact).all()


A, B, SCALE_A, SCALE_B = inputs(16, 32, 256)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "E5M2 twice": ((A.to(E5M2), B.to(E5M2), SCALE_A, SCALE_B, None, torch.float32), "does not multiply E5M2 by E5M2"),
    "batch": ((A[None], B[None], SCALE_A, SCALE_B, None, torch.float32), r"\(1, 16, 256\) times"),
    "scale per row": ((A, B, SCALE_A[:, :1], SCALE_B, None, torch.float32), r"scale_a: shape \(16, 1\).*\(16, 2\)"),
    "scales of 16 rows": ((A, B, SCALE_A, scales(2, 2), None, torch.float32), r"scale_b: shape \(2, 2\).*\(32, 2\)"),
    "scale in bf16": ((A, B, SCALE_A.bfloat16(), SCALE_B, None, torch.float32), "scales are float32"),
    "bias of 31": ((A, B, SCALE_A, SCALE_B, torch.ones(31), torch.float32), r"bias: shape \(31,\)"),
    "FP8 result": ((A, B, SCALE_A, SCALE_B, None, E4M3), "the result is a float"),
    "K first": ((integers(256, 16).T, B, SCALE_A, SCALE_B, None, torch.float32), r"contraction \(K\) last"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_any_launch(case: str) -> None:
    arguments, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        launch_block_scaled_mm(*arguments)


def test_tiles_have_one_scale_of_b_for_each_block_of_k() -> None:
    for m in (1, 16, 17, 64, 65, 8192):
        config = choose_block_scaled_config(m)
        assert config.block_n == config.block_k == BLOCK
