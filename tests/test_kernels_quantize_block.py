"""Quantize with scales for blocks in one kernel, under Triton's interpreter: the bytes and scales of the reference, for
any size, layout, source and values. Its machine code is tested in test_machine_code.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8compile.kernels.quantize_block import launch_quantize_block
from fp8compile.ops import QUANTIZE_BLOCK
from fp8compile.preview.interpreter import InterpreterProcess
from fp8compile.recipe import BLOCK, E4M3, E5M2

LAUNCH = "fp8compile.kernels.quantize_block:launch_quantize_block"
LAYOUTS = {"as it is": ((1, 16), None), "transposed": (None, (16, 16)), "both": ((16, 16), (1, 16))}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterProcess]:
    with InterpreterProcess() as process:
        yield process


def expected(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool, square: bool, *layouts: Any) -> list[Any]:
    """What the operators make: data and scales of each layout."""
    made: list[Any] = []
    for transpose, multiples in zip((False, True), layouts, strict=True):
        if multiples is None:
            made += [None, None]
            continue
        block = [BLOCK, BLOCK] if square else [BLOCK, 1] if transpose else [1, BLOCK]
        made += QUANTIZE_BLOCK(x, block, dtype, power_of_two, transpose, multiples)
    return made


def assert_same(got: Any, wanted: list[Any]) -> None:
    """Equal bytes and scales; NaN for NaN, whose sign hardware and CPU set as they like."""
    for mine, theirs in zip(got, wanted, strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        nan = theirs.float().isnan()
        assert torch.equal(mine.float().isnan(), nan)
        bits = torch.int32 if theirs.dtype == torch.float32 else torch.uint8
        assert torch.equal(mine.contiguous().view(bits)[~nan], theirs.view(bits)[~nan])


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (128, 128), (100, 260), (300, 13)])
def test_any_size_and_layout_gives_the_bytes_of_the_reference(
    interpreter: InterpreterProcess, shape: tuple[int, int], square: bool, layouts: str
) -> None:
    """What is added to reach a multiple is zero, and counts for no scale."""
    x = (torch.randn(shape) * 2.0 ** torch.randint(-12, 12, (shape[0], 1))).bfloat16()
    arguments = x, E4M3, False, square, *LAYOUTS[layouts]
    assert_same(interpreter.call(LAUNCH, *arguments), expected(*arguments))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_sources_dtypes_and_scale_rules(
    interpreter: InterpreterProcess, source: torch.dtype, power_of_two: bool, dtype: torch.dtype
) -> None:
    x = (torch.randn(40, 150) * 3).to(source)
    arguments = x, dtype, power_of_two, False, (1, 1), (1, 1)
    assert_same(interpreter.call(LAUNCH, *arguments), expected(*arguments))


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e5, 1e-42, 0.0])
def test_extreme_values_stay_in_their_block(interpreter: InterpreterProcess, value: float, square: bool) -> None:
    """One extreme element, and a row and a column of zeros: the reference's bytes, and other blocks as without it."""
    x = torch.randn(140, 140)
    x[7], x[:, 9], x[130, 131] = 0, 0, value
    arguments = x, E4M3, False, square, (1, 1), (1, 1)
    got = interpreter.call(LAUNCH, *arguments)
    assert_same(got, expected(*arguments))
    x[130, 131] = 1
    calm = interpreter.call(LAUNCH, x, *arguments[1:])
    assert torch.equal(got[0][:128].view(torch.uint8), calm[0][:128].view(torch.uint8))
    assert torch.equal(got[2][:, :128].view(torch.uint8), calm[2][:, :128].view(torch.uint8))


def test_rows_in_a_larger_buffer(interpreter: InterpreterProcess) -> None:
    """A stride between rows; what lies between them is NaN and never read."""
    room = torch.full((60, 300), float("nan"), dtype=torch.bfloat16)
    x = room[3:50, 16:166]
    x.copy_(torch.randn(47, 150))
    arguments = x, E4M3, False, False, (1, 16), (16, 16)
    assert_same(interpreter.call(LAUNCH, *arguments), expected(*arguments))


REFUSED: dict[str, tuple[torch.Tensor, Any, Any, str]] = {
    "columns first": (torch.randn(16, 32).T, (1, 1), None, "contiguous rows"),
    "three dimensions": (torch.randn(2, 16, 32), (1, 1), None, r"\(2, 16, 32\)"),
    "empty": (torch.randn(0, 32), (1, 1), None, r"\(0, 32\)"),
    "no layout": (torch.randn(16, 32), None, None, "at least one layout"),
    "a multiple of 48": (torch.randn(16, 32), (1, 48), None, "must divide 128"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_any_launch(case: str) -> None:
    x, multiples, transposed, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        launch_quantize_block(x, E4M3, False, False, multiples, transposed)
