"""Pointwise convolutions: write a 1x1 convolution as the matmul that it is, where that matmul would run in FP8."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from fp8compile.passes.builder import Builder
from fp8compile.passes.context import FoundMatmul, PassContext, PassRecord
from fp8compile.passes.dataflow import HIGH_PRECISION, is_dynamic, size_hint, value
from fp8compile.passes.decide import cannot_run, gemm_gain
from fp8compile.passes.find_sites import module_of
from fp8compile.recipe import OPERANDS, Role
from fp8compile.site import MatmulSite

aten = torch.ops.aten


def pointwise_convolutions(graph: torch.fx.Graph, context: PassContext, record: PassRecord) -> None:
    """Rewrite convolutions with a kernel of one element, and their backwards, to matmuls that ``find_sites`` finds."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in REWRITES:
            continue
        if reason := _not_pointwise(node):
            record.skipped[reason] += 1
        elif not any(_would_run(node, role, context) for role in ROLES_OF[node.target]):
            record.skipped["would not run in FP8"] += 1
        else:
            REWRITES[node.target](graph, node)
            record.matched += 1


ROLES_OF: dict[Any, tuple[Role, ...]] = {
    aten.convolution.default: ("fprop",),
    aten.convolution_backward.default: ("dgrad", "wgrad"),
}


def _arguments(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node, tuple[Any, ...]]:
    """-> input, weight, (stride, padding, dilation, transposed, output padding, groups)"""
    first = 0 if node.target is aten.convolution.default else 1
    settings = 3 if node.target is aten.convolution.default else 4
    return node.args[first], node.args[first + 1], tuple(node.args[settings : settings + 6])  # type: ignore[return-value]


def _not_pointwise(node: torch.fx.Node) -> str | None:
    _, weight, (stride, padding, _, transposed, _, groups) = _arguments(node)
    if any(size != 1 for size in value(weight).shape[2:]):
        return "kernel larger than one element"
    if transposed or groups != 1:
        return "transposed or in groups"
    if any(s != 1 for s in stride) or any(p != 0 for p in padding):
        return "strided or padded"
    return None


def _would_run(node: torch.fx.Node, role: Role, context: PassContext) -> bool:
    """Whether the policy wants this GEMM in FP8, the target can run it, and, if it must gain, it gains by itself."""
    x, weight, _ = _arguments(node)
    out_features, in_features = value(weight).shape[:2]
    pixels = value(x).numel() // in_features
    sizes = {
        "fprop": (pixels, out_features, in_features),
        "dgrad": (pixels, in_features, out_features),
        "wgrad": (out_features, in_features, pixels),
    }[role]
    module, module_class = module_of(node)
    m, n, k = sizes
    site = MatmulSite(
        name=node.name,
        op="convolution",
        kind="linear",
        role=role,
        module=module,
        module_class=module_class,
        weight=None,
        operands=OPERANDS[role],
        batch=1,
        m=size_hint(m),
        n=size_hint(n),
        k=size_hint(k),
        dynamic=frozenset(key for key, size in zip("mnk", sizes, strict=True) if is_dynamic(size)),
        dtypes=(value(x).dtype, value(weight).dtype),
        out_dtype=value(x).dtype,
    )
    decision = context.ask_policy(site)
    found = FoundMatmul(site, node, x, weight, decision=decision)
    if found.gemm is None or cannot_run(found, context.chip) or value(x).dtype not in HIGH_PRECISION:
        return False
    own_casts = context.chip.memory_seconds((site.m + site.n) * site.k * (1 + value(x).dtype.itemsize), launches=2)
    return not decision.if_faster or gemm_gain(site, context.chip) > own_casts


def _rewrite_forward(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    x, weight, _ = _arguments(node)
    bias = node.args[2]
    build = Builder(graph, node, before=node)
    rows, columns = _pixels(build, x), _matrix(build, weight)
    transposed = build.call(aten.permute.default, columns, [1, 0])
    if isinstance(bias, torch.fx.Node):
        out = build.call(aten.addmm.default, bias, rows, transposed)
    else:
        out = build.call(aten.mm.default, rows, transposed)
    _substitute(graph, node, _image(build, out, x, node))


def _rewrite_backward(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    x, weight, _ = _arguments(node)
    grad: torch.fx.Node = node.args[0]  # type: ignore[assignment]
    results: dict[Any, torch.fx.Node] = {user.args[1]: user for user in node.users}
    build = Builder(graph, node, before=node)
    rows = _pixels(build, grad)
    if 0 in results:
        out = build.call(aten.mm.default, rows, _matrix(build, weight))
        _substitute(graph, results[0], _image(build, out, x, results[0]))
    if 1 in results:
        out = build.call(aten.mm.default, build.call(aten.permute.default, rows, [1, 0]), _pixels(build, x))
        _substitute(graph, results[1], build.call(aten.view.default, out, list(value(weight).shape)))
    if 2 in results:
        _substitute(graph, results[2], build.call(aten.sum.dim_IntList, rows, [0]))
    if not node.users:
        graph.erase_node(node)


REWRITES: dict[Any, Any] = {
    aten.convolution.default: _rewrite_forward,
    aten.convolution_backward.default: _rewrite_backward,
}


def _matrix(build: Builder, weight: torch.fx.Node) -> torch.fx.Node:
    """A kernel ``[O, I, 1, ...]`` as ``[O, I]``."""
    return build.call(aten.view.default, weight, list(value(weight).shape[:2]))


def _pixels(build: Builder, x: torch.fx.Node) -> torch.fx.Node:
    """An image ``[N, C, *S]`` as rows ``[N·S, C]``."""
    rank = value(x).dim()
    last = build.call(aten.permute.default, x, [0, *range(2, rank), 1])
    return build.call(aten.reshape.default, last, [-1, value(x).shape[1]])


def _image(build: Builder, rows: torch.fx.Node, like: torch.fx.Node, old: torch.fx.Node) -> torch.fx.Node:
    """Rows ``[N·S, C]`` as an image ``[N, C, *S]`` with the sizes of ``like`` and the strides of ``old``."""
    sizes = value(like).shape
    kept = [0, *range(2, len(sizes))]
    shape = [
        s if isinstance(s, int) else build.call(aten.sym_size.int, like, d) for d, s in ((d, sizes[d]) for d in kept)
    ]
    image = build.call(aten.view.default, rows, [*shape, value(rows).shape[1]])
    image = build.call(aten.permute.default, image, [0, len(sizes) - 1, *range(1, len(sizes) - 1)])
    if value(old).stride() == value(image).stride():
        return image
    return build.call(aten.clone.default, image, memory_format=torch.contiguous_format)


def _substitute(graph: torch.fx.Graph, old: torch.fx.Node, new: torch.fx.Node) -> None:
    old.replace_all_uses_with(new)
    graph.erase_node(old)
