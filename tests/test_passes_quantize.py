"""Quantize: which casts a rewritten graph has, what they read, where they lie, and what is kept for the backward."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import Block, compile_fp8, fp8_nodes, mlp, normal
from torch import nn
from torch.nn import functional as F

import fp8compile as fp8
from fp8compile.ops import COMPUTE_SCALE, QUANTIZE, QUANTIZE_TRANSPOSED, SCALED_MM
from fp8compile.passes import PassContext
from fp8compile.passes.dataflow import is_backward, root, value
from fp8compile.recipe import E4M3, E5M2

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default


@dataclass
class Rewritten:
    """The one graph of a model, before and after, and what the passes noted."""

    before: torch.fx.Graph
    after: torch.fx.Graph
    context: PassContext

    def nodes(self, target: Any) -> list[torch.fx.Node]:
        return [node for node in self.after.nodes if node.target is target]

    def gemms(self, role: str) -> list[torch.fx.Node]:
        return [found.node for found in self.context.matmuls if found.site.role == role and found.gemm is not None]

    def casts(self) -> list[tuple[str, torch.dtype, bool]]:
        """(name of the tensor, dtype, transposed) of each cast; tensors by the placeholder or node they show."""
        return [(root(node.args[0]).name, node.args[2], node.args[3]) for node in self.nodes(QUANTIZE)]


def rewrite(model: Callable[..., Any], *inputs: Any, **options: Any) -> Rewritten:
    """Compile ``model``, run it forward and backward, and return its one graph."""
    seen: list[Rewritten] = []
    with fp8.collect_reports(
        lambda report, before, after, ctx: seen.append(Rewritten(before, copy.deepcopy(after), ctx))
    ):
        out = compile_fp8(model, fullgraph=True, **options)(*inputs)
        if out.requires_grad:
            out.sum().backward()
    (only,) = seen
    return only


class QKV(nn.Module):
    """Three projections of one input, multiplied so that each gets its own gradient."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * torch.tanh(self.k(x)) * self.v(x)


class Autocast(nn.Module):
    """A module under CPU autocast."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


# --- One cast per tensor and use --------------------------------------------------------------------------------------


def test_q_k_and_v_share_the_casts_of_their_input() -> None:
    """One cast of x for three fprops and one, transposed, for three wgrads; one amax for both layouts."""
    graph = rewrite(QKV(), normal(2, 16, 64), recipe="tensorwise")
    of_input = [(dtype, transposed) for name, dtype, transposed in graph.casts() if name == graph_input(graph)]
    assert sorted(of_input, key=str) == [(E4M3, False), (E4M3, True)]
    assert len({node.args[0] for node in graph.gemms("fprop")}) == 1
    assert len({node.args[1] for node in graph.gemms("wgrad")}) == 1
    scales = [node for node in graph.nodes(COMPUTE_SCALE) if root(node.args[0]).name == graph_input(graph)]
    assert len(scales) == 1


def graph_input(graph: Rewritten) -> str:
    """Name of the placeholder that is data."""
    names = {f.first: f for f in graph.context.matmuls}
    assert names
    (source,) = {root(node.args[0].args[0]).name for node in graph.gemms("fprop")[:1]}
    return source


def test_casts_are_counted_in_the_report() -> None:
    """q, k, v: x twice (both layouts), three weights in forward and in backward, three gradients twice."""
    graph = rewrite(QKV(), normal(2, 16, 64), recipe="tensorwise")
    assert graph.context.casts == {
        "input in forward": 2,
        "weight in forward": 3,
        "weight in backward": 3,
        "grad_output in backward": 6,
    }
    assert sum(graph.context.casts.values()) == len(graph.nodes(QUANTIZE))


def test_what_was_cast_once_is_transposed_from_its_fp8_data() -> None:
    """rowwise_once, q, k, v: x and the gradients are cast once and transposed in FP8; weights are read again."""
    graph = rewrite(QKV(), normal(2, 16, 64), recipe="rowwise_once")
    assert graph.context.casts == {
        "input in forward": 1,
        "input in backward": 1,
        "weight in forward": 3,
        "weight in backward": 3,
        "grad_output in backward": 6,
    }
    sources = collections.Counter(value(node.args[0]).dtype for node in graph.nodes(QUANTIZE_TRANSPOSED))
    assert sources == {E4M3: 4, torch.float32: 3}
    assert sum(graph.context.casts.values()) == len(graph.nodes(QUANTIZE)) + len(graph.nodes(QUANTIZE_TRANSPOSED))
    assert len({node.args[1] for node in graph.gemms("wgrad")}) == 1


def test_no_two_casts_are_equal() -> None:
    """In a whole block: same source, scale, dtype and layout never twice."""
    for recipe in ("tensorwise", "rowwise", "rowwise_once"):
        torch._dynamo.reset()
        graph = rewrite(Block(), normal(2, 16, 64), recipe=recipe)
        keys = [str(node.args) for node in graph.nodes(QUANTIZE)] + [
            str(node.args) for node in graph.nodes(COMPUTE_SCALE)
        ]
        assert [key for key, number in collections.Counter(keys).items() if number > 1] == []


def test_rowwise_scales_are_shared_by_layout_only() -> None:
    """Rows of the forward are not rows of the backward: two scales per operand, one along each dimension."""
    graph = rewrite(nn.Linear(64, 32, bias=False), normal(48, 64), recipe="rowwise")
    dims = collections.Counter((root(n.args[0]).name, tuple(n.args[1])) for n in graph.nodes(COMPUTE_SCALE))
    assert set(dims.values()) == {1}
    assert collections.Counter(dim for _, dim in dims) == {(0,): 3, (1,): 3}


def test_weight_used_twice_is_cast_once_per_direction() -> None:
    """A layer applied twice has one weight, hence one forward and one backward cast of it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    graph = rewrite(Twice(), normal(32, 64))
    assert graph.context.casts["weight in forward"] == 1
    assert graph.context.casts["weight in backward"] == 1
    assert len(graph.gemms("fprop")) == 2


def test_gradient_of_a_residual_stream_is_cast_once_for_both_its_readers() -> None:
    """y = f(x) + g(x): both layers receive the same output gradient."""
    layers = [nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)]
    graph = rewrite(lambda x: layers[0](x) + layers[1](torch.tanh(x)), normal(32, 64))
    assert graph.context.casts["grad_output in backward"] == 2  # two layouts


# --- Casts read the tensor as it was before views and conversions -----------------------------------------------------


def test_float32_weight_under_autocast_is_cast_directly() -> None:
    """No bfloat16 copy of the weight is left in the graph, forward or backward."""
    graph = rewrite(Autocast(nn.Linear(64, 32, bias=False)), normal(48, 64))
    assert any(node.target is CONVERT for node in graph.before.nodes)
    assert not any(node.meta["val"].dtype == torch.bfloat16 for node in graph.nodes(CONVERT))
    read = {node.args[0].meta["val"].dtype for op in (QUANTIZE, COMPUTE_SCALE) for node in graph.nodes(op)}
    weight_casts = [node for node in graph.nodes(QUANTIZE) if root(node.args[0]).op == "placeholder"]
    assert torch.float32 in read
    sources = {root(n.args[0]).meta["val"].dtype for n in weight_casts if "tangents" not in root(n.args[0]).name}
    assert sources == {torch.float32}


def test_direct_cast_rounds_once() -> None:
    """float32 → FP8 equals rounding the float32 value; going through bfloat16 first rounds some values twice."""
    layer = nn.Linear(64, 32, bias=False)
    x = torch.eye(64)
    with torch.no_grad():
        out = compile_fp8(Autocast(layer), recipe="rowwise")(x).float()
    scale = layer.weight.abs().amax(1, keepdim=True) / 448
    once = (layer.weight / scale).to(E4M3).float() * scale
    twice = (layer.weight.bfloat16().float() / scale).to(E4M3).float() * scale
    assert torch.equal(out.T, once.bfloat16().float())
    assert not torch.equal(twice.bfloat16(), once.bfloat16())


def test_conversion_that_something_else_reads_stays() -> None:
    """Hoisting a cast over a conversion does not take the converted tensor from its other readers."""

    class Also(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = x.bfloat16()
            return F.linear(half, self.weight.bfloat16()) + half.sum(-1, keepdim=True)

    graph = rewrite(Also(64, 32, bias=False), normal(48, 64))
    assert len(graph.gemms("fprop")) == 1
    assert any(node.meta["val"].dtype == torch.bfloat16 for node in graph.nodes(CONVERT))


def test_arithmetic_is_not_hoisted_over() -> None:
    """Arithmetic in bfloat16 between a conversion and a cast is not a conversion: the cast reads its result."""

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() * 2) @ w.bfloat16()

    graph = rewrite(model, normal(48, 64), normal(64, 32), policy=fp8.Policy.all().use("tensorwise"))
    (gemm,) = graph.gemms("fprop")
    assert root(gemm.args[0].args[0]).target is aten.mul.Tensor


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_casts_are_hoisted_over_transposes(recipe: str) -> None:
    """``F.linear`` reads wᵀ; the cast reads w and lays it out, so no transposed copy is made."""
    graph = rewrite(nn.Linear(64, 32, bias=False), normal(48, 64), recipe=recipe)
    for node in graph.nodes(QUANTIZE):
        assert node.args[0].target not in (aten.permute.default, aten.t.default, aten.transpose.int)
    assert graph.nodes(aten.clone.default) == []


def test_weight_that_was_transposed_by_the_user_gives_the_same_cast() -> None:
    """x @ w and F.linear(x, w.t()) read the same matrix: one cast."""
    w = nn.Parameter(torch.randn(64, 64))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = w

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.w) + F.linear(x, self.w.t())

    graph = rewrite(Both(), normal(32, 64), recipe="tensorwise")
    assert graph.context.casts["weight in forward"] == 1


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(48, 64),
        lambda x: x.reshape(48, 64),
        lambda x: x.flatten(0, 1),
        lambda x: x.unsqueeze(0).squeeze(0).view(48, 64),
        lambda x: x.transpose(0, 1).transpose(0, 1).reshape(48, 64),
        lambda x: x.contiguous().view(48, 64),
        lambda x: x.view(6, 8, 64).view(48, 64),
    ],
)
def test_casts_are_shared_across_views_of_one_tensor(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Two layers that see one tensor through different but equal views share its cast."""
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    for recipe, backward in (("tensorwise", 0), ("rowwise_once", 1)):  # two layouts, whatever the views
        torch._dynamo.reset()
        graph = rewrite(lambda x: first(x.view(48, 64)) * second(view(x)).tanh(), normal(3, 16, 64), recipe=recipe)
        assert graph.context.casts["input in forward"] == 2 - backward
        assert graph.context.casts["input in backward"] == backward


def test_different_matrices_of_one_tensor_are_not_shared() -> None:
    """The tensor as [48, 64] and as [96, 32] has different rows: rowwise scales of one are wrong for the other."""
    first, second = nn.Linear(64, 32, bias=False), nn.Linear(32, 32, bias=False)

    def model(x: torch.Tensor) -> torch.Tensor:
        return first(x.view(48, 64)).sum() * second(x.view(96, 32))

    x = normal(48, 64, requires_grad=False)
    with torch.no_grad():
        graph = rewrite(model, x, recipe="rowwise")
        assert graph.context.casts["input in forward"] == 2
        exact = model(x)
        torch._dynamo.reset()
        assert (compile_fp8(model, recipe="rowwise")(x) - exact).norm() < 0.1 * exact.norm()


def test_slice_between_cast_and_matmul_is_not_hoisted_over() -> None:
    """A slice is another tensor, with another amax."""
    layer = nn.Linear(32, 32, bias=False)
    graph = rewrite(lambda x: layer(x[:, :32]), normal(48, 64))
    (gemm,) = graph.gemms("fprop")
    assert root(gemm.args[0].args[0]).target is aten.slice.Tensor


# --- Which dtype, whatever side it is on ------------------------------------------------------------------------------

WAYS = {
    "F.linear": (lambda x, w: F.linear(x, w), (32, 64), (48, 64)),
    "x @ w": (lambda x, w: x @ w, (64, 32), (48, 64)),
    "w @ x": (lambda x, w: w @ x, (32, 64), (64, 48)),
    "einsum": (lambda x, w: torch.einsum("bi,oi->bo", x, w), (32, 64), (48, 64)),
    "bmm": (lambda x, w: torch.bmm(x, w), (3, 64, 32), (3, 16, 64)),
    "baddbmm": (lambda x, w: torch.baddbmm(x[..., :32], x, w), (3, 64, 32), (3, 16, 64)),
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_dtype_follows_the_operand_whatever_side_it_is_on(way: str) -> None:
    """Autograd writes wgrad as gᵀ @ x or as xᵀ @ g: the gradient is E5M2 and the input E4M3 in both."""
    function, weight, data = WAYS[way]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(*weight))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x, self.w)

    graph = rewrite(Model(), normal(*data), recipe="tensorwise")
    assert len(graph.context.matmuls) == 3
    for found in graph.context.matmuls:
        gemm = found.node
        while gemm.target is not SCALED_MM:  # what adds the bias reads it
            (gemm,) = [n for n in gemm.all_input_nodes if n.op == "call_function" and n.target is not aten.slice.Tensor]
        for operand, arg in zip(found.site.operands, gemm.args[:2], strict=True):
            expected = E5M2 if operand == "grad_output" else E4M3
            assert arg.meta["val"].dtype == expected, f"{found.site.role}: {operand}"


# --- Where casts lie and what is saved --------------------------------------------------------------------------------


def saved(model: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """The tensors that the compiled forward really keeps for its backward, parameters not counted."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compile_fp8(model, **options)(x)
    out.sum().backward()
    parameters = {p.data_ptr() for p in model.parameters()}
    return [tensor for tensor in kept if tensor.data_ptr() not in parameters]


def total_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in {t.data_ptr(): t for t in tensors}.values())


class NormLinear(nn.Module):
    """A norm whose result only a Linear reads, so that nothing but wgrad needs it in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(64), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.norm(x)).sin())


def test_wgrads_operand_is_saved_as_fp8() -> None:
    """The input of a layer that nothing else needs is kept as FP8 bytes, not in float32."""
    tensors = saved(QKV(), torch.tanh(normal(32, 64)))
    assert [t.dtype for t in tensors if t.dtype == E4M3] == [E4M3]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_once"])
@pytest.mark.parametrize("make", [NormLinear, QKV, mlp])
def test_never_more_bytes_for_the_backward_than_without_fp8(make: Callable[[], nn.Module], recipe: str) -> None:
    """Measured at run time on what autograd is asked to keep, in bfloat16."""
    model, x = make().bfloat16(), normal(2, 32, 64, dtype=torch.bfloat16)
    plain = total_bytes(saved(model, x, policy="none"))
    torch._dynamo.reset()
    ours = total_bytes(saved(model, x, recipe=recipe))
    assert ours <= plain


@pytest.mark.parametrize(("recipe", "scales"), [("tensorwise", 4), ("rowwise", 0), ("rowwise_once", 256 + 64 + 256)])
def test_fewer_bytes_for_the_backward_where_fp8_stands_in(recipe: str, scales: int) -> None:
    """Two layers in a row: the hidden activation is needed by wgrad alone and shrinks to a byte an element. Beside it
    the scales of both layouts: of activations and weights, one a tensor or one a row."""
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)).bfloat16()
    x = normal(128, 64, dtype=torch.bfloat16)
    plain = total_bytes(saved(model, x, policy="none"))
    torch._dynamo.reset()
    ours = total_bytes(saved(model, x, recipe=recipe))
    assert plain >= 2 * 128 * 256
    assert ours <= plain - 128 * 256 + 4 * scales


def test_backward_casts_of_weights_wait_for_the_backward() -> None:
    """The transposed cast for dgrad is placed in the backward and kept there: the weight itself is free to keep."""
    graph = rewrite(nn.Linear(64, 32, bias=False), normal(48, 64))
    (dgrad,) = graph.gemms("dgrad")
    assert dgrad.args[1].meta["partitioner_tag"] == "must_be_in_backward"
    assert not any(
        t.dtype == E4M3 and t.shape == (64, 32) for t in saved(nn.Linear(64, 32, bias=False), normal(48, 64))
    )


def test_forward_never_reads_the_backward() -> None:
    """No node of the forward depends on a node that is tagged as backward."""
    for recipe in ("tensorwise", "rowwise", "rowwise_once"):
        torch._dynamo.reset()
        graph = rewrite(Block(), normal(2, 16, 64), recipe=recipe)
        for node in graph.after.nodes:
            if node.op == "call_function" and node.meta.get("partitioner_tag") == "is_forward":
                tags = {arg.meta.get("partitioner_tag") for arg in node.all_input_nodes}
                assert tags <= {"is_forward", None}
        assert any(is_backward(node) for node in fp8_nodes(graph.after))


# --- The replaced matmul ----------------------------------------------------------------------------------------------


def test_every_chosen_matmul_is_replaced_and_nothing_else_changes() -> None:
    """Matmuls become scaled matmuls one to one; other operators keep their number."""
    graph = rewrite(Block(), normal(2, 16, 64), recipe="tensorwise")
    before = collections.Counter(str(n.target) for n in graph.before.nodes if n.op == "call_function")
    after = collections.Counter(str(n.target) for n in graph.after.nodes if n.op == "call_function")
    matmuls = ("aten.mm.default", "aten.addmm.default")
    free = ("aten.permute.default", "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
    assert after[str(SCALED_MM)] == sum(before[name] for name in matmuls)
    assert not any(after[name] for name in matmuls)
    ours = {str(op) for op in (SCALED_MM, QUANTIZE, COMPUTE_SCALE)}
    rest = {name: number for name, number in after.items() if name not in ours and name not in free}
    assert rest == {name: number for name, number in before.items() if name not in matmuls and name not in free}


def test_replaced_nodes_have_the_shape_dtype_and_strides_of_what_they_replace() -> None:
    before: dict[str, Any] = {}
    seen: list[Rewritten] = []

    def listen(report: Any, graph: torch.fx.Graph, after: torch.fx.Graph, context: PassContext) -> None:
        before.update({node.name: node.meta["val"] for node in graph.nodes if "val" in node.meta})
        seen.append(Rewritten(graph, after, context))

    with fp8.collect_reports(listen):
        compile_fp8(Block())(normal(2, 16, 64)).sum().backward()
    replaced = [found for found in seen[0].context.matmuls if found.gemm is not None]
    assert len(replaced) == 18
    for found in replaced:
        old, new = before[found.site.name], found.node.meta["val"]
        assert (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride())


def test_bias_is_fused_where_it_is_a_row_and_added_where_it_is_a_matrix() -> None:
    row = rewrite(nn.Linear(64, 32), normal(48, 64))
    (gemm,) = row.gemms("fprop")
    assert gemm.args[4] is not None
    torch._dynamo.reset()
    w = nn.Parameter(torch.randn(64, 32))
    matrix = rewrite(lambda x, b: torch.addmm(b, x, w, alpha=2, beta=0.5), normal(48, 64), normal(48, 32))
    assert [node.args[4] for node in matrix.nodes(SCALED_MM)] == [None] * len(matrix.nodes(SCALED_MM))


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2, 1), (1, 0.5), (-3, 0), (0, 2)])
def test_alpha_and_beta(alpha: float, beta: float) -> None:
    """addmm is beta·bias + alpha·x@w for vectors and matrices of bias; with beta 0 a NaN in the bias is ignored."""
    w, x = torch.randn(64, 32), normal(48, 64, requires_grad=False)
    for bias in (torch.randn(32), torch.randn(48, 32)):
        if beta == 0:
            bias[0] = float("nan")
        torch._dynamo.reset()

        def model(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.addmm(bias, x, w, alpha=alpha, beta=beta)

        policy = fp8.Policy.all().use("rowwise")
        with fp8.collect_reports() as report:
            out = compile_fp8(model, policy=policy)(x, bias)
        exact = model(x, bias)
        assert report.in_fp8 == 1
        assert (out - exact).norm() <= 0.06 * alpha * (x @ w).norm() if alpha > 0 else torch.isfinite(out).all()
        assert (out - exact).norm() <= 0.06 * abs(alpha) * (x @ w).norm() + 1e-5 * exact.norm()


def test_policy_that_keeps_everything_leaves_the_graph_as_it_was() -> None:
    graph = rewrite(Block(), normal(2, 16, 64), policy="none")
    assert str(graph.before) == str(graph.after)


def test_padded_gemm_returns_the_columns_that_were_asked_for() -> None:
    """N = 712 is padded to 720 and cut again; K = 712 is padded in both operands; the result is contiguous."""
    for out_features, in_features in ((712, 64), (64, 712)):
        torch._dynamo.reset()
        model, x = nn.Linear(in_features, out_features), normal(32, in_features, requires_grad=False)
        with torch.no_grad():
            graph = rewrite(model, x)
            (gemm,) = graph.nodes(SCALED_MM)
            assert [arg.meta["val"].shape[1] % 16 for arg in gemm.args[:2]] == [0, 0]
            assert gemm.args[1].meta["val"].shape[0] % 16 == 0
            torch._dynamo.reset()
            out = compile_fp8(model)(x)
        assert out.shape == (32, out_features)
        assert out.is_contiguous()
        assert (out - model(x)).norm() < 0.06 * model(x).norm()
