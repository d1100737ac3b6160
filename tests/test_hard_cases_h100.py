"""HARD_CASES.md, Shapes and Values, through the whole H100 program: a step lowered for a chip that is not here, its
generated kernels and ours executed under Triton's interpreter, forward and backward, against eager in float64.

Every buffer that a program allocates starts full of NaN, so whatever is read before it is written shows. What no
interpreter shows: how the chip's tensor cores accumulate, whether compiled code flushes subnormals, and speed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from models import (
    Experts,
    Run,
    assert_close,
    check,
    mlp,
    normal,
    reference_of,
    rows_by_role,
    run,
    run_module,
    sqnr,
)
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")

import fp8compile
from fp8compile.options import Options
from fp8compile.preview.capture import compiled
from fp8compile.preview.interpreter import InterpreterProcess
from fp8compile.preview.lowering import Lowered
from fp8compile.preview.result import Preview
from fp8compile.recipe import E4M3, E5M2, LARGEST, Recipe
from fp8compile.report import Report

RECIPES = ("rowwise_once", "rowwise", "tensorwise", "block")
NAN_BYTE = 0xFF
"""NaN in float32, in bfloat16, and in both FP8 dtypes. (0x7F is NaN in FP8 only.)"""
SAME_DB = 110.0
"""Equal but for the order of float32 sums: K terms round at 2⁻²⁵ of their sum, 150 dB less 10·log10(K). A single FP8
value of a few thousand that rounds to its neighbour, 1/16 away, leaves 60."""

RECIPES_AND_DTYPES = [*((recipe, torch.float32) for recipe in RECIPES), ("rowwise_once", torch.bfloat16)]

PreviewOf = Callable[..., Preview]


def fill_new_memory_with_nan() -> None:
    """In the interpreter's process: what a program allocates is NaN until it is written."""
    guards: Any = torch._C._dynamo.guards
    empty = guards._empty_strided_cpu

    def full_of_nan(sizes: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made: torch.Tensor = empty(sizes, strides, dtype)
        raw = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
        raw.fill_(NAN_BYTE)
        return made

    guards._empty_strided_cpu = full_of_nan


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterProcess]:
    """One for all programs of this file: starting it takes seconds."""
    with InterpreterProcess() as process:
        process.call(f"{__name__}:fill_new_memory_with_nan")
        yield process


@pytest.fixture
def h100(interpreter: InterpreterProcess) -> PreviewOf:
    """``fp8compile.preview`` for an H100: every matmul that can be in FP8, verified after each pass."""

    def preview_of(model: Any, *inputs: Any, **options: Any) -> Preview:
        chosen = {"policy": "all", "verify": True, **options}
        preview = fp8compile.preview(model, *inputs, target="h100", options=chosen)
        return dataclasses.replace(preview, _step=dataclasses.replace(preview._step, interpreter=interpreter))

    return preview_of


def fp8_gemms(preview: Preview) -> int:
    return sum(kernel.dtype.startswith("float8") for kernel in preview.fp8.of_kind("gemm"))


def check_on_h100(h100: PreviewOf, model: nn.Module, *inputs: Any, **arguments: Any) -> Report:
    """:func:`models.check` of the program for an H100. Its FP8 GEMMs are those of the report, one kernel each."""
    of_check = {name: arguments.pop(name) for name in ("loss", "out_db", "grad_db", "flops") if name in arguments}
    preview = h100(model, *inputs, **arguments)
    report = check(model, *inputs, compiled=preview.execute, **of_check)
    assert fp8_gemms(preview) == preview.report.in_fp8 == report.in_fp8
    return report


class Several(nn.Module):
    """Models side by side in one step: the i-th of them on the i-th input, or all on the only one."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = inputs if len(inputs) == len(self.models) else inputs * len(self.models)
        return tuple(model(x) for model, x in zip(self.models, given, strict=True))


def reasons(report: Report, role: str, fp8: bool) -> list[str]:
    return [row.reason for row in rows_by_role(report).get(role, []) if row.fp8 is fp8]


# --- S1, S2, S4: sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["rowwise_once", "block"])
def test_features_that_are_not_multiples_of_16_are_padded(h100: PreviewOf, recipe: str) -> None:
    """S1. 72 = 4·16 + 8: every GEMM in which it is N or K is padded to 80 and says so; as M it needs no padding."""
    report = check_on_h100(h100, nn.Linear(72, 48), normal(64, 72), recipe=recipe)
    for role, where in {"fprop": "K", "dgrad": "N", "wgrad": "N"}.items():
        (row,) = rows_by_role(report)[role]
        assert row.fp8
        assert row.notes == (f"{where} padded 72→80",)


def test_few_tokens_keep_wgrad_alone(h100: PreviewOf) -> None:
    """S2. 13 tokens in 3-D and in 4-D: wgrad, which contracts over them, is kept for that reason; nothing else is."""
    model = Several(nn.Linear(64, 48), nn.Linear(64, 32))
    report = check_on_h100(h100, model, normal(1, 13, 64), normal(13, 1, 1, 64))
    assert len(reasons(report, "fprop", True)) == len(reasons(report, "dgrad", True)) == 2
    assert len(reasons(report, "wgrad", False)) == 2
    assert all("13" in reason for reason in reasons(report, "wgrad", False))
    assert report.in_fp8 == 4


def test_narrow_heads_are_kept(h100: PreviewOf) -> None:
    """S4. 8, 15 and 2 features are below the 16 of a tensor core: kept with the size as reason, in a program without a
    single FP8 kernel, as accurate as float32."""
    model = Several(nn.Linear(32, 8), nn.Linear(32, 15), nn.Linear(768, 2))
    inputs = normal(32, 32), normal(32, 32, seed=1), normal(32, 768)
    report = check_on_h100(h100, model, *inputs, out_db=120, grad_db=120)
    assert len(report.rows) == 9
    assert report.in_fp8 == 0
    for size in (8, 15, 2):
        assert sum(f"={size} below" in row.reason for row in report.rows) == 3


# --- S3: nothing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["rowwise_once", "block"])
def test_no_tokens_at_all(h100: PreviewOf, recipe: str) -> None:
    """S3. ``x[0:0]``: an empty output, and gradients of zero with the shapes of the weights."""
    model, x = nn.Linear(64, 32), normal(8, 64)
    got = run_module(h100(model, x[0:0], recipe=recipe).execute, model, x[0:0])
    assert got.outputs[0].shape == (0, 32)
    for name, parameter in model.named_parameters():
        gradient = got.grads[name]
        assert gradient is not None
        assert gradient.shape == parameter.shape
        assert not gradient.any()


def test_experts_with_5_0_and_33_tokens(h100: PreviewOf) -> None:
    """S3. The expert without tokens has gradients of zero and is kept as empty; fprop and dgrad of the others are
    FP8, and their wgrad, over 5 and 33 tokens, is kept."""
    model = Experts(64, (5, 0, 33))
    report = check_on_h100(h100, model, normal(38, 64))
    for parameter in model.experts[1].parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    assert any(row.reason == "empty: a dimension is zero" for row in report.rows)
    assert [len(reasons(report, role, True)) for role in ("fprop", "dgrad", "wgrad")] == [2, 2, 0]


class GroupedExperts(nn.Module):
    """All experts in one grouped matmul."""

    def __init__(self, counts: tuple[int, ...], fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(len(counts), fan_in, fan_out) / fan_in**0.5)
        self.ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:  # the reference: grouped_mm has no float64
            parts = x.split(self.ends.diff(prepend=self.ends.new_zeros(1)).tolist())
            return torch.cat([part @ weight for part, weight in zip(parts, self.weight, strict=True)])
        return F.grouped_mm(x, self.weight, offs=self.ends)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
@pytest.mark.parametrize("recipe", ["rowwise_once", "rowwise", "tensorwise"])
def test_grouped_experts_with_5_0_and_33_tokens(h100: PreviewOf, recipe: str) -> None:
    """S3. The same as one grouped matmul: every one of its GEMMs FP8 or kept with a reason, and the gradient of the
    weight of the expert without tokens is zero."""
    model = GroupedExperts((5, 0, 33), 64, 32).bfloat16()
    report = check_on_h100(h100, model, normal(38, 64, dtype=torch.bfloat16), recipe=recipe, flops=False)
    assert len(report.rows) == 3
    assert [len(reasons(report, role, True)) for role in ("fprop", "dgrad")] == [1, 1]
    assert all(row.reason for row in report.rows)
    assert model.weight.grad is not None
    assert not model.weight.grad[1].any()
    assert model.weight.grad[0].any()


# --- S5: sizes that change --------------------------------------------------------------------------------------------


def test_execute_takes_other_sizes_than_the_preview(h100: PreviewOf) -> None:
    """S5. A preview of 17 tokens executes 17, 1 and 33, each lowered for itself: 33 tokens are not padded to 48 for
    wgrad, as they would be in a program for any number."""
    model = mlp(32, 64)
    preview = h100(model, normal(17, 32))
    for tokens in (17, 1, 33):
        report = check(model, normal(tokens, 32), compiled=preview.execute)
        assert reasons(report, "wgrad", True) == []


@pytest.mark.parametrize("recipe", ["rowwise_once", "block"])
def test_one_program_for_many_sizes(interpreter: InterpreterProcess, recipe: str) -> None:
    """S5. 17, 1 and 33 tokens through one compiled step: the program for 33, whose number of tokens is dynamic, also
    runs 40 and 2; and there are as many graphs as without FP8."""
    graphs = {}
    for policy in ("none", "all"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, lowered = nn.Linear(32, 48), Lowered()
        options = Options.parse({"target": "h100", "policy": policy, "recipe": recipe, "verify": True})

        def runner(graph: Any) -> Any:
            return interpreter.load(graph.source, mutated=graph.mutated, constants=graph.constants)

        step = compiled(model, options.target, options, lowered, runner)
        for tokens in (17, 1, 33):
            check(model, normal(tokens, 32), compiled=step, flops=False)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for tokens in (40, 2):
                check(model, normal(tokens, 32), compiled=step, flops=False)
        graphs[policy] = [graph.phase for graph in lowered.graphs]
        kernels = [kernel for graph in lowered.graphs for kernel in graph.kernels]
        assert any(kernel.dtype.startswith("float8") for kernel in kernels) is (policy == "all")
    assert graphs["all"] == graphs["none"]


# --- S6: ways to write a matmul ---------------------------------------------------------------------------------------


class EveryWay(nn.Module):
    """The same kind of product written in every way, each with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) / 6)

        self.linear = nn.Linear(32, 48)
        self.sequential = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.at, self.first, self.by_einsum = weight(32, 48), weight(48, 32), weight(48, 32)
        self.heads, self.batch, self.bias = weight(2, 16, 32), weight(2, 32, 48), weight(2, 1, 48)
        self.added, self.bias_of_added = weight(32, 48), weight(48)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            self.linear(x),
            self.sequential(x),
            x @ self.at,
            (self.first @ x[0].mT).mT,
            torch.einsum("bti,oi->bto", x, self.by_einsum),
            torch.einsum("bti,hdi->bhtd", x, self.heads),
            torch.baddbmm(self.bias, x, self.batch, beta=0.5, alpha=2),
            torch.addmm(self.bias_of_added, x[1], self.added),
        )


def test_every_way_to_multiply_is_found(h100: PreviewOf) -> None:
    """S6. All the FLOPs that eager does are in the report, all of them FP8; every output, and the gradient of every
    weight, is right by itself."""
    report = check_on_h100(h100, EveryWay(), normal(2, 32, 32))
    assert report.in_fp8 == len(report.rows) == 3 * 9


def test_bare_functions_are_found(h100: PreviewOf) -> None:
    """S6. A step that is no module: its plain parameter is an input."""
    weight = normal(48, 32, seed=1)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.t()

    x = normal(32, 32)
    preview = h100(step, x, nn.Parameter(weight.detach()))
    parameter = nn.Parameter(weight.detach())
    got = run(lambda x: preview.execute(x, parameter), [x], [("w", parameter)])
    expected = run(lambda x: step(x, parameter), [x], [("w", parameter)])
    assert_close(expected, got, expected)
    assert fp8_gemms(preview) == preview.report.in_fp8 == 3


# --- S7: layouts of gradients -----------------------------------------------------------------------------------------


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (lambda y: y.t(), lambda y: (y * torch.arange(y.shape[1])).square().mean()),
    "expanded": (lambda y: y, lambda y: y.sum()),
    "expanded over rows": (lambda y: y.mean(0), lambda y: y.square().sum()),
    "sliced": (lambda y: y[::2, 3:], lambda y: y.square().sum()),
    "flipped": (lambda y: y.flip(0), lambda y: (y * y.detach().roll(1)).sum()),
    "diagonal": (lambda y: y.diagonal(), lambda y: y.square().sum()),
}


class Layouts(nn.Module):
    """A Linear for each layout of its output gradient; with ``inside`` the losses are part of the step."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 48) for _ in LAYOUTS)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = zip(self.layers, LAYOUTS.values(), strict=True)
        return tuple(loss(after(layer(x))) if self.inside else after(layer(x)) for layer, (after, loss) in parts)


@pytest.mark.parametrize(
    ("recipe", "inside"), [("rowwise_once", False), ("rowwise_once", True), ("block", True), ("tensorwise", True)]
)
def test_gradients_of_any_layout(h100: PreviewOf, recipe: str, inside: bool) -> None:
    """S7. Output gradients that come expanded (stride 0), transposed or sparse, from outside or made in the program,
    give the right gradient of each layer."""

    def total(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        losses = outputs if inside else [f(y) for y, (_, f) in zip(outputs, LAYOUTS.values(), strict=True)]
        return torch.stack(list(losses)).sum()

    out_db = -math.inf if inside else 18.0  # a sum of many signs may be near zero; what makes it is held in the other
    report = check_on_h100(h100, Layouts(inside), normal(48, 32), loss=total, recipe=recipe, out_db=out_db)
    assert report.in_fp8 >= 2 * len(LAYOUTS)


# --- S8: strides and views --------------------------------------------------------------------------------------------


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a view into memory that is NaN all around it: padded rows, padded columns, an offset."""
    rows, columns = x.shape
    raw = torch.full((rows + 7, (columns + 13) * x.itemsize), NAN_BYTE, dtype=torch.uint8).view(x.dtype)
    view = raw[3 : 3 + rows, 5 : 5 + columns]
    view.copy_(x.detach())
    return view


VIEWS_BEFORE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "padded strides": surrounded,
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
}


def run_in_place(call: Any, model: nn.Module, x: torch.Tensor) -> Run:
    """Like ``run_module``, on ``x`` with its own strides."""
    leaf = x.detach().requires_grad_()
    return run(lambda: call(leaf), [], [("input 0", leaf), *model.named_parameters()])


@pytest.mark.parametrize("recipe", ["rowwise_once", "block"])
def test_strides_do_not_change_the_result(h100: PreviewOf, recipe: str) -> None:
    """S8. An operand with other strides is cast to the same bytes as its contiguous copy: the same comes out."""
    model, x = nn.Linear(64, 48), normal(48, 64)
    preview = h100(model, x, recipe=recipe)
    expected = run_in_place(preview.execute, model, x)
    for view in VIEWS_BEFORE.values():
        strided = view(x.detach())
        assert torch.equal(strided, x)
        assert not strided.is_contiguous()
        assert_close(expected, run_in_place(preview.execute, model, strided), expected, SAME_DB, SAME_DB)


VIEWS_BETWEEN: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x.reshape(2, 24, 64),
    lambda x: x.view(24, 128).view(48, 64),
    lambda x: x.t().contiguous().t(),
    lambda x: x.unsqueeze(0),
    lambda x: x.view(2, 24, 4, 16).transpose(1, 2).transpose(1, 2).reshape(2, 24, 64),
    lambda x: torch.cat([x, x * 1e3])[:48],
]


class Views(nn.Module):
    """Equal Linears, each behind another view of the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 48) for _ in VIEWS_BETWEEN)
        for layer in self.layers:
            layer.load_state_dict(self.layers[0].state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([f(view(x)).reshape(48, 48) for f, view in zip(self.layers, VIEWS_BETWEEN, strict=True)])


def test_views_between_cast_and_matmul_do_not_change_the_result(h100: PreviewOf) -> None:
    """S8. A view, reshape or slice in front of a matmul: output and weight gradient are those without it."""
    model, x, noise = Views(), normal(48, 64), normal(48, 48, seed=2, requires_grad=False)
    got = run_module(h100(model, x).execute, model, x, loss=lambda y: (y * noise).sum())
    first, *others = got.outputs[0]
    assert sqnr(nn.functional.linear(x, model.layers[0].weight, model.layers[0].bias), first) >= 18
    for number, other in enumerate(others, 1):
        assert sqnr(first, other) >= SAME_DB
        expected, gradient = (got.grads[f"layers.{i}.weight"] for i in (0, number))
        assert expected is not None
        assert gradient is not None
        assert sqnr(expected, gradient) >= SAME_DB


# --- V1: zeros --------------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A Linear with a low-rank update whose second factor starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(32, 48), nn.Linear(32, 16, bias=False), nn.Linear(16, 48, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize(("recipe", "dtype"), RECIPES_AND_DTYPES)
def test_zeros_stay_zeros(h100: PreviewOf, recipe: str, dtype: torch.dtype) -> None:
    """V1. A zero input, a zero weight, a zero row of each, both zero, and a LoRA at its start: every element of an
    output or gradient that is exactly zero in eager is exactly zero, all are finite, and the rest keeps its bounds."""
    layers = [nn.Linear(32, 48, bias=False) for _ in range(5)]
    x, zeros = normal(32, 32, seed=1), torch.zeros(32, 32, requires_grad=True)
    with torch.no_grad():
        layers[1].weight.zero_()
        layers[2].weight[5] = 0
        layers[4].weight.zero_()
        x[7] = 0
    model = Several(*layers, Lora()).to(dtype)
    x, zeros = (t.detach().to(dtype).requires_grad_() for t in (x, zeros))
    inputs = zeros, x, x, x, zeros, x
    preview = h100(model, *inputs, recipe=recipe)
    assert preview.report.in_fp8 == 3 * 8
    reference, _ = reference_of(model, *inputs)
    like, got = run_module(model, model, *inputs), run_module(preview.execute, model, *inputs)
    assert_close(reference, got, like)
    counted = 0
    for name, value in like.tensors().items():
        exact = value == 0
        counted += int(exact.sum())
        assert not got.tensors()[name][exact].any(), name
    # outputs of the first two and of the fifth, one row or column of two, the gradients of weights that saw zeros and
    # of inputs that saw zero weights, and LoRA's first factor
    assert counted >= 3 * 32 * 48 + 48 + 32 + 2 * 32 * 48 + 2 * 32 * 32 + 16 * 32


# --- V2, V3: NaN, Inf, outliers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_nonfinite_values_reach_what_depends_on_them_and_no_more(h100: PreviewOf, recipe: str) -> None:
    """V2. A NaN and an Inf in input, weight or output gradient: whatever is not finite in eager is not finite here.
    With a scale per row (in the forward of ``rowwise_once``, everywhere of ``rowwise``) all other elements are finite,
    and those of a result that shares no scale with them are, bit for bit, what they are without. With blocks of 1x128
    that holds for activations."""
    model = nn.Linear(64, 48, bias=False)
    preview = h100(model, normal(32, 64), recipe=recipe)
    weight = model.weight.detach().clone()

    def results(call: Any, where: str = "") -> dict[str, torch.Tensor]:
        x, g = normal(32, 64), normal(32, 48, seed=3, requires_grad=False)
        with torch.no_grad():
            model.weight.copy_(weight)
            if where:
                poisoned = {"input": x, "weight": model.weight, "grad_output": g}[where]
                poisoned[3, 5], poisoned[9, 20] = math.nan, math.inf
        return run_module(call, model, x, loss=lambda y: (y * g).sum()).tensors()

    clean = results(preview.execute)
    for where in ("input", "weight", "grad_output"):
        eager, got = results(model, where), results(preview.execute, where)
        reached = 0
        for name, expected in eager.items():
            lost = ~expected.isfinite()
            reached += int(lost.sum())
            assert not got[name][lost].isfinite().any(), f"{name} of poisoned {where}: a NaN or Inf was swallowed"
            in_forward = name == "output 0"
            own_scale = recipe == "rowwise" or (recipe == "rowwise_once" and in_forward)
            own_scale |= recipe == "block" and where != "weight" and in_forward
            if own_scale or not lost.any():
                assert got[name][~lost].isfinite().all(), f"{name} of poisoned {where}: spread further than its row"
                if in_forward or not lost.any():
                    assert torch.equal(got[name][~lost], clean[name][~lost]), f"{name} of poisoned {where}"
        assert reached >= 2 * 32


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_outlier_costs_only_its_own_row(h100: PreviewOf, recipe: str) -> None:
    """V3. 1e5 in one row: with a scale per row every other row keeps 25 dB. One scale for all is 1e5 / 448 = 223, the
    size of E4M3's smallest steps 223 / 512 = 0.44 in units of the other rows, which cannot keep 25 dB: the bound tells
    the two apart."""
    model, x = nn.Linear(64, 48, bias=False), normal(32, 64)
    with torch.no_grad():
        x[3, 5] = 1e5
    expected = run_module(model, model, x).outputs[0]
    got = run_module(h100(model, x, recipe=recipe).execute, model, x).outputs[0]
    assert sqnr(expected[3], got[3]) >= 25
    worst = min(sqnr(expected[row], got[row]) for row in range(32) if row != 3)
    assert (worst >= 25) is (recipe != "tensorwise"), worst


# --- V4: tiny values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "dtype"), RECIPES_AND_DTYPES)
def test_tiny_weights_and_gradients(h100: PreviewOf, recipe: str, dtype: torch.dtype) -> None:
    """V4. Weights of 1e-42, below what a normal scale shows: nothing becomes NaN or Inf, nothing is larger than twice
    what eager gives, and the weight gradient, which does not depend on them, keeps its bound. Output gradients of 1e-30
    are scaled like any others: both gradients keep their bounds."""
    model = Several(nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False)).to(dtype)
    nn.init.constant_(model.models[0].weight, 1e-42)
    inputs = normal(32, 64, dtype=dtype), normal(32, 64, seed=1, dtype=dtype)

    def loss(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        noise = normal(32, 48, seed=2, requires_grad=False).to(outputs[0])
        return (outputs[0] * noise).sum() + (outputs[1] * noise * 1e-30).sum()

    reference, _ = reference_of(model, *inputs, loss=loss)
    eager = run_module(model, model, *inputs, loss=loss)
    got = run_module(h100(model, *inputs, recipe=recipe).execute, model, *inputs, loss=loss).tensors()
    expected = reference.tensors()
    for name, value in got.items():
        assert value.dtype == dtype
        assert value.isfinite().all(), name
        assert value.abs().max() <= 2 * eager.tensors()[name].abs().max(), name
    assert sqnr(expected["output 1"], got["output 1"]) >= 18
    for name in ("models.0.weight", "models.1.weight", "input 1"):
        assert sqnr(expected[f"gradient of {name}"], got[f"gradient of {name}"]) >= 17, name


# --- V5: casts --------------------------------------------------------------------------------------------------------


def rounding_decisions(dtype: torch.dtype) -> torch.Tensor:
    """Every finite FP8 number, every midpoint between two neighbours, and the float32 numbers next to both; none
    beyond the largest, which every row contains: ``[32, 64]`` and so on, under a scale of one."""
    finite = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = finite[finite.isfinite()].unique().double()
    points = torch.cat([finite, (finite[1:] + finite[:-1]) / 2]).float()
    infinity = torch.tensor(math.inf)
    points = torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])
    points = points[points.abs() <= LARGEST[dtype]].unique()
    columns = 64
    rows = 16 * math.ceil(points.numel() / (columns - 1) / 16)
    x = torch.zeros(rows, columns)
    x[:, 0] = LARGEST[dtype]
    x[:, 1:] = torch.cat([points, torch.zeros(rows * (columns - 1) - points.numel())]).view(rows, columns - 1)
    return x


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    oracle = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}[dtype]
    return torch.from_numpy(x.numpy().astype(oracle).astype(np.float32))


@pytest.mark.parametrize("recipe", ["rowwise_once", "tensorwise", "block"])
def test_generated_casts_round_like_ml_dtypes(h100: PreviewOf, recipe: str) -> None:
    """V5. Data whose amax is the largest FP8 number has a scale of one; times 448·I, also of scale one, a product shows
    to what each value was rounded, exactly. Ties, subnormals and their neighbours: fprop shows the cast of the input,
    dgrad that of the output gradient."""
    model = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.copy_(448 * torch.eye(64))
    gradient_dtype = E5M2 if recipe == "tensorwise" else E4M3
    x, g = rounding_decisions(E4M3), rounding_decisions(gradient_dtype)
    g = torch.cat([g, g])[: len(x)] if len(g) < len(x) else g
    x = torch.cat([x, x])[: len(g)]
    assert len(x) == len(g)
    got = run_module(
        h100(model, x.requires_grad_(), recipe=recipe).execute, model, x, loss=lambda y: (y * g).sum()
    ).tensors()
    assert torch.equal(got["output 0"], 448 * rounded(x.detach(), E4M3))
    assert torch.equal(got["gradient of input 0"], 448 * rounded(g, gradient_dtype))


# --- V6: long sums ----------------------------------------------------------------------------------------------------


def in_quarters(*shape: int, seed: int) -> torch.Tensor:
    """1, 1.25, 1.5, 1.75, the last in every row and column: amax / largest is 1.75 / 448 = 2⁻⁸ in E4M3 and 2⁻¹⁵ in
    E5M2, under which both hold them exactly."""
    generator = torch.Generator().manual_seed(seed)
    x = 1 + torch.randint(0, 4, shape, generator=generator) / 4
    x[0], x[:, 0] = 1.75, 1.75
    return x


@pytest.mark.parametrize("recipe", ["rowwise_once", "tensorwise", "block"])
def test_long_sums_of_equal_signs_stay_accurate(h100: PreviewOf, recipe: str) -> None:
    """V6. K = 2048, in fprop features and in wgrad tokens, of operands that FP8 holds exactly: the only error is that
    of the sum, at most K·2⁻²⁴ of it where float32 adds K products of equal sign in any order. That an accumulator of
    14 bits would be far outside is shown in test_values.py; the chip's own is not in an interpreter."""
    k = 2048
    wide, tall = nn.Linear(k, 16, bias=False), nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        wide.weight.copy_(in_quarters(16, k, seed=1))
    model = Several(wide, tall)
    x, y, g = in_quarters(16, k, seed=2), in_quarters(k, 16, seed=3), in_quarters(k, 16, seed=4)
    inputs = x.requires_grad_(), y.requires_grad_()

    def loss(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return outputs[0].sum() + (outputs[1] * g).sum()

    preview = h100(model, *inputs, recipe=recipe)
    got = run_module(preview.execute, model, *inputs, loss=loss).tensors()
    assert preview.report.in_fp8 == 6
    for name, exact in {
        "output 0": x.detach().double() @ wide.weight.detach().double().T,
        "gradient of models.1.weight": g.double().T @ y.detach().double(),
    }.items():
        assert ((got[name].double() - exact).abs() <= k * 2.0**-24 * exact).all(), name


# --- V7: scales -------------------------------------------------------------------------------------------------------


SIXTEEN = torch.tensor([float(v) for v in (*range(8, 16), *range(16, 32, 2))])
"""Distinct, of four significant bits: E4M3 holds each exactly under any power of two as scale."""


@pytest.mark.parametrize("recipe", ["rowwise_once", "rowwise"])
def test_every_row_and_column_has_its_own_scale(h100: PreviewOf, recipe: str) -> None:
    """V7. M = N = 16, K = 32 (16 where tokens or outputs are summed). Operands that are constant along the contraction,
    with another value for each row and column: a product is K · a[i] · b[j] but for a few float32 roundings, so a scale
    that is read for another shows. In each role by its own step."""
    model = nn.Linear(32, 16, bias=False)
    inputs, outputs, tokens = torch.cat([SIXTEEN, SIXTEEN / 8]), SIXTEEN, SIXTEEN.flip(0)
    preview = h100(model, normal(16, 32), recipe=recipe)

    def step(x: torch.Tensor, weight: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            model.weight.copy_(weight)
        return run_module(
            preview.execute, model, x.contiguous().requires_grad_(), loss=lambda y: (y * g).sum()
        ).tensors()

    ones = torch.ones(16, 32), torch.ones(16, 32), torch.ones(16, 16)
    by_token, by_output, by_input = tokens[:, None], outputs[:, None], inputs[None, :]
    cases = {
        "output 0": ((ones[0] * by_token, ones[1] * by_output, ones[2]), 32 * by_token @ by_output.T),
        "gradient of input 0": ((ones[0], ones[1] * by_input, ones[2] * by_token), 16 * by_token @ by_input),
        "gradient of weight": ((ones[0] * by_input, ones[1], ones[2] * by_output.T), 16 * by_output @ by_input),
    }
    for name, (operands, expected) in cases.items():
        assert expected.unique().numel() > 50
        got = step(*operands)[name]
        assert ((got - expected).abs() <= 8 * 2.0**-24 * expected).all(), name


@pytest.mark.parametrize("recipe", ["rowwise_once", "rowwise"])
def test_rows_of_very_different_size_keep_their_numbers(h100: PreviewOf, recipe: str) -> None:
    """V7. Row i of the input is 2^i, row j of the weight 3^j large, all random. With that divided out again every row
    and column of the output keeps 20 dB; a scale read one row off is wrong by a factor of two or three, which leaves at
    most 6."""
    model = nn.Linear(32, 16, bias=False)
    rows, columns = 2.0 ** torch.arange(16).unsqueeze(1), 3.0 ** torch.arange(16)
    with torch.no_grad():
        model.weight.mul_(columns.unsqueeze(1))
    x = (normal(16, 32, requires_grad=False) * rows).requires_grad_()
    expected = run_module(model, model, x).outputs[0] / rows / columns
    got = run_module(h100(model, x, recipe=recipe).execute, model, x).outputs[0] / rows / columns
    for index in range(16):
        assert sqnr(expected[index], got[index]) >= 20
        assert sqnr(expected[:, index], got[:, index]) >= 20


# --- V8: what lies around operands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "dtype"), RECIPES_AND_DTYPES)
def test_nan_around_every_operand_is_not_read(h100: PreviewOf, recipe: str, dtype: torch.dtype) -> None:
    """V8. Input, weight and output gradient lie among NaN, in sizes that are padded in every GEMM, and every buffer of
    the program starts as NaN: finite, within the bounds, and what their copies give."""
    model = nn.Linear(72, 58, bias=False).to(dtype)
    copies = nn.Linear(72, 58, bias=False).to(dtype)
    copies.load_state_dict(model.state_dict())
    model.weight = nn.Parameter(surrounded(model.weight))
    x, g = normal(29, 72, dtype=dtype), surrounded(normal(29, 58, seed=1, dtype=dtype, requires_grad=False))
    assert not model.weight.is_contiguous()
    assert not g.is_contiguous()

    def results(call: Any, module: nn.Module, x: torch.Tensor, g: torch.Tensor) -> Run:
        leaf = x.detach().requires_grad_()
        parameters = [("input 0", leaf), *module.named_parameters()]
        return run(lambda: call(leaf), [], parameters, loss=lambda y: (y * g).sum())

    preview = h100(model, surrounded(x).requires_grad_(), recipe=recipe)
    assert preview.report.in_fp8 == 3
    assert all(row.notes for row in preview.report.rows)
    got = results(preview.execute, model, surrounded(x), g)
    like = results(copies, copies, x, g.contiguous())
    reference = results(copies.double(), copies, x.double(), g.double())
    assert_close(reference, got, like)
    expected = results(h100(copies.to(dtype), x, recipe=recipe).execute, copies, x, g.contiguous())
    assert_close(expected, got, like, SAME_DB, SAME_DB)


# --- K4: what Hopper does not multiply --------------------------------------------------------------------------------


def test_e5m2_by_e5m2_is_kept_with_a_reason(h100: PreviewOf) -> None:
    """K4. A recipe that asks for it gets its GEMMs in high precision, with the chip's reason."""
    recipe = Recipe.uniform("all E5M2", dtype=E5M2)
    report = check_on_h100(h100, nn.Linear(32, 48), normal(32, 32), recipe=recipe, out_db=120, grad_db=120)
    assert [row.fp8 for row in report.rows] == [False] * 3
    assert all("does not multiply E5M2 by E5M2" in row.reason for row in report.rows)
