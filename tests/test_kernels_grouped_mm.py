"""The grouped GEMM under Triton's interpreter: exact on integers against the reference, with empty groups, groups that
end within a tile, and rows behind the last group. Its machine code is tested in test_machine_code.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from fp8compile.kernels.configs import SQUARE, TOKENS_16, TOKENS_64, WIDE
from fp8compile.kernels.grouped_mm import launch_scaled_grouped_mm
from fp8compile.ops import SCALED_GROUPED_MM
from fp8compile.preview.interpreter import InterpreterProcess
from fp8compile.recipe import E4M3, E5M2

LAUNCH = "fp8compile.kernels.grouped_mm:launch_scaled_grouped_mm"
CONFIGURED = __name__ + ":launch_configured"


def launch_configured(*arguments: Any) -> Any:
    """In the interpreter: keyword arguments come last, as a dictionary."""
    *positional, keywords = arguments
    return launch_scaled_grouped_mm(*positional, **keywords)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterProcess]:
    with InterpreterProcess() as process:
        yield process


def integers(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


def scales(*shape: int) -> torch.Tensor:
    """Powers of two of many sizes."""
    return torch.ldexp(torch.ones(shape), torch.randint(-32, 32, shape, dtype=torch.int32))


def ends(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


GROUPS = {
    "experts with 5, 0 and 33 tokens": (5, 0, 33),
    "one": (20,),
    "all empty": (0, 0),
    "first and last empty": (0, 7, 0),
    "more than a tile": (140, 1, 65, 0, 16),
}


@pytest.mark.parametrize("tail", [0, 3, 40])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_exact_on_integers(interpreter: InterpreterProcess, name: str, tail: int) -> None:
    """Rows behind the last group are zero, whatever is in them."""
    sizes = GROUPS[name]
    rows = sum(sizes) + tail
    a, scale_a = integers(rows, 160), scales(rows, 1)
    a[rows - tail :], scale_a[rows - tail :] = float("nan"), float("inf")
    arguments = a, integers(len(sizes), 48, 160), scale_a, scales(len(sizes), 48, 1), ends(*sizes), torch.float32, True
    assert torch.equal(interpreter.call(LAUNCH, *arguments), SCALED_GROUPED_MM(*arguments))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("config", [TOKENS_16, TOKENS_64, SQUARE, WIDE], ids=["16", "64", "square", "wide"])
@pytest.mark.parametrize("programs", [1, 5])
def test_tiles_and_programs_do_not_change_the_result(
    interpreter: InterpreterProcess, config: Any, fast: bool, programs: int
) -> None:
    """Every tile has one program, however they are dealt out."""
    sizes = (150, 0, 30)
    arguments = integers(190, 32), integers(3, 272, 32), scales(190, 1), scales(3, 272, 1), ends(*sizes), torch.float32
    out = interpreter.call(CONFIGURED, *arguments, fast, {"config": config, "programs": programs})
    assert torch.equal(out, SCALED_GROUPED_MM(*arguments, fast))


@pytest.mark.parametrize("shape_a", [(25, 1), (1, 1)])
@pytest.mark.parametrize("shape_b", [(2, 16, 1), (2, 1, 1), (1, 16, 1), (1, 1, 1)])
def test_each_row_column_and_expert_gets_its_own_scale(
    interpreter: InterpreterProcess, shape_a: tuple[int, ...], shape_b: tuple[int, ...]
) -> None:
    arguments = integers(25, 32), integers(2, 16, 32), scales(*shape_a), scales(*shape_b), ends(20, 5), torch.float32
    assert torch.equal(interpreter.call(LAUNCH, *arguments, True), SCALED_GROUPED_MM(*arguments, True))


def test_nan_of_one_expert_stays_with_its_tokens(interpreter: InterpreterProcess) -> None:
    """Tiles reach over the end of a group and of a matrix, results do not."""
    a, b = integers(30, 32), integers(3, 24, 32)
    a[10:20], b[1] = float("nan"), float("nan")
    arguments = a, b, scales(30, 1), scales(3, 24, 1), ends(10, 10, 10), torch.float32, True
    out, expected = interpreter.call(LAUNCH, *arguments), SCALED_GROUPED_MM(*arguments)
    assert out[10:20].isnan().all()
    assert torch.equal(out[:10], expected[:10])
    assert torch.equal(out[20:], expected[20:])


@pytest.mark.parametrize(("first", "second"), [(E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_dtypes(
    interpreter: InterpreterProcess, first: torch.dtype, second: torch.dtype, out_dtype: torch.dtype
) -> None:
    ones = torch.ones(1, 1), torch.ones(1, 1, 1)
    arguments = integers(9, 48, dtype=first), integers(2, 16, 48, dtype=second), *ones, ends(4, 5), out_dtype, True
    assert torch.equal(interpreter.call(LAUNCH, *arguments), SCALED_GROUPED_MM(*arguments))


@pytest.mark.parametrize(("rows", "groups", "n", "k"), [(0, 2, 16, 32), (5, 0, 16, 32), (5, 2, 0, 32), (5, 2, 16, 0)])
def test_nothing_makes_nothing_or_zeros(rows: int, groups: int, n: int, k: int) -> None:
    """Without a launch, which could not succeed here."""
    sizes = ends(*[0] * (groups - 1), *[rows] * (groups > 0))
    a, b = integers(rows, k), integers(groups, n, k)
    out = launch_scaled_grouped_mm(a, b, scales(rows, 1), scales(1, 1, 1), sizes, torch.bfloat16, True)
    assert torch.equal(out, torch.zeros(rows, n, dtype=torch.bfloat16))


A, B, ONE, TWO = integers(8, 32), integers(2, 16, 32), torch.ones(1, 1), ends(3, 5)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "E5M2 twice": ((A.to(E5M2), B.to(E5M2), ONE, ONE, TWO, torch.float32, True), "does not multiply E5M2 by E5M2"),
    "one matrix": ((A, B[0], ONE, ONE, TWO, torch.float32, True), r"times the transposes of \(16, 32\)"),
    "three groups": ((A, B, ONE, ONE, ends(1, 2, 3), torch.float32, True), r"in groups \(3,\)"),
    "int64 offsets": ((A, B, ONE, ONE, TWO.long(), torch.float32, True), "offsets: int32"),
    "scale of 7 rows": ((A, B, torch.ones(7, 1), ONE, TWO, torch.float32, True), r"scale_a: shape \(7, 1\)"),
    "scale of 3 experts": ((A, B, ONE, torch.ones(3, 1, 1), TWO, torch.float32, True), r"scale_b: shape \(3, 1, 1\)"),
    "FP8 result": ((A, B, ONE, ONE, TWO, E4M3, True), "the result is a float"),
    "K of 20": ((integers(8, 20), integers(2, 16, 20), ONE, ONE, TWO, torch.float32, True), "row stride 20"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_any_launch(case: str) -> None:
    arguments, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        launch_scaled_grouped_mm(*arguments)


def test_traced_launch_is_one_kernel() -> None:
    mode = FakeTensorMode()
    inputs = [mode.from_tensor(x) for x in (A, B, torch.ones(8, 1), torch.ones(2, 16, 1), TWO)]
    with mode:
        graph = make_fx(lambda *x: launch_scaled_grouped_mm(*x, torch.bfloat16, True))(*inputs).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.higher_order.triton_kernel_wrapper_functional)
    assert set(node.kwargs["tma_descriptor_metadata"]) == {"a", "b"}
    assert node.kwargs["kwargs"]["b"].meta["val"].shape == (32, 32)
    (output,) = graph.find_nodes(op="output")
    assert output.args[0].meta["val"].shape == (8, 16)
