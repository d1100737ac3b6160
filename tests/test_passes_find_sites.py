"""Find sites: every matmul and every collective of a graph, with module, role, shape, operands and traits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from models import Block, ByteGPT, Tied, compile_fp8, mlp, normal
from torch import nn
from torch.nn import functional as F

import fp8compile as fp8
from fp8compile import CollectiveSite, MatmulSite
from fp8compile.passes import PassContext
from fp8compile.passes.find_sites import qualified_name
from fp8compile.policy import SENSITIVE_KINDS
from fp8compile.recipe import OPERANDS


def contexts(model: Callable[..., Any], *inputs: Any, fullgraph: bool = True, **options: Any) -> list[PassContext]:
    """The passes' context of each graph of ``model``, run forward and backward."""
    seen: list[PassContext] = []
    with fp8.collect_reports(lambda report, before, after, context: seen.append(context)):
        out = compile_fp8(model, fullgraph=fullgraph, **options)(*inputs)
        if out.requires_grad:
            out.sum().backward()
    return seen


def sites(model: Callable[..., Any], *inputs: Any, **options: Any) -> list[MatmulSite]:
    (context,) = contexts(model, *inputs, **options)
    assert all(found.decision is not None and found.decision.reason for found in context.matmuls)
    return [found.site for found in context.matmuls]


class Weight(nn.Module):
    """A function of the input and one parameter ``w``."""

    def __init__(self, function: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.w)


# --- Roles and shapes -------------------------------------------------------------------------------------------------


def test_three_gemms_of_a_linear() -> None:
    """M, N and K: fprop [tokens, out, in], dgrad [tokens, in, out], wgrad [out, in, tokens]; operands by the table."""
    found = {s.role: s for s in sites(nn.Linear(64, 32), normal(3, 16, 64))}
    assert {role: (s.m, s.n, s.k) for role, s in found.items()} == {
        "fprop": (48, 32, 64),
        "dgrad": (48, 64, 32),
        "wgrad": (32, 64, 48),
    }
    for role, site in found.items():
        assert set(site.operands) == set(OPERANDS[role])
        assert (site.kind, site.batch, site.weight) == ("linear", 1, "weight")
        assert site.flops == 2 * 48 * 32 * 64


def test_inference_has_fprop_only() -> None:
    with torch.no_grad():
        assert [s.role for s in sites(mlp(), normal(8, 64))] == ["fprop", "fprop"]


def test_gradients_nobody_wants_are_not_there() -> None:
    """A frozen weight has no wgrad, an input without gradient no dgrad."""
    frozen = nn.Linear(64, 32).requires_grad_(False)
    assert [s.role for s in sites(frozen, normal(8, 64))] == ["fprop", "dgrad"]
    torch._dynamo.reset()
    assert [s.role for s in sites(nn.Linear(64, 32), normal(8, 64, requires_grad=False))] == ["fprop", "wgrad"]


def test_dtypes_are_those_of_the_matmul() -> None:
    """Under autocast the matmul is in bfloat16 though the weight is float32."""

    class Autocast(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    for site in sites(Autocast(64, 32), normal(8, 64)):
        assert (*site.dtypes, site.out_dtype) == (torch.bfloat16,) * 3


def test_dynamic_dimensions_are_named_and_keep_their_traced_size() -> None:
    (context,) = contexts_of_dynamic()
    by_role = {found.site.role: found.site for found in context.matmuls}
    assert by_role["fprop"].dynamic == {"m"}
    assert by_role["dgrad"].dynamic == {"m"}
    assert by_role["wgrad"].dynamic == {"k"}
    assert (by_role["fprop"].m, by_role["wgrad"].k) == (24, 24)
    assert by_role["fprop"].shape == "~24×32×64"


def contexts_of_dynamic() -> list[PassContext]:
    seen: list[PassContext] = []
    x = normal(24, 64)
    torch._dynamo.mark_dynamic(x, 0)
    with fp8.collect_reports(lambda report, before, after, context: seen.append(context)):
        compile_fp8(nn.Linear(64, 32))(x).sum().backward()
    return seen


# --- Modules and weights ----------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Modules in every container, an attribute that shadows a container's key, and a submodule called by a parent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.heads = nn.ModuleDict({"a-b": nn.Linear(32, 32), "weight": nn.Linear(32, 32)})
        self.layer1, self.layer10 = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.layer10(self.layer1(self.heads["weight"](self.heads["a-b"](x))))


def test_modules_are_called_as_in_named_modules() -> None:
    """In all three roles, each Linear once per role, its weight under its name in ``named_parameters``."""
    model = Nested()
    linears = sorted(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    for role in ("fprop", "dgrad", "wgrad"):
        torch._dynamo.reset()
        found = [s for s in sites(model, normal(32, 32)) if s.role == role]
        assert sorted(s.module for s in found) == linears
        assert all(s.weight == f"{s.module}.weight" and s.module_class == "Linear" for s in found)


def test_matmuls_of_a_transformer_are_all_named() -> None:
    model = ByteGPT(layers=2)
    tokens = torch.randint(0, 256, (2, 32))
    found = sites(model, tokens, tokens)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {s.module for s in found if s.kind == "linear"} == linears
    assert {s.module for s in found if s.kind != "linear"} == {"blocks.0", "blocks.1"}


def test_root_and_functions() -> None:
    """A bare Linear is the root; a function that calls modules of a list names them by their place in it."""
    assert {s.module for s in sites(nn.Linear(32, 32), normal(32, 32))} == {""}
    torch._dynamo.reset()
    layers = [nn.Linear(32, 32), nn.Linear(32, 32)]
    assert {s.module for s in sites(lambda x: layers[1](layers[0](x)), normal(32, 32))} == {"0", "1"}


def test_module_used_twice_has_two_sites_per_role_under_one_name() -> None:
    model = Tied()
    found = sites(model, torch.randint(0, 64, (2, 32)))
    assert sorted(s.role for s in found if s.module == "shared") == [
        "dgrad",
        "dgrad",
        "fprop",
        "fprop",
        "wgrad",
        "wgrad",
    ]
    assert {s.weight for s in found if s.module == "shared"} == {"shared.weight"}


def test_tied_weight_keeps_the_module_that_multiplies_it() -> None:
    """The head shares the embedding's parameter: its sites are the head's, and carry the trait."""
    found = [s for s in sites(Tied(), torch.randint(0, 64, (2, 32))) if s.module == "head"]
    assert sorted(s.role for s in found) == ["dgrad", "fprop", "wgrad"]
    for site in found:
        assert site.traits == {"tied_embedding"}
        assert site.weight in ("embedding.weight", "head.weight")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self'].layers[0].fc", "layers.0.fc"),
        ("L['model']._modules['layers']._modules['0'].fc", "layers.0.fc"),
        ("L['self']._modules['heads']._modules['a-b']._parameters['weight']", "heads.a-b.weight"),
        ("L['self']._buffers['scale']", "scale"),
        ("L['self']", ""),
        ("G['model'].fc", "fc"),
        ("layers.0.fc", "layers.0.fc"),
        ("", ""),
    ],
)
def test_qualified_name(path: str, name: str) -> None:
    assert qualified_name(path) == name


# --- Forms of a matmul ------------------------------------------------------------------------------------------------

FORMS = {
    "x @ w": (lambda x, w: x @ w, (64, 32), (48, 64)),
    "x @ w of three dimensions": (lambda x, w: x @ w, (64, 32), (3, 16, 64)),
    "F.linear": (lambda x, w: F.linear(x, w), (32, 64), (2, 3, 8, 64)),
    "w @ x": (lambda x, w: w @ x, (32, 64), (64, 48)),
    "einsum": (lambda x, w: torch.einsum("bi,oi->bo", x, w), (32, 64), (48, 64)),
    "einsum with heads": (lambda x, w: torch.einsum("bti,hio->bhto", x, w), (4, 64, 32), (3, 16, 64)),
    "torch.mm": (lambda x, w: torch.mm(x, w), (64, 32), (48, 64)),
    "torch.addmm": (lambda x, w: torch.addmm(x[:, :32], x, w, alpha=2, beta=0.5), (64, 32), (48, 64)),
    "torch.bmm": (lambda x, w: torch.bmm(x, w), (3, 64, 32), (3, 16, 64)),
    "torch.baddbmm": (lambda x, w: torch.baddbmm(x[..., :32], x, w, beta=2), (3, 64, 32), (3, 16, 64)),
    "torch.matmul": (lambda x, w: torch.matmul(x, w), (3, 64, 32), (3, 16, 64)),
    "torch.tensordot": (lambda x, w: torch.tensordot(x, w, dims=1), (64, 32), (48, 64)),
    "F.conv2d 1x1": (lambda x, w: F.conv2d(x, w), (32, 64, 1, 1), (2, 64, 4, 6)),
    "F.conv1d 1": (lambda x, w: F.conv1d(x, w), (32, 64, 1), (2, 64, 24)),
    "transposed weight": (lambda x, w: x @ w.t().contiguous().t(), (64, 32), (48, 64)),
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_way_to_write_a_linear_layer_is_found_in_three_roles(form: str) -> None:
    """Whatever operator it becomes: a linear fprop, dgrad and wgrad of the same number of FLOPs."""
    function, weight, data = FORMS[form]
    found = sites(Weight(function, *weight), normal(*data))
    assert sorted(s.role for s in found) == ["dgrad", "fprop", "wgrad"]
    assert {s.kind for s in found} == {"linear"}
    assert len({s.flops for s in found}) == 1
    for site in found:
        assert set(site.operands) == set(OPERANDS[site.role])


def test_attention_in_modules_is_found_with_its_projections() -> None:
    """nn.MultiheadAttention: projections are linear, its inner products are one attention operator or two products."""

    class Attention(nn.Module):
        def __init__(self, need_weights: bool) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(64, 4, batch_first=True)
            self.need_weights = need_weights

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, x, x, need_weights=self.need_weights)[0]

    for need_weights, kind, number in ((False, "attention", 2), (True, "product", 6)):
        torch._dynamo.reset()
        found = sites(Attention(need_weights), normal(2, 16, 64))
        assert sorted(s.role for s in found if s.kind == "linear") == sorted(["fprop", "dgrad", "wgrad"] * 2)
        assert [s.kind for s in found if s.kind != "linear"] == [kind] * number
        assert {s.module for s in found} <= {"inner", "inner.out_proj"}


def test_buffers_are_weights_without_a_wgrad() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(64, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.table

    assert [(s.role, s.kind, s.weight) for s in sites(Buffered(), normal(16, 64))] == [
        ("fprop", "linear", "table"),
        ("dgrad", "linear", "table"),
    ]


# --- What is kept -----------------------------------------------------------------------------------------------------


def grouped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor([8, 8, 32], dtype=torch.int32)
    return torch._grouped_mm(x.bfloat16(), w.bfloat16(), offs=offsets)


KEPT = {
    "mm of activations": (lambda x: x @ x.t(), (32, 64), {"product": 3}),
    "bmm of activations": (lambda x: x @ x.mT, (2, 32, 64), {"product": 3}),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (1, 2, 32, 64), {"attention": 2}),
    "convolution": (Weight(lambda x, w: F.conv2d(x, w), 8, 4, 3, 3), (2, 4, 8, 8), {"convolution": 2}),
    "matrix times vector": (Weight(lambda x, w: w @ x, 32, 64), (64,), {"vector": 2}),
    "weight times weight": (Weight(lambda x, w: x @ (w @ w), 64, 64), (32, 64), {"constant": 3, "linear": 3}),
    "integers": (
        lambda x: torch._int_mm(x.to(torch.int8), x.to(torch.int8)).float() + x.sum(),
        (32, 32),
        {"integer": 1},
    ),
    "experts": (Weight(grouped, 3, 64, 64), (32, 64), {"linear": 2, "ragged": 1}),
}


@pytest.mark.parametrize("case", sorted(KEPT))
def test_what_is_no_linear_layer_is_found_and_kept_with_its_reason(case: str) -> None:
    """In the forward and in the backward; gradients of a product are products, not a linear layer's GEMMs."""
    model, shape, expected = KEPT[case]
    (context,) = contexts(model, normal(*shape))
    kinds = [found.site.kind for found in context.matmuls]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == expected
    for found in context.matmuls:
        assert found.decision is not None
        assert found.decision.fp8 == (found.site.kind == "linear")
        if not found.decision.fp8:
            assert found.decision.reason == SENSITIVE_KINDS[found.site.kind]


def test_scaled_matmuls_of_the_user_are_left_alone() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        data, one = x.to(torch.float8_e4m3fn), torch.ones(())
        return torch._scaled_mm(data, data.t(), one, one, out_dtype=torch.float32)

    x = normal(32, 32, requires_grad=False)
    (context,) = contexts(scaled, x)
    assert [found.site.kind for found in context.matmuls] == ["scaled"]
    assert torch.equal(compile_fp8(scaled)(x), scaled(x))


def test_elementwise_models_have_no_sites() -> None:
    assert sites(lambda x: torch.tanh(x).sum(-1) * x.mean(), normal(8, 8)) == []


def test_matmuls_inside_cond_are_reported_once_with_a_reason() -> None:
    """Both branches, forward and backward, none rewritten, none twice: 2 forward and 4 backward GEMMs."""

    def branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda w, x: x @ w, lambda w, x: (x @ w) * 2, (w, x))

    found = [f for c in contexts(Weight(branches, 64, 32), normal(16, 64)) for f in c.matmuls]
    assert {f.site.kind for f in found} == {"opaque"}
    assert len(found) == 6
    assert {f.decision.reason for f in found if f.decision} == {SENSITIVE_KINDS["opaque"]}


def test_matmuls_beside_cond_are_rewritten_and_the_result_is_right() -> None:
    """A Linear before a cond runs in FP8; what the branches compute is exact, given its output."""
    linear = nn.Linear(64, 64)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        return torch.cond(y.sum() > 1e9, lambda y: y + 1, lambda y: y * 2, (y,))

    x = normal(16, 64, requires_grad=False)
    with torch.no_grad():
        (context,) = contexts(model, x)
        assert [(f.site.role, bool(f.decision and f.decision.fp8)) for f in context.matmuls] == [("fprop", True)]
        error = (compile_fp8(model)(x) - 2 * linear(x)).norm() / (2 * linear(x)).norm()
    assert error < 0.05


# --- Traits -----------------------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Layers with meaningless names, so that only the dataflow tells what they are for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weights, _ = torch.softmax(self.a(x), -1).topk(4)
        y = torch.tanh(self.b(x)) * weights.sum(-1, keepdim=True)
        return F.cross_entropy(self.c(y), targets)


def test_traits_come_from_what_reads_the_result() -> None:
    """topk of a softmax: a router. Cross entropy: logits. All three roles of a layer carry them; others have none."""
    found = sites(Routed(), normal(32, 64), torch.randint(0, 64, (32,)))
    traits = {module: {s.traits for s in found if s.module == module} for module in "abc"}
    assert traits == {"a": {frozenset({"router"})}, "b": {frozenset()}, "c": {frozenset({"logits"})}}


def test_ordinary_layers_have_no_traits() -> None:
    assert {s.traits for s in sites(Block(), normal(2, 16, 64))} == {frozenset()}


# --- Collectives ------------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A group of two of which only this process is real."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_collectives_are_found_with_shape_dtype_and_group(group: dist.ProcessGroup) -> None:
    """Sequence parallelism: all-gather before, reduce-scatter behind the layers, and their mirror images backward."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = collectives.all_gather_tensor_autograd(x, 0, group)
            y = self.down(torch.tanh(self.up(x)))
            return collectives.reduce_scatter_tensor_autograd(y, "sum", 0, group)

    (context,) = contexts(Parallel(), normal(32, 64))
    found: list[CollectiveSite] = [c.site for c in context.collectives]
    assert [(c.op, c.shape) for c in found] == [
        ("all_gather_into_tensor", (32, 64)),
        ("reduce_scatter_tensor", (64, 64)),
        ("all_gather_into_tensor", (32, 64)),
        ("reduce_scatter_tensor", (64, 64)),
    ]
    assert {c.dtype for c in found} == {torch.float32}
    assert {c.group for c in found} == {group.group_name}
    assert all(c.decision is not None and not c.decision.fp8 and c.decision.reason for c in context.collectives)
    assert len(context.matmuls) == 6


def test_collectives_appear_in_the_report(group: dist.ProcessGroup) -> None:
    layer = nn.Linear(64, 64)
    with fp8.collect_reports() as report, torch.no_grad():
        compile_fp8(lambda x: collectives.all_reduce(layer(x), "sum", group))(normal(32, 64))
    (row,) = [row for row in report.rows if row.role == "collective"]
    assert (row.op, row.shape, row.fp8) == ("all_reduce", "32×64", False)
    assert row.reason
    assert "all_reduce" in str(report)
