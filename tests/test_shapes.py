"""HARD_CASES.md, Shapes: any M, N and K, any strides, any way of writing a matmul."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    RECIPES,
    CastRecorder,
    Experts,
    GraphRecorder,
    assert_close,
    check,
    compile_fp8,
    fp8_nodes,
    mlp,
    normal,
    rows_by_role,
    run,
    run_module,
    sqnr,
)
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch.nn import functional as F

import fp8compile
from fp8compile.report import Report


def in_fp8(report: Report) -> dict[str, list[bool]]:
    """Role -> whether each of its sites runs in FP8."""
    return {role: [row.fp8 for row in rows] for role, rows in rows_by_role(report).items()}


# S1


@pytest.mark.parametrize("recipe", RECIPES)
def test_features_that_are_not_multiples_of_16_are_padded(recipe: str) -> None:
    """712 = 44·16 + 8: every GEMM in which it is N or K is padded to 720 and says so; 712 as M needs no padding."""
    report = check(nn.Linear(712, 896), normal(4096, 712), recipe=recipe)
    rows = rows_by_role(report)
    assert {role: len(found) for role, found in rows.items()} == {"fprop": 1, "dgrad": 1, "wgrad": 1}
    for role, where in {"fprop": "K", "dgrad": "N", "wgrad": "N"}.items():
        (row,) = rows[role]
        if role == "wgrad" and recipe == "rowwise_hp_wgrad":
            assert (row.fp8, row.reason) == (False, "recipe rowwise_hp_wgrad keeps wgrad in high precision")
        else:
            assert row.fp8
            assert row.notes == (f"{where} padded 712→720",)


# S2


@pytest.mark.parametrize("shape", [(1, 13, 64), (1, 13, 1, 64), (13, 1, 1, 64)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_few_tokens_keep_wgrad_alone(shape: tuple[int, ...], recipe: str) -> None:
    """wgrad contracts over the 13 tokens, below the minimum of 16; fprop and dgrad have them as M, which may be
    anything."""
    report = check(nn.Linear(64, 96), normal(*shape), recipe=recipe)
    assert in_fp8(report) == {"fprop": [True], "dgrad": [True], "wgrad": [False]}
    (wgrad,) = rows_by_role(report)["wgrad"]
    assert "13" in wgrad.reason or wgrad.reason.startswith("recipe rowwise_hp_wgrad")


@pytest.mark.parametrize(("tokens", "padded"), [(16, None), (17, False), (31, True), (32, None), (60, True)])
def test_wgrad_is_padded_where_that_is_cheap(tokens: int, padded: bool | None) -> None:
    """A contraction over tokens is padded if that adds at most a quarter to its work, else kept with the growth as
    reason."""
    report = check(nn.Linear(64, 96), normal(tokens, 64))
    (wgrad,) = rows_by_role(report)["wgrad"]
    assert wgrad.fp8 is (padded is not False)
    if padded is False:
        assert f"K {tokens}→32" in wgrad.reason
    else:
        assert wgrad.notes == ((f"K padded {tokens}→{-(-tokens // 16) * 16}",) if padded else ())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 70),
    fan_in=st.integers(1, 70),
    fan_out=st.integers(1, 70),
    recipe=st.sampled_from(RECIPES),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_shape(tokens: int, fan_in: int, fan_out: int, recipe: str, bias: bool, dtype: torch.dtype) -> None:
    """Every M, N and K works, and no GEMM whose N or K is below 16 runs in FP8. What does run there has so many
    elements that normal data's 28 dB (25 with E5M2) cannot fall to the usual bounds by chance."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    report = check(nn.Linear(fan_in, fan_out, bias=bias).to(dtype), normal(tokens, fan_in, dtype=dtype), recipe=recipe)
    for row in report.rows:
        _, n, k = (int(size) for size in row.shape.split("×"))
        assert not row.fp8 or min(n, k) >= 16


# S3


@pytest.mark.parametrize(
    ("recipe", "engine", "width", "counts"),
    [*((recipe, "eager", 64, (5, 0, 33)) for recipe in RECIPES), ("tensorwise", "inductor", 72, (0, 33))],
)
def test_experts_without_tokens(recipe: str, engine: str, width: int, counts: tuple[int, ...]) -> None:
    """The expert without tokens gets gradients of zero, and its GEMMs are in the report, kept; the others run in FP8. A
    width of 72 is padded to 80 besides."""
    model = Experts(width, counts)
    report = check(model, normal(sum(counts), width), recipe=recipe, engine=engine)
    idle = model.experts[counts.index(0)]
    assert idle.weight.grad is not None
    assert not idle.weight.grad.any()
    empty = [row for row in report.rows if "0" in row.shape.split("×")]
    assert empty
    keeps_wgrad = "recipe rowwise_hp_wgrad keeps wgrad in high precision"
    assert all(not row.fp8 and row.reason in ("empty: a dimension is zero", keeps_wgrad) for row in empty)
    assert recipe == "rowwise_hp_wgrad" or any(row.reason == "empty: a dimension is zero" for row in empty)
    assert sum(row.fp8 for row in report.rows if row.role == "fprop") == len(counts) - 1


def test_no_tokens_at_all() -> None:
    """``x[0:0]`` gives an empty output and weight gradients of zero, of the right shapes."""
    model = nn.Linear(64, 32)
    x = normal(8, 64)
    got = run_module(compile_fp8(model), model, x[0:0])
    assert got.outputs[0].shape == (0, 32)
    assert got.grads["weight"] is not None
    assert got.grads["weight"].shape == (32, 64)
    assert not got.grads["weight"].any()


def test_no_tokens_after_some_with_dynamic_shapes() -> None:
    """A graph compiled for any number of tokens also runs with none."""
    model = mlp()
    compiled = compile_fp8(model, dynamic=True)
    for tokens in (24, 40, 0):
        check(model, normal(tokens, 64), compiled=compiled, flops=False)


class Routed(nn.Module):
    """An expert for the tokens that a mask chooses."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.expert = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, mask.nonzero().squeeze(1), self.expert(x[mask]))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize(
    ("engine", "recipe", "capture"),
    [*(("eager", recipe, capture) for recipe in RECIPES for capture in (False, True)), ("inductor", "rowwise", True)],
)
def test_tokens_chosen_by_data(engine: str, recipe: str, capture: bool) -> None:
    """Routing by a mask makes token counts that no one knows while compiling. With a graph break or captured as
    unbacked sizes, for many tokens and for none: right, and every matmul in the report. Captured, it compiles once."""
    model, x = Routed(), normal(40, 64)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=capture):
        compiled = compile_fp8(model, recipe=recipe, engine=engine)
        report = check(model, x, torch.arange(40) < 5, compiled=compiled, flops=False)
        assert {row.role for row in report.rows} >= {"fprop", "dgrad", "wgrad"}
        with torch._dynamo.config.patch(error_on_recompile=capture):
            for chosen in (33, 0, 40):
                check(model, x, torch.arange(40) < chosen, compiled=compiled, flops=False)


# S4


@pytest.mark.parametrize(
    ("fan_in", "fan_out", "tokens"), [(32, 8, 64), (32, 15, 64), (768, 2, 64), (8, 64, 64), (1, 64, 64)]
)
def test_narrow_heads_are_kept(fan_in: int, fan_out: int, tokens: int) -> None:
    """Below 16 features no GEMM of a layer fits a Hopper tensor core in FP8: each is kept with its size as the
    reason."""
    narrow = min(fan_in, fan_out)
    report = check(nn.Linear(fan_in, fan_out), normal(tokens, fan_in), out_db=120, grad_db=120)
    assert len(report.rows) == 3
    for row in report.rows:
        assert not row.fp8
        assert f"={narrow} below" in row.reason


# S5


class CountingBackend:
    """Counts how many graphs a backend is asked for."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.graphs += 1
        return self.backend(gm, example_inputs)


def ours(engine: str, recipe: str = "tensorwise") -> Callable[..., Any]:
    options = {"policy": "all", "engine": engine, "recipe": recipe, "verify": True}
    return lambda gm, inputs: fp8compile.fp8(gm, inputs, options=options)


def op_by_op(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """Inductor's pipeline without code generation; what guards it makes, it makes."""
    return compile_fx(gm, inputs, inner_compile=lambda gm, inputs, **_: make_boxed(gm))


def make_boxed(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func

    return make_boxed_func(gm.forward)


@pytest.mark.parametrize("sizes", [(17, 1, 33), (64, 17, 13, 1, 48)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_no_more_recompilations_than_inductor(sizes: tuple[int, ...], recipe: str) -> None:
    """Batch sizes on both sides of 16 and of its multiples: padding a dynamic size adds no guard of its own."""
    graphs = {}
    for name, backend in {"inductor": op_by_op, "fp8": ours("eager", recipe)}.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = mlp()
        counting = CountingBackend(backend)
        compiled = torch.compile(model, backend=counting)
        for size in sizes:
            if name == "fp8":
                check(model, normal(size, 64), compiled=compiled, flops=False)
            else:
                run_module(compiled, model, normal(size, 64))
        graphs[name] = counting.graphs
    assert graphs["fp8"] <= graphs["inductor"]


def test_generating_code_adds_no_recompilations() -> None:
    """The same through Inductor's code generation, which may guard on more."""
    sizes = (17, 33, 40, 64)
    graphs = []
    for backend in (op_by_op, ours("inductor")):
        torch._dynamo.reset()
        model = nn.Linear(64, 64)
        counting = CountingBackend(backend)
        compiled = torch.compile(model, backend=counting)
        for size in sizes:
            if backend is op_by_op:
                run_module(compiled, model, normal(size, 64))
            else:
                check(model, normal(size, 64), compiled=compiled, flops=False)
        graphs.append(counting.graphs)
    assert graphs == [2, 2]


@pytest.mark.parametrize("recipe", RECIPES)
def test_dynamic_sizes_never_recompile(recipe: str) -> None:
    """Compiled once with ``dynamic=True``, no number of tokens from 2 on compiles anything again."""
    model = mlp()
    compiled = compile_fp8(model, dynamic=True, recipe=recipe)
    report = check(model, normal(24, 64), compiled=compiled)
    assert all(row.fp8 for row in report.rows if row.role != "wgrad")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (2, 15, 16, 17, 100):
            check(model, normal(size, 64), compiled=compiled, flops=False)


def test_dynamic_columns_are_kept() -> None:
    """A GEMM whose N is dynamic would need an output of padded width: kept, with that reason, and right."""
    model = Bare(lambda x, w: w @ x.mT, (64, 64))
    with fp8compile.collect_reports() as report:
        check(model, normal(24, 64), compiled=compile_fp8(model, dynamic=True), flops=False)
    (fprop,) = rows_by_role(report)["fprop"]
    assert not fprop.fp8
    assert fprop.reason.startswith("N is dynamic")


# S6


class Bare(nn.Module):
    """``compute`` on plain parameters."""

    def __init__(self, compute: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.names = [f"weight{index}" for index in range(len(shapes))]
        for name, shape in zip(self.names, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.randn(*shape) / shape[-2] ** 0.5))
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x, *[getattr(self, name) for name in self.names])


WAYS_TO_MULTIPLY: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(64, 96), (32, 64)),
    "linear without bias": (nn.Linear(64, 96, bias=False), (32, 64)),
    "sequential": (nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32)), (2, 32, 64)),
    "@ on a matrix": (Bare(lambda x, w: x @ w, (64, 96)), (32, 64)),
    "@ on 3-D": (Bare(lambda x, w: x @ w, (64, 96)), (2, 32, 64)),
    "matmul with the weight first": (Bare(lambda x, w: (w @ x.mT).mT, (96, 64)), (32, 64)),
    "matmul with a batch of weights": (Bare(lambda x, w: x @ w, (2, 64, 96)), (2, 32, 64)),
    "addmm with alpha and beta": (
        Bare(lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2), (64, 96), (32, 96)),
        (32, 64),
    ),
    "addmm with beta 0": (Bare(lambda x, w, b: torch.addmm(b, x, w, beta=0), (64, 96), (32, 96)), (32, 64)),
    "einsum": (Bare(lambda x, w: torch.einsum("bti,oi->bto", x, w), (96, 64)), (2, 32, 64)),
    "einsum over heads": (Bare(lambda x, w: torch.einsum("bti,hid->bhtd", x, w), (4, 64, 32)), (2, 32, 64)),
    "einsum of experts": (Bare(lambda x, w: torch.einsum("eti,eio->eto", x, w), (4, 64, 32)), (4, 32, 64)),
    "bmm": (Bare(lambda x, w: torch.bmm(x, w), (2, 64, 96)), (2, 32, 64)),
    "baddbmm": (Bare(lambda x, w, b: torch.baddbmm(b, x, w), (2, 64, 96), (2, 1, 96)), (2, 32, 64)),
    "baddbmm with alpha and beta": (
        Bare(lambda x, w, b: torch.baddbmm(b, x, w, beta=0.5, alpha=2), (2, 64, 96), (2, 32, 96)),
        (2, 32, 64),
    ),
    "two linears on one input": (
        Bare(lambda x, v, w: F.linear(x, v) * F.linear(x, w).sigmoid(), (96, 64), (96, 64)),
        (32, 64),
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS_TO_MULTIPLY)
def test_every_way_to_multiply_is_found(way: str, recipe: str) -> None:
    """Whatever a matmul with a weight is written as, its GEMMs are FP8, all the FLOPs that eager does among them; with
    block scales, whose kernel is for two matrices, batches are kept with that reason."""
    model, shape = WAYS_TO_MULTIPLY[way]
    report = check(model, normal(*shape), recipe=recipe)
    for row in report.rows:
        batch = recipe == "block" and row.reason.startswith("block scales") and row.op in ("bmm", "baddbmm")
        assert row.fp8 or batch or (row.role == "wgrad" and recipe == "rowwise_hp_wgrad"), f"{row}"


def test_every_way_to_multiply_under_inductor() -> None:
    """The same in one model, compiled to C++."""

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.w = nn.Parameter(torch.randn(64, 64) / 8)
            self.experts = nn.Parameter(torch.randn(2, 64, 64) / 8)
            self.bias = nn.Parameter(torch.randn(2, 1, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.linear(x)) @ self.w
            x = torch.einsum("bti,oi->bto", x, self.w)
            return torch.baddbmm(self.bias, x, self.experts)

    report = check(All(), normal(2, 32, 64), recipe="rowwise", engine="inductor", out_db=16, grad_db=15)
    assert report.in_fp8 == len(report.rows) == 12


@pytest.mark.parametrize("way", WAYS_TO_MULTIPLY)
def test_dtypes_follow_the_operand_whatever_side_it_is_on(way: str) -> None:
    """tensorwise casts output gradients to E5M2 and everything else to E4M3. Autograd writes a dgrad as ``g @ W`` or
    ``(Wᵀ @ gᵀ)ᵀ`` as layouts have it: the dtype goes with the operand, not with the side."""
    model, shape = WAYS_TO_MULTIPLY[way]
    graphs = GraphRecorder()
    with fp8compile.collect_reports(graphs):
        run_module(compile_fp8(model, recipe="tensorwise"), model, normal(*shape))
    (graph,) = graphs.graphs
    casts = [node for node in fp8_nodes(graph) if "quantize" in str(node.target)]
    assert casts
    for node in casts:
        expected = torch.float8_e5m2 if depends_on_tangents(node) else torch.float8_e4m3fn
        assert node.args[2] == expected, node.format_node()


def depends_on_tangents(node: torch.fx.Node) -> bool:
    return any(source.name.startswith("tangents") or depends_on_tangents(source) for source in node.all_input_nodes)


def test_multihead_attention_projections_are_found() -> None:
    """In- and out-projection are FP8; attention's own products are found and kept as sensitive."""
    model = nn.MultiheadAttention(64, 4, batch_first=True)
    x = normal(2, 32, 64)
    report = check(model, x, x, x, flops=False)
    linear = [row for row in report.rows if row.fp8]
    kept = [row for row in report.rows if not row.fp8]
    assert {row.role for row in linear} == {"fprop", "dgrad", "wgrad"}
    assert sum(row.role == "fprop" for row in linear) >= 2
    assert kept
    assert all(row.reason.startswith("sensitive: ") for row in kept)


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "allow_rnn"), reason="this torch has no allow_rnn")
def test_lstm_is_found() -> None:
    """Every GEMM of an LSTM is in the report."""
    model = nn.LSTM(32, 32)
    with torch._dynamo.config.patch(allow_rnn=True):
        report = check(
            model, normal(6, 16, 32), loss=lambda result: result[0].square().sum(), out_db=17, grad_db=13, flops=False
        )
    assert any(row.role == "fprop" for row in report.rows)
    assert any(row.fp8 for row in report.rows)


def test_pointwise_convolution_is_found() -> None:
    """A 1x1 convolution is a matmul: it is in the report, FP8 or with a reason, forward and backward."""
    report = check(nn.Conv2d(32, 48, 1), normal(2, 32, 8, 8), flops=False)
    assert len(report.rows) >= 2
    assert all(row.fp8 or "convolution" in row.reason for row in report.rows)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
def test_grouped_mm_is_found() -> None:
    """A grouped matmul is in the report, FP8 or with a reason, forward and backward, with one empty group."""
    ends = torch.tensor([16, 16, 48], dtype=torch.int32)
    model = Bare(lambda x, w: F.grouped_mm(x, w, offs=ends), (3, 64, 32)).bfloat16()
    x = normal(48, 64, dtype=torch.bfloat16)
    like = run_module(model, model, x)
    with fp8compile.collect_reports() as report:
        got = run_module(compile_fp8(model), model, x)
    assert_close(like, got, like)
    assert [row.op for row in report.rows].count("_grouped_mm") == 3
    assert all(row.reason for row in report.rows)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y: x * y, id="elementwise"),
        pytest.param(lambda x, y: F.cosine_similarity(x, y).unsqueeze(1), id="similarity"),
        pytest.param(lambda x, y: torch.cdist(x, y), id="distance"),
    ],
)
def test_functions_without_a_weight_are_left_alone(function: Callable[..., torch.Tensor]) -> None:
    """Nothing is quantized where there is no parameter: same numbers as eager, to rounding."""
    x, y = normal(32, 64), normal(32, 64, seed=1)
    with fp8compile.collect_reports() as report:
        got = run(compile_fp8(function), [x, y])
    expected = run(function, [x, y])
    assert_close(expected, got, expected, out_db=100, grad_db=100)
    assert not any(row.fp8 for row in report.rows)
    assert not report.casts


# S7


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (lambda y: y.t(), lambda y: (y * torch.arange(y.shape[1])).square().mean()),
    "expanded": (lambda y: y, lambda y: y.sum()),
    "expanded over rows": (lambda y: y.mean(0), lambda y: y.square().sum()),
    "sliced": (lambda y: y[::2, 3:], lambda y: y.square().sum()),
    "flipped": (lambda y: y.flip(0), lambda y: (y * y.detach().roll(1)).sum()),
    "diagonal": (lambda y: y.diagonal(), lambda y: y.square().sum()),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_layout(layout: str, recipe: str) -> None:
    """Output gradients that come expanded (stride 0), transposed or sparse give the right weight and input
    gradients."""
    after, loss = LAYOUTS[layout]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return after(self.linear(x))

    report = check(Model(), normal(48, 64), loss=loss, recipe=recipe)
    assert rows_by_role(report)["dgrad"][0].fp8


# S8


def embedded(x: torch.Tensor, filling: float = 0.0) -> torch.Tensor:
    """``x`` as a view into a larger tensor: padded rows, padded columns, an offset."""
    *batch, rows, columns = x.shape
    buffer = torch.full((*batch, rows + 5, columns + 11), filling, dtype=x.dtype)
    view = buffer[..., 2 : 2 + rows, 3 : 3 + columns]
    view.copy_(x.detach())
    return view


VIEWS_BEFORE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "padded strides": lambda x: embedded(x).requires_grad_(),
    "transposed": lambda x: x.detach().mT.contiguous().mT.requires_grad_(),
    "slice": lambda x: torch.cat([x.detach(), x.detach()])[: x.shape[0]].requires_grad_(),
    "every second row": lambda x: x.detach().repeat_interleave(2, 0)[::2].requires_grad_(),
}


def cast_bytes(recorder: CastRecorder) -> list[bytes]:
    """Everything that was cast since the last call, in an order and orientation that do not depend on the graph."""
    found = [min(data.numpy().tobytes(), data.mT.contiguous().numpy().tobytes()) for _, data in recorder.casts]
    recorder.casts.clear()
    return sorted(found)


SAME_DB = 110.0
"""Equal but for the order of float32 sums of 64 terms, each rounding at 2⁻²⁵ of the sum: 150 dB less 18."""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("view", VIEWS_BEFORE)
def test_strides_do_not_change_a_byte(view: str, recipe: str, recorder: CastRecorder) -> None:
    """An operand with other strides is cast to the bytes of its contiguous copy, and gives its outputs and
    gradients."""
    model = nn.Linear(64, 48)
    x = normal(48, 64)
    strided = VIEWS_BEFORE[view](x)
    assert torch.equal(strided, x)
    compiled = compile_fp8(model, recipe=recipe)
    expected = run_module(compiled, model, x)
    expected_bytes = cast_bytes(recorder)
    got = run(lambda: compiled(strided), [], [("input 0", strided), *model.named_parameters()])
    assert expected_bytes
    assert cast_bytes(recorder) == expected_bytes
    assert_close(expected, got, expected, SAME_DB, SAME_DB)


class Viewed(nn.Module):
    """A matmul whose operand goes through views that change nothing about the rows."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 48)
        self.view = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.view(x)).reshape(48, 48)


VIEWS_BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reshape": lambda x: x.reshape(2, 24, 64),
    "there and back": lambda x: x.view(24, 128).view(48, 64),
    "transposed twice": lambda x: x.t().contiguous().t(),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "split heads and merge": lambda x: x.view(2, 24, 4, 16).transpose(1, 2).transpose(1, 2).reshape(2, 24, 64),
    "slice of a concatenation": lambda x: torch.cat([x, x * 1e3])[:48],
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("view", VIEWS_BETWEEN)
def test_views_between_cast_and_matmul_do_not_change_a_byte(view: str, recipe: str, recorder: CastRecorder) -> None:
    """A view, reshape or slice in front of a matmul: the same bytes are cast as without it, and the same comes out."""
    x = normal(48, 64)
    results, casts = [], []
    for function in (lambda x: x, VIEWS_BETWEEN[view]):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Viewed(function)
        results.append(run_module(compile_fp8(model, recipe=recipe), model, x))
        casts.append(cast_bytes(recorder))
    assert casts[0]
    assert casts[1] == casts[0]
    assert_close(results[0], results[1], results[0], SAME_DB, SAME_DB)


def test_q_k_and_v_share_one_cast_through_views() -> None:
    """Three Linears that read one tensor through different views cast it once per layout."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + self.k(x.view(2, 16, 64)).view(32, 64) + self.v(x.unsqueeze(0)).squeeze(0)

    report = check(Model(), normal(32, 64))
    assert len(report.rows) == report.in_fp8 == 9
    assert report.casts["input in forward"] <= 2, "one for fprop, one transposed for wgrad"


def test_sqnr_notices_a_wrong_row() -> None:
    """The instrument: one wrong row of 48 costs 48 - 2 in signal over noise, 13.8 dB, far below the bounds used
    here."""
    x = normal(48, 64, requires_grad=False)
    wrong = x.clone()
    wrong[3] = x[4]
    assert sqnr(x, x) == float("inf")
    assert sqnr(x, wrong) < 16
