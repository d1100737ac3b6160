"""The scaled GEMM under Triton's interpreter: against the reference and float64, exact where sums are exact; what it
refuses; and how a launch looks in a graph. Its machine code is tested in test_machine_code.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8compile.kernels import scaled_mm as kernels
from fp8compile.kernels.configs import SQUARE, TOKENS_16, TOKENS_64, WIDE, choose_config, choose_split
from fp8compile.ops import COMPUTE_SCALE, QUANTIZE, SCALED_MM
from fp8compile.preview.interpreter import InterpreterFailure, InterpreterProcess
from fp8compile.recipe import E4M3, E5M2

LAUNCH = "fp8compile.kernels.scaled_mm:launch_scaled_mm"
CONFIGURED = __name__ + ":launch_configured"
NAN_BYTE = 0x7F
"""NaN in both FP8 dtypes."""


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterProcess]:
    with InterpreterProcess() as process:
        yield process


def launch_configured(*arguments: Any) -> Any:
    """In the interpreter: keyword arguments come last, as a dictionary."""
    *positional, keywords = arguments
    return kernels.launch_scaled_mm(*positional, **keywords)


def integers(*shape: int, dtype: torch.dtype = E4M3, largest: int = 3) -> torch.Tensor:
    """Small integers: their products and sums are exact in float32, in any order."""
    return torch.randint(-largest, largest + 1, shape).to(dtype)


def normals(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def scales(*shape: int) -> torch.Tensor:
    """Powers of two, all distinct in value and place: products with them are exact."""
    count = torch.Size(shape).numel()
    return torch.ldexp(torch.ones(count), torch.arange(count, dtype=torch.int32) % 64 - 32).reshape(shape)


def within_framed_nans(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a view into memory that is NaN all around it."""
    rows, columns = x.shape
    frame = torch.full((rows + 130, columns + 160 - columns % 16), NAN_BYTE, dtype=torch.uint8).view(x.dtype)
    frame[1 : 1 + rows, 16 : 16 + columns] = x
    return frame[1 : 1 + rows, 16 : 16 + columns]


def assert_close(out: torch.Tensor, expected: torch.Tensor, bound: float = 1e-3) -> None:
    """Relative to the largest element."""
    assert out.shape == expected.shape
    error = (out.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= bound


# --- Shapes -----------------------------------------------------------------------------------------------------------

SHAPES = [
    (1, 16, 16), (5, 48, 320), (16, 16, 32), (17, 3, 64), (64, 13, 512), (65, 272, 192), (130, 144, 400), (300, 16, 96),
]  # fmt: skip


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_any_shape_is_exact_on_integers(interpreter: InterpreterProcess, m: int, n: int, k: int, fast: bool) -> None:
    """K a multiple of 16, N anything: equal to the reference bit for bit."""
    arguments = integers(m, k), integers(n, k), scales(m, 1), scales(n, 1), torch.randn(n), torch.float32, fast
    out, amax = interpreter.call(LAUNCH, *arguments)
    assert torch.equal(out, SCALED_MM(*arguments))
    assert amax is None


@pytest.mark.parametrize("k", [10944, 500, 100])
def test_row_strides_of_16_bytes_are_enough(interpreter: InterpreterProcess, k: int) -> None:
    """K = 500 lies in rows of 512: TMA ends each row at K, whatever is behind it."""
    a, b = within_framed_nans(normals(3, k)), within_framed_nans(normals(16, k))
    arguments = a, b, scales(1, 1), scales(1, 1), None, torch.float32, True
    assert_close(interpreter.call(LAUNCH, *arguments)[0], SCALED_MM(*arguments))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 32), (5, 0, 32), (5, 16, 0), (0, 0, 0)])
def test_nothing_makes_nothing_or_the_bias(interpreter: InterpreterProcess, m: int, n: int, k: int) -> None:
    bias = torch.randn(n, dtype=torch.bfloat16)
    arguments = integers(m, k), integers(n, k), scales(m, 1), scales(1, 1), bias, torch.bfloat16, True
    assert torch.equal(interpreter.call(LAUNCH, *arguments)[0], bias.expand(m, n))


@pytest.mark.parametrize(("m", "n", "k", "batch"), [(5, 48, 160, 3), (130, 16, 64, 2)])
def test_batches_keep_to_themselves(interpreter: InterpreterProcess, m: int, n: int, k: int, batch: int) -> None:
    """A batch of NaN beside another: tiles reach over the end of a matrix, results do not."""
    a, b = integers(batch, m, k), integers(batch, n, k)
    a[-1], b[-1] = float("nan"), float("nan")
    for scale_a, scale_b in itertools.product(
        (scales(batch, m, 1), scales(1, 1)), (scales(1, n, 1), scales(batch, 1, 1))
    ):
        arguments = a, b, scale_a, scale_b, None, torch.float32, True
        out, _ = interpreter.call(LAUNCH, *arguments)
        assert torch.equal(out[:-1], SCALED_MM(*arguments)[:-1])
        assert out[-1].isnan().all()


# --- Operands and scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("m", [16, 80])
def test_dtypes_in_either_order(
    interpreter: InterpreterProcess, m: int, first: torch.dtype, second: torch.dtype
) -> None:
    arguments = normals(m, 96, dtype=first), normals(48, 96, dtype=second), scales(1, 1), scales(1, 1), None
    out, _ = interpreter.call(LAUNCH, *arguments, torch.float32, True)
    assert_close(out, SCALED_MM(*arguments, torch.float32, True), 1e-6)


@pytest.mark.parametrize("by_row_a", [True, False])
@pytest.mark.parametrize("by_row_b", [True, False])
def test_each_row_and_column_gets_its_own_scale(
    interpreter: InterpreterProcess, by_row_a: bool, by_row_b: bool
) -> None:
    """All scales distinct, M = N = 16, K = 32."""
    scale_a, scale_b = scales(16 if by_row_a else 1, 1), 3 * scales(16 if by_row_b else 1, 1)
    a, b = integers(16, 32), integers(16, 32)
    out, _ = interpreter.call(LAUNCH, a, b, scale_a, scale_b, None, torch.float32, True)
    assert torch.equal(out, (a.double() @ b.double().T * scale_a.double() * scale_b.double().T).float())


@pytest.mark.parametrize("m", [7, 70])
def test_nan_around_operands_never_reaches_the_output(interpreter: InterpreterProcess, m: int) -> None:
    a, b = integers(m, 144), integers(40, 144)
    rest = scales(m, 1), scales(40, 1), None, torch.float32, True
    out, _ = interpreter.call(LAUNCH, within_framed_nans(a), within_framed_nans(b), *rest)
    assert torch.equal(out, SCALED_MM(a, b, *rest))


def test_non_finite_value_spreads_along_its_row_only(interpreter: InterpreterProcess) -> None:
    a, scale = integers(20, 64), scales(20, 1)
    a[3, 5], scale[4] = float("nan"), float("inf")
    out, _ = interpreter.call(LAUNCH, a, integers(16, 64), scale, scales(1, 1), None, torch.float32, True)
    assert torch.isfinite(out).all(dim=1).tolist() == [row not in (3, 4) for row in range(20)]
    assert not torch.isfinite(out[3:5]).any()


# --- Sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 4])
def test_long_sum_of_equal_signs_stays_within_the_bound_of_float32(interpreter: InterpreterProcess, split: int) -> None:
    """K = 16384: a sum in blocks of 128 rounds at most 128 + K / 128 times."""
    k = 16384
    a, b = normals(4, k).float().abs().to(E4M3), normals(16, k).float().abs().to(E4M3)
    out = _configured(interpreter, a, b, TOKENS_16, split=split, fast=False)
    exact = a.double() @ b.double().T
    assert ((out.double() - exact).abs() <= (128 + k / 128) * 2.0**-24 * exact).all()


@pytest.mark.parametrize("split", [2, 3, 7])
@pytest.mark.parametrize("k", [128, 160, 1040])
def test_split_sums_each_element_once(interpreter: InterpreterProcess, k: int, split: int) -> None:
    """Slices of whole blocks, the last shorter or empty; the epilogue runs once, behind the sum of all."""
    a, b, bias, residual = integers(2, 9, k), integers(2, 32, k), torch.randn(32), torch.randn(2, 9, 32)
    arguments = a, b, scales(1, 9, 1), scales(2, 32, 1), bias, torch.float32, True, "relu", None, residual
    keywords = {"with_amax": True, "config": TOKENS_16, "split": split}
    out, amax = interpreter.call(CONFIGURED, *arguments, keywords)
    expected = SCALED_MM(*arguments[:7]).relu() + residual
    assert torch.equal(out, expected)
    assert amax.item() == expected.abs().max()


@pytest.mark.parametrize("config", [TOKENS_16, TOKENS_64, SQUARE, WIDE], ids=["16", "64", "square", "wide"])
def test_tiles_do_not_change_the_result(interpreter: InterpreterProcess, config: Any) -> None:
    """More rows and columns of tiles than a band holds, and not in whole tiles."""
    m, n = 9 * config.block_m - 3 if config is TOKENS_16 else config.block_m + 5, config.block_n + 16
    a, b = integers(m, 144), integers(n, 144)
    assert torch.equal(_configured(interpreter, a, b, config), a.float() @ b.float().T)


@pytest.mark.parametrize("stages", [1, 4])
def test_stages_do_not_change_a_byte(interpreter: InterpreterProcess, stages: int) -> None:
    a, b = normals(70, 272), normals(144, 272)
    staged = dataclasses.replace(TOKENS_64, num_stages=stages)
    assert torch.equal(
        _configured(interpreter, a, b, staged).view(torch.int32),
        _configured(interpreter, a, b, TOKENS_64).view(torch.int32),
    )


def _configured(
    interpreter: InterpreterProcess, a: torch.Tensor, b: torch.Tensor, config: Any, split: int = 1, fast: bool = True
) -> torch.Tensor:
    arguments = a, b, scales(1, 1) * 2.0**32, scales(1, 1) * 2.0**32, None, torch.float32, fast
    out, _ = interpreter.call(CONFIGURED, *arguments, {"config": config, "split": split})
    return out


@pytest.mark.parametrize("tiles", [1, 2, 7, 32, 131, 132, 1000])
@pytest.mark.parametrize("k_blocks", [1, 3, 4, 8, 9, 31, 86, 128])
def test_chosen_split_has_no_empty_slice(tiles: int, k_blocks: int) -> None:
    split = choose_split(tiles, k_blocks)
    assert split == 1 or tiles * split <= 132
    assert (split - 1) * -(-k_blocks // split) < k_blocks
    assert k_blocks // split >= min(k_blocks, 4) - 1


def test_chosen_tiles() -> None:
    """Few tokens: the transpose. Enough work: wide tiles, but for accurate sums. Else the square."""
    assert choose_config(1, 1, 4096, False) is TOKENS_16
    assert choose_config(1, 33, 4096, True) is TOKENS_64
    assert choose_config(1, 8192, 4096, True) is WIDE
    assert choose_config(1, 8192, 4096, False) is SQUARE
    assert choose_config(1, 512, 1024, True) is SQUARE


# --- Epilogue ---------------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def epilogue_inputs(m: int) -> tuple[torch.Tensor, ...]:
    """Sums of the order of 1."""
    return normals(m, 64), normals(40, 64), torch.full((m, 1), 0.125), torch.rand(40, 1) + 0.5, torch.randn(40)


def test_activations_are_all_tested() -> None:
    assert tuple(ACTIVATIONS) == kernels.ACTIVATIONS


@pytest.mark.parametrize("m", [9, 70])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_and_residual(interpreter: InterpreterProcess, name: str, m: int) -> None:
    inputs, residual = epilogue_inputs(m), torch.randn(m, 40, dtype=torch.bfloat16)
    out, _ = interpreter.call(LAUNCH, *inputs, torch.float32, True, name, None, residual)
    sums = SCALED_MM(*inputs, torch.float32, True).double()
    assert_close(out, ACTIVATIONS[name](sums) + residual.double(), 1e-5)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "none"])
def test_backward_of_an_activation(interpreter: InterpreterProcess, name: str) -> None:
    """The product is the gradient of the activation's result; autograd in float64 is the oracle."""
    inputs, saved = epilogue_inputs(20), 3 * torch.randn(20, 40, dtype=torch.float32)
    out, _ = interpreter.call(LAUNCH, *inputs, torch.float32, True, name, saved)
    x = saved.double().requires_grad_()
    (expected,) = torch.autograd.grad(ACTIVATIONS[name](x), x, SCALED_MM(*inputs, torch.float32, True).double())
    assert_close(out, expected, 1e-5)


def test_activations_keep_nan(interpreter: InterpreterProcess) -> None:
    for name in ACTIVATIONS:
        inputs = list(epilogue_inputs(4))
        inputs[2][1] = float("nan")
        out, _ = interpreter.call(LAUNCH, *inputs, torch.float32, True, name)
        assert out.isnan().all(dim=1).tolist() == [False, True, False, False]
        assert torch.isfinite(out[[0, 2, 3]]).all()


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bias_and_result_of_any_float(
    interpreter: InterpreterProcess, bias_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    a, b = integers(18, 32), integers(24, 32)
    arguments = a, b, torch.ones(1, 1), torch.full((24, 1), 0.1), torch.randn(24).to(bias_dtype), out_dtype, True
    out, amax = interpreter.call(CONFIGURED, *arguments, {"with_amax": True})
    assert torch.equal(out, SCALED_MM(*arguments))
    assert amax.item() == out.float().abs().max()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_result_in_fp8_uses_the_given_scale(interpreter: InterpreterProcess, dtype: torch.dtype) -> None:
    """Byte for byte what quantizing the float32 result gives, saturated values included; amax is of what was there
    before."""
    a, b, bias = integers(18, 64), integers(24, 64), torch.randn(24)
    common = a, b, torch.full((18, 1), 0.3), torch.rand(24, 1), bias
    expected = SCALED_MM(*common, torch.float32, True)
    for out_scale in (COMPUTE_SCALE(expected, [0, 1], dtype, False)[0], torch.tensor([2.0**-13])):
        out, amax = interpreter.call(
            CONFIGURED, *common, dtype, True, "none", None, None, out_scale, {"with_amax": True}
        )
        assert out.dtype == dtype
        assert torch.equal(out.view(torch.uint8), QUANTIZE(expected, out_scale, dtype, False, [1, 1]).view(torch.uint8))
        assert amax.item() == expected.abs().max()


def test_amax_of_nan_is_nan(interpreter: InterpreterProcess) -> None:
    a = integers(70, 32)
    a[66, 3] = float("nan")
    arguments = a, integers(16, 32), scales(1, 1), scales(1, 1), None, torch.bfloat16, True
    _, amax = interpreter.call(CONFIGURED, *arguments, {"with_amax": True})
    assert amax.isnan()


def test_amax_is_of_what_is_stored_only(interpreter: InterpreterProcess) -> None:
    """A tile computes rows of the next matrix with its own columns: large with large, as in no result."""
    a, b = torch.ones(2, 5, 32).to(E4M3), torch.ones(2, 16, 32).to(E4M3)
    a[1], b[0] = 96.0, 96.0
    arguments = a, b, scales(1, 1), scales(1, 1), None, torch.float32, True
    out, amax = interpreter.call(CONFIGURED, *arguments, {"with_amax": True})
    assert amax.item() == out.max() == 32 * 96 * 2.0**-64


# --- What is refused --------------------------------------------------------------------------------------------------

A, B, ONE = integers(16, 32), integers(16, 32), torch.ones(1, 1)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "E5M2 twice": ((A.to(E5M2), B.to(E5M2), ONE, ONE, None, torch.float32, True), "does not multiply E5M2 by E5M2"),
    "not FP8": ((A.float(), B, ONE, ONE, None, torch.float32, True), "not an FP8 GEMM"),
    "K of 100": (
        (integers(4, 100), integers(4, 100), ONE, ONE, None, torch.float32, True), "row stride 100; TMA reads rows"
    ),
    "K first": ((integers(32, 16).T, B, ONE, ONE, None, torch.float32, True), r"contraction \(K\) last"),
    "different K": ((A, integers(16, 48), ONE, ONE, None, torch.float32, True), r"\(16, 32\) times .* \(16, 48\)"),
    "different batch": ((A[None], B, ONE, ONE, None, torch.float32, True), r"\(1, 16, 32\) times"),
    "scale of 7 rows": ((A, B, torch.ones(7, 1), ONE, None, torch.float32, True), r"scale_a: shape \(7, 1\)"),
    "scale per column of K": ((A, B, torch.ones(16, 2), ONE, None, torch.float32, True), r"scale_a: shape \(16, 2\)"),
    "scale in bf16": ((A, B, ONE.bfloat16(), ONE, None, torch.float32, True), "scales are float32"),
    "bias of 15": ((A, B, ONE, ONE, torch.ones(15), torch.float32, True), r"bias: shape \(15,\)"),
    "FP8 without scale": ((A, B, ONE, ONE, None, E4M3, True), "out_scale: needed"),
    "scale without FP8": (
        (A, B, ONE, ONE, None, torch.float32, True, "none", None, None, ONE), "out_scale: not used"
    ),
    "unknown activation": ((A, B, ONE, ONE, None, torch.float32, True, "mish"), "'mish'; use one of none, relu"),
    "backward of nothing": ((A, B, ONE, ONE, None, torch.float32, True, "none", A.float()), "one with preactivation"),
    "residual of another shape": (
        (A, B, ONE, ONE, None, torch.float32, True, "none", None, torch.ones(16)), r"residual: shape \(16,\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_any_launch(case: str) -> None:
    """Here, where Triton compiles and has no GPU, a launch would fail differently."""
    arguments, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        kernels.launch_scaled_mm(*arguments)


def test_refusal_in_the_interpreter_is_the_same(interpreter: InterpreterProcess) -> None:
    with pytest.raises(InterpreterFailure, match="does not multiply E5M2 by E5M2"):
        interpreter.call(LAUNCH, *REFUSED["E5M2 twice"][0])


# --- In a graph -------------------------------------------------------------------------------------------------------


def launches(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.target is torch.ops.higher_order.triton_kernel_wrapper_functional]


def test_traced_launch_is_a_kernel_with_host_descriptors() -> None:
    """Inductor launches such nodes without Python."""

    def call(*arguments: torch.Tensor) -> torch.Tensor:
        return kernels.launch_scaled_mm(*arguments, None, torch.bfloat16, True, "gelu")[0]

    mode = FakeTensorMode()
    inputs = [mode.from_tensor(x) for x in (integers(16, 2048), integers(256, 2048), scales(16, 1), ONE)]
    with mode:
        graph = make_fx(call)(*inputs).graph
    product, sum_of_splits = launches(graph)
    assert dict(product.kwargs["tma_descriptor_metadata"]) == {
        "a": ("stable", ([16, 128],)),
        "b": ("stable", ([128, 128],)),
    }
    assert product.kwargs["tensors_to_clone"] == sum_of_splits.kwargs["tensors_to_clone"] == ["out"]
    assert product.kwargs["kwargs"]["SPLIT_K"] == 4
    (out,) = (node for node in graph.nodes if node.op == "output")
    assert out.args[0].meta["val"].shape == (16, 256)
    assert out.args[0].meta["val"].dtype == torch.bfloat16


def test_dynamic_rows_add_no_guard() -> None:
    """One graph for any number of tokens: the tiles are those of the size seen while tracing."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    a = mode.from_tensor(integers(300, 256), symbolic_context=dynamic)
    b = mode.from_tensor(integers(1040, 256), static_shapes=True)
    with mode:
        scale_a = torch.empty(a.shape[0], 1)
        rest = torch.empty(1, 1), None, torch.bfloat16, True
        graph = make_fx(lambda *x: kernels.launch_scaled_mm(*x, *rest)[0])(a, b, scale_a).graph
    (product,) = launches(graph)
    assert isinstance(product.kwargs["grid"][0][0], torch.fx.Node)
    assert product.kwargs["kwargs"]["BY_ROW_A"] is True
    assert product.kwargs["kwargs"]["BLOCK_M"] == 128
    assert not shapes.guards
