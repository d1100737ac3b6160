"""HARD_CASES.md, Values: zeros, NaN, Inf, outliers, subnormals; and the arithmetic of single operators, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from models import RECIPES, Run, assert_close, check, compile_fp8, mlp, normal, run, run_module, sqnr
from torch import nn

import fp8compile
from fp8compile.ops import COMPUTE_SCALE, QUANTIZE, SCALED_MM

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (E4M3, E5M2)
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ORACLE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
NAN_BYTE = 0x7F


class Lora(nn.Module):
    """A Linear with a low-rank update whose second factor starts at zero."""

    def __init__(self, width: int = 64, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.a = nn.Linear(width, rank, bias=False)
        self.b = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def zero_rows(x: torch.Tensor, *rows: int) -> torch.Tensor:
    with torch.no_grad():
        x[list(rows)] = 0
    return x


def linear(*, zero: bool = False, zero_row: bool = False) -> nn.Linear:
    model = nn.Linear(64, 48, bias=False)
    with torch.no_grad():
        if zero:
            model.weight.zero_()
        if zero_row:
            model.weight[5] = 0
    return model


# V1


ZEROS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "zero input": lambda: (linear(), zero_rows(normal(48, 64), *range(48))),
    "zero weight": lambda: (linear(zero=True), normal(48, 64)),
    "one zero row": lambda: (linear(), zero_rows(normal(48, 64), 7)),
    "one zero weight row": lambda: (linear(zero_row=True), normal(48, 64)),
    "all zero": lambda: (linear(zero=True), zero_rows(normal(48, 64), *range(48))),
    "zero-initialised LoRA": lambda: (Lora(), normal(48, 64)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", ZEROS)
def test_zeros_stay_zeros(case: str, recipe: str, dtype: torch.dtype) -> None:
    """Where eager is exactly zero so are we, everything is finite, and the rest keeps its bounds."""
    model, x = ZEROS[case]()
    model, x = model.to(dtype), x.detach().to(dtype).requires_grad_()
    check(model, x, recipe=recipe)
    expected = run_module(model, model, x).tensors()
    got = run_module(compile_fp8(model, recipe=recipe), model, x).tensors()
    zeros = 0
    for name, value in expected.items():
        exact = value == 0
        zeros += int(exact.sum())
        assert not got[name][exact].any(), name
    assert zeros >= 48, "the case has zeros to keep"


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-42, 1.1754942e-38, 2.0**-126])
def test_scales_of_nothing_are_finite_and_not_zero(value: float, dtype: torch.dtype, power_of_two: bool) -> None:
    """Zeros and subnormals get the smallest normal float32 as scale: its reciprocal is finite, and so are the data."""
    x = torch.full((4, 16), value)
    scale = COMPUTE_SCALE(x, [1], dtype, power_of_two)
    assert (scale == 2.0**-126).all()
    data = QUANTIZE(x, scale, dtype, False, [1, 1]).float()
    expected = np.float32(value) / np.float32(2.0**-126)
    assert (data == torch.tensor(float(np.float32(expected).astype(ORACLE[dtype])))).all()


# V2


def poisoned(x: torch.Tensor, value: float, row: int = 3, column: int = 5) -> torch.Tensor:
    with torch.no_grad():
        x[row, column] = value
    return x


POISONS = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", POISONS)
@pytest.mark.parametrize("where", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_nonfinite_values_reach_what_depends_on_them(recipe: str, where: str, value: float) -> None:
    """Every element that is not finite in eager is not finite in FP8; with rowwise scales no other element is lost, and
    those that share no scale with the poison are, bit for bit, what they are without it. ``rowwise_once`` has one scale
    for what it transposes, in the backward; ``block`` has one for 128×128 of a weight, which is all of this one."""
    model = nn.Linear(64, 48, bias=False)
    compiled = compile_fp8(model, recipe=recipe)
    cotangent = normal(32, 48, seed=3)

    def results(call: Any, poison: float) -> dict[str, torch.Tensor]:
        x, g = normal(32, 64), cotangent.detach().clone()
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        if not math.isclose(poison, 0.0):
            poisoned({"input": x, "weight": model.weight, "grad_output": g}[where], poison)
        return run_module(call, model, x, loss=lambda y: (y * g).sum()).tensors()

    eager, clean, got = results(model, value), results(compiled, 0.0), results(compiled, value)
    reached = 0
    for name, expected in eager.items():
        lost = ~expected.isfinite()
        reached += int(lost.sum())
        assert not got[name][lost].isfinite().any(), f"{name}: {value} was swallowed"
        one_scale = recipe == "tensorwise" or (recipe == "rowwise_once" and name != "output 0")
        one_scale = one_scale or (recipe == "block" and where == "weight")
        if not (one_scale and lost.any()) and recipe != "tensorwise":
            assert got[name][~lost].isfinite().all(), f"{name}: {value} spread further than its group"
            if name == "output 0" or not lost.any():
                assert torch.equal(got[name][~lost], clean[name][~lost]), name
    assert reached >= 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", POISONS)
def test_nonfinite_groups_have_nonfinite_scales(dtype: torch.dtype, value: float) -> None:
    """A NaN or Inf makes its own group's scale not finite and touches no other scale."""
    x = normal(8, 16, requires_grad=False)
    clean = COMPUTE_SCALE(x, [1], dtype, False)
    x[2, 3] = value
    for power_of_two in (False, True):
        scale = COMPUTE_SCALE(x, [1], dtype, power_of_two)
        assert not scale[2].isfinite()
        others = [0, 1, *range(3, 8)]
        if not power_of_two:
            assert torch.equal(scale[others], clean[others])
        assert scale[others].isfinite().all()


# V3


def test_an_outlier_costs_only_its_own_row() -> None:
    """1e5 in one row: with rowwise scales every other row keeps 25 dB (bf16 in float32's place would give 55). With one
    scale for all, 1e5 / 448 = 223 is 26 times E4M3's last bit in units of the other rows: they cannot keep 25 dB, which
    shows that the bound separates the two."""
    model = nn.Linear(64, 48, bias=False)
    x = poisoned(normal(32, 64), 1e5)
    expected = run_module(model, model, x).outputs[0]
    worst = {}
    for recipe in RECIPES:
        torch._dynamo.reset()
        got = run_module(compile_fp8(model, recipe=recipe), model, x).outputs[0]
        assert sqnr(expected[3], got[3]) >= 25
        worst[recipe] = min(sqnr(expected[row], got[row]) for row in range(32) if row != 3)
    assert worst["rowwise"] >= 25
    assert worst["rowwise_hp_wgrad"] >= 25
    assert worst["tensorwise"] < 25


# V4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_subnormal_weights(recipe: str, dtype: torch.dtype) -> None:
    """Weights of 1e-42 are below what FP8 with a normal scale can show: nothing becomes NaN or Inf, no sign of life is
    larger than eager's, and the weight gradient, which does not depend on them, keeps its bound."""
    model = nn.Linear(64, 48, bias=False).to(dtype)
    nn.init.constant_(model.weight, 1e-42)
    x = normal(32, 64, dtype=dtype)
    expected = run_module(model, model, x)
    got = run_module(compile_fp8(model, recipe=recipe), model, x)
    for name, value in got.tensors().items():
        assert value.isfinite().all(), name
        assert value.abs().max() <= 2 * expected.tensors()[name].abs().max(), name
    assert sqnr(expected.grads["weight"], got.grads["weight"]) >= 24  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_tiny_gradients(recipe: str, dtype: torch.dtype) -> None:
    """Output gradients around 1e-30 are scaled like any others: both gradients keep their bounds."""
    check(
        nn.Linear(64, 48, bias=False).to(dtype),
        normal(32, 64, dtype=dtype),
        loss=lambda y: (y * y.detach().sin() * 1e-30).sum(),
        recipe=recipe,
    )


@pytest.mark.parametrize("magnitude", [1e-20, 1e-10, 1e10, 1e18])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_range_does_not_matter(recipe: str, magnitude: float) -> None:
    """Scaling follows the data: inputs of any magnitude keep what inputs of one keep."""
    x = (normal(32, 64, requires_grad=False) * magnitude).requires_grad_()
    check(nn.Linear(64, 48, bias=False), x, recipe=recipe, out_db=28, grad_db=24)


# V5


def every_value(of: torch.dtype) -> torch.Tensor:
    """All 65536 bit patterns of a 16-bit dtype, as float32."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(of).float()


def around_every_rounding_decision(dtype: torch.dtype) -> torch.Tensor:
    """Every finite FP8 number, every midpoint between two neighbours, and the float32 numbers next to both."""
    finite = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = finite[finite.isfinite()].unique().double()
    points = torch.cat([finite, (finite[1:] + finite[:-1]) / 2]).float()
    infinity = torch.tensor(math.inf)
    return torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])


HAND_PICKED = torch.tensor(
    [
        448.0,
        449.0,
        464.0,
        465.0,
        1e4,
        57344.0,
        61439.0,
        61440.0,
        1e5,
        3.4e38,
        math.inf,
        0.0,
        1e-45,
        2.0**-9,
        2.0**-10,
        2.0**-17,
    ]
)


def oracle_bytes(x: torch.Tensor, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """``ml_dtypes`` after clamping; its own casts overflow to NaN or Inf."""
    clipped = np.clip(x.numpy(), -LARGEST[dtype], LARGEST[dtype])
    return clipped.astype(ORACLE[dtype]).view(np.uint8)


def assert_bytes_equal(x: torch.Tensor, got: torch.Tensor, dtype: torch.dtype) -> None:
    expected, actual = oracle_bytes(x, dtype), got.view(torch.uint8).numpy()
    nan = x.isnan().numpy()
    assert got.float().isnan().numpy()[nan].all(), "a NaN was lost"
    wrong = np.flatnonzero((expected != actual) & ~nan)
    assert not wrong.size, f"{x.numpy()[wrong[:5]]} became {actual[wrong[:5]]}, expected {expected[wrong[:5]]}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(lambda dtype: every_value(torch.bfloat16), id="every bfloat16"),
        pytest.param(lambda dtype: every_value(torch.float16), id="every float16"),
        pytest.param(around_every_rounding_decision, id="ties and their neighbours"),
        pytest.param(lambda dtype: torch.cat([HAND_PICKED, -HAND_PICKED]), id="by hand"),
    ],
)
def test_casts_equal_ml_dtypes(values: Callable[[torch.dtype], torch.Tensor], dtype: torch.dtype) -> None:
    """With a scale of one, quantizing is rounding to nearest even with saturation: byte for byte what ``ml_dtypes``
    gives, the sign of zero included; NaN stays NaN."""
    x = values(dtype)
    got = QUANTIZE(x.reshape(1, -1), torch.ones(1, 1), dtype, False, [1, 1])
    assert_bytes_equal(x, got.flatten(), dtype)


def test_saturation_and_signed_zero_by_hand() -> None:
    """The bytes, written out: 464 would round to 480, which E4M3 does not have; -0 keeps its sign."""
    x = torch.tensor([[448.0, 449.0, 464.0, 1e4, math.inf, -math.inf, -0.0, 0.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9]])
    data = QUANTIZE(x, torch.ones(1, 1), E4M3, False, [1, 1])
    assert data.view(torch.uint8).tolist() == [[0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x80, 0x00, 0x01, 0x00, 0x02]]


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantizing_divides_in_float32(dtype: torch.dtype, source: torch.dtype) -> None:
    """``x / scale`` is one correctly rounded float32 division, not a product with a reciprocal; then the cast."""
    x = (normal(64, 64, requires_grad=False) * 10).to(source)
    for dims in ([1], [0], [0, 1]):
        for power_of_two in (False, True):
            scale = COMPUTE_SCALE(x, dims, dtype, power_of_two)
            quotient = torch.from_numpy(x.float().numpy() / scale.numpy())
            got = QUANTIZE(x, scale, dtype, False, [1, 1])
            assert_bytes_equal(quotient.flatten(), got.flatten(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_amax_over_largest(dtype: torch.dtype) -> None:
    """Rounded once from the exact quotient; with ``power_of_two`` the smallest power of two that is not below."""
    exponents = torch.linspace(-120, 120, 97).unsqueeze(1)
    x = normal(97, 40, requires_grad=False) * 2.0**exponents
    amax = x.abs().amax(1, keepdim=True).numpy()
    plain = COMPUTE_SCALE(x, [1], dtype, False).numpy()
    expected = np.maximum(amax / np.float32(LARGEST[dtype]), np.float32(2.0**-126))
    assert (plain == expected).all()
    rounded = COMPUTE_SCALE(x, [1], dtype, True).numpy().astype(np.float64)
    assert (rounded == 2.0 ** np.ceil(np.log2(expected.astype(np.float64)))).all()


# V6


ACCUMULATED = 16384


def test_long_sums_of_equal_signs_stay_accurate() -> None:
    """The reference sums in float32: K products of equal sign are off by at most K·2⁻²⁴ of their sum, in any order. An
    accumulator of 14 bits that rounds every partial sum toward zero, as a tensor core does, is far outside that
    bound."""
    generator = torch.Generator().manual_seed(0)
    a = (1 + 0.9 * torch.rand(16, ACCUMULATED, generator=generator)).to(E4M3)
    b = (1 + 0.9 * torch.rand(16, ACCUMULATED, generator=generator)).to(E4M3)
    exact = a.double() @ b.double().T
    one = torch.ones(1, 1)
    bound = ACCUMULATED * 2.0**-24
    for fast in (False, True):
        out = SCALED_MM(a, b, one, one, None, torch.float32, fast)
        assert ((out.double() - exact).abs() / exact).max() <= bound
    truncated = 0.0
    for product in (a[0].double() * b[0].double()).tolist():
        truncated += product
        last = 2.0 ** (math.floor(math.log2(truncated)) - 13)
        truncated = math.floor(truncated / last) * last
    assert abs(truncated - exact[0, 0].item()) / exact[0, 0].item() > bound


@pytest.mark.parametrize("recipe", RECIPES)
def test_long_contractions_of_equal_signs_through_the_backend(recipe: str) -> None:
    """Rounding errors of the operands average out over a long sum of equal signs; only the accumulator's would not."""
    model = nn.Linear(ACCUMULATED, 16, bias=False)
    nn.init.uniform_(model.weight, 0.5, 1.0)
    x = (0.5 + normal(16, ACCUMULATED, requires_grad=False).abs()).requires_grad_()
    check(model, x, recipe=recipe, out_db=40)


# V7


def test_every_row_and_column_has_its_own_scale() -> None:
    """Ones times distinct scales: out[i, j] is K · a[i] · b[j] exactly, so a scale read for another would show."""
    a, b = torch.ones(16, 32).to(E4M3), torch.ones(16, 32).to(E4M3)
    scale_a = torch.arange(3, 35, 2, dtype=torch.float32).unsqueeze(1)
    scale_b = torch.arange(101, 117, dtype=torch.float32).unsqueeze(1)
    expected = 32 * scale_a @ scale_b.T
    assert expected.unique().numel() > 200
    assert torch.equal(SCALED_MM(a, b, scale_a, scale_b, None, torch.float32, True), expected)
    one = torch.ones(1, 1)
    assert torch.equal(SCALED_MM(a, b, scale_a, one, None, torch.float32, True), (32 * scale_a).expand(16, 16))
    assert torch.equal(SCALED_MM(a, b, one, scale_b, None, torch.float32, True), (32 * scale_b.T).expand(16, 16))
    bias = torch.arange(16.0)
    assert torch.equal(SCALED_MM(a, b, scale_a, scale_b, bias, torch.float32, True), expected + bias)


def test_every_matrix_of_a_batch_has_its_own_scales() -> None:
    """The same with a batch in front."""
    a, b = torch.ones(3, 16, 32).to(E4M3), torch.ones(3, 16, 32).to(E4M3)
    scale_a = torch.arange(1, 49, dtype=torch.float32).view(3, 16, 1)
    scale_b = torch.arange(101, 149, dtype=torch.float32).view(3, 16, 1)
    assert torch.equal(SCALED_MM(a, b, scale_a, scale_b, None, torch.float32, True), 32 * scale_a @ scale_b.mT)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_hp_wgrad"])
def test_rows_of_very_different_size_keep_their_numbers(recipe: str) -> None:
    """Row i of the input is 2^i, row j of the weight 3^j large. With that divided out again every row and column of the
    output keeps 20 dB; a scale that is read one row off is wrong by a factor of two or three, which leaves at most
    6."""
    model = nn.Linear(32, 16, bias=False)
    rows, columns = 2.0 ** torch.arange(16).unsqueeze(1), 3.0 ** torch.arange(16)
    with torch.no_grad():
        model.weight.mul_(columns.unsqueeze(1))
    x = (normal(16, 32, requires_grad=False) * rows).requires_grad_()
    expected = run_module(model, model, x).outputs[0] / rows / columns
    got = run_module(compile_fp8(model, recipe=recipe), model, x).outputs[0] / rows / columns
    for index in range(16):
        assert sqnr(expected[index], got[index]) >= 20
        assert sqnr(expected[:, index], got[:, index]) >= 20


# V8


def surrounded(x: torch.Tensor, filling: float) -> torch.Tensor:
    """``x`` as a view into a larger tensor full of ``filling``."""
    *batch, rows, columns = x.shape
    buffer = torch.full((*batch, rows + 7, columns + 9), filling, dtype=torch.float32).to(x.dtype)
    view = buffer[..., 3 : 3 + rows, 4 : 4 + columns]
    view.copy_(x)
    return view


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transpose", [False, True])
def test_nan_around_an_operand_is_not_read(dtype: torch.dtype, transpose: bool) -> None:
    """An operand that lies among NaN gives the scales and bytes of its copy, and what quantizing pads with is zero."""
    x = normal(19, 37, requires_grad=False)
    among_nan = surrounded(x, math.nan)
    assert not among_nan.is_contiguous()
    for dims in ([0], [1], [0, 1]):
        scale = COMPUTE_SCALE(among_nan, dims, dtype, False)
        assert torch.equal(scale, COMPUTE_SCALE(x, dims, dtype, False))
        data = QUANTIZE(among_nan, scale, dtype, transpose, [16, 16])
        assert torch.equal(data.view(torch.uint8), QUANTIZE(x, scale, dtype, transpose, [16, 16]).view(torch.uint8))
        rows, columns = (37, 19) if transpose else (19, 37)
        assert data.shape == ((48, 32) if transpose else (32, 48))
        assert data.is_contiguous()
        raw = data.view(torch.uint8)
        assert not raw[rows:].any()
        assert not raw[:, columns:].any()


def test_nan_around_fp8_operands_is_not_read() -> None:
    """GEMM operands that lie among bytes of 0x7F, NaN in E4M3, and scales among NaN, give the product of their
    copies."""

    def fp8_among_nan(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((x.shape[0] + 5, x.shape[1] + 16), NAN_BYTE, dtype=torch.uint8)
        assert buffer.view(E4M3).float().isnan().all()
        view = buffer[2 : 2 + x.shape[0], : x.shape[1]]
        view.copy_(x.view(torch.uint8))
        return view.view(E4M3)

    a, b = (normal(rows, 48, seed=rows, requires_grad=False).to(E4M3) for rows in (19, 32))
    scale_a, scale_b = torch.rand(19, 1) + 0.5, torch.rand(32, 1) + 0.5
    expected = SCALED_MM(a, b, scale_a, scale_b, None, torch.float32, False)
    scales = (surrounded(scale_a, math.nan), surrounded(scale_b, math.nan))
    got = SCALED_MM(fp8_among_nan(a), fp8_among_nan(b), *scales, None, torch.float32, False)
    assert got.isfinite().all()
    assert torch.equal(got, expected)


def among_nan(x: torch.Tensor) -> torch.Tensor:
    """A leaf with the values of ``x`` whose memory lies among NaN."""
    return surrounded(x.detach(), math.nan).requires_grad_()


def run_among_nan(call: Any, model: nn.Module, x: torch.Tensor) -> Run:
    leaf = among_nan(x)
    return run(lambda: call(leaf), [], [("input 0", leaf), *model.named_parameters()])


@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_around_the_input_of_a_padded_layer_is_not_read(recipe: str) -> None:
    """Through the backend, with sizes that are padded in every GEMM: the input among NaN gives finite, right
    results."""
    model = nn.Linear(90, 58)
    x = normal(29, 90)
    with fp8compile.collect_reports() as report:
        got = run_among_nan(compile_fp8(model, recipe=recipe), model, x)
    assert sum(row.fp8 and bool(row.notes) for row in report.rows) >= 2
    expected = run_module(model, model, x)
    assert_close(expected, got, expected)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_hard_values_in_generated_code(recipe: str) -> None:
    """V1, V2, V3, V7 and V8 through Inductor: one compiled layer, padded in every GEMM, its input always among NaN."""
    model = nn.Linear(90, 58, bias=False)
    compiled = compile_fp8(model, engine="inductor", recipe=recipe)
    rowwise = recipe == "rowwise"

    x = normal(29, 90)
    clean, expected = run_among_nan(compiled, model, x), run_module(model, model, x)
    assert_close(expected, clean, expected)

    with torch._dynamo.config.patch(error_on_recompile=True):
        zeros = zero_rows(normal(29, 90), 4, 28)
        got, expected = run_among_nan(compiled, model, zeros), run_module(model, model, zeros)
        assert_close(expected, got, expected)
        assert not got.outputs[0][[4, 28]].any()
        got = run_among_nan(compiled, model, zero_rows(normal(29, 90), *range(29)))
        assert not got.outputs[0].any()
        assert not got.grads["weight"].any()  # type: ignore[union-attr]

        poison = poisoned(poisoned(normal(29, 90), math.nan, 3, 5), math.inf, 9, 20)
        got, expected = run_among_nan(compiled, model, poison), run_module(model, model, poison)
        for name, value in expected.tensors().items():
            assert not got.tensors()[name][~value.isfinite()].isfinite().any(), name
            if rowwise:
                assert got.tensors()[name][value.isfinite()].isfinite().all(), name
        others = [row for row in range(29) if row not in (3, 9)]
        if rowwise:
            assert torch.equal(got.outputs[0][others], clean.outputs[0][others])

        outlier = poisoned(normal(29, 90), 1e5)
        got, expected = run_among_nan(compiled, model, outlier), run_module(model, model, outlier)
        levels = [sqnr(expected.outputs[0][row], got.outputs[0][row]) for row in others if row != 3]
        assert (min(levels) >= 24) is rowwise

        sizes = (normal(29, 90, requires_grad=False) * 2.0 ** torch.arange(29).unsqueeze(1)).requires_grad_()
        got, expected = run_among_nan(compiled, model, sizes), run_module(model, model, sizes)
        levels = [sqnr(a, b) for a, b in zip(expected.outputs[0], got.outputs[0], strict=True)]
        assert (min(levels) >= 24) is rowwise


def test_the_mlp_bounds_of_the_issue() -> None:
    """Two Linears with a smooth activation: at least 25 dB out and 21 dB for every gradient."""
    for recipe in RECIPES:
        torch._dynamo.reset()
        check(mlp(128, 256), normal(128, 128), recipe=recipe, out_db=25, grad_db=21)
