"""Restore decompositions: give kept matmuls back to Inductor as it would have traced them.

Inductor decomposes some small matmuls while the graph is traced, by rules that differ between CPU and GPU. We trace
without those rules, so that every matmul is seen and the graph is the same on every machine
(:func:`tracing_decompositions`), and apply them afterwards to the matmuls that stay.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
import torch.utils._pytree as pytree
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile.passes.builder import INHERITED
from fp8compile.passes.context import PassContext, PassRecord
from fp8compile.passes.dataflow import value

aten = torch.ops.aten

WITHHELD = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
)


class _TracingDecompositions(dict[Any, Any]):
    """Pickles as a reference to what makes it: Inductor's cache key contains the table, whose functions do not pickle.
    That Inductor's own table is the same is in Inductor's key, the rest in our passes'."""

    def __reduce__(self) -> Any:
        return tracing_decompositions, ()


def tracing_decompositions() -> dict[Any, Any]:
    """Inductor's decompositions without those of matmuls."""
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    return _TracingDecompositions({op: rule for op, rule in table.items() if op not in WITHHELD})


def restore_decompositions(graph: torch.fx.Graph, context: PassContext, record: PassRecord) -> None:
    """Decompose the matmuls that remain, where Inductor has a rule for their shape."""
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    for node in list(graph.nodes):
        rule = table.get(node.target) if node.op == "call_function" and node.target in WITHHELD else None
        if rule is None or not _applies(rule, node):
            record.skipped["no rule for its shape"] += rule is not None
            continue
        record.matched += 1
        _inline(graph, node, table)


def _applies(rule: Any, node: torch.fx.Node) -> bool:
    args, kwargs = pytree.tree_map_only(torch.fx.Node, value, (node.args, node.kwargs))
    with value(node).fake_mode:
        return rule(*args, **kwargs) is not NotImplemented


def _inline(graph: torch.fx.Graph, node: torch.fx.Node, table: dict[Any, Any]) -> None:
    """Replace ``node`` by its decomposition."""
    nodes = node.all_input_nodes

    def decomposed(*values: Any) -> Any:
        bound = dict(zip(nodes, values, strict=True))
        args, kwargs = pytree.tree_map_only(torch.fx.Node, bound.__getitem__, (node.args, node.kwargs))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with value(node).fake_mode:
        traced = make_fx(decomposed, decomposition_table=table)(*map(value, nodes))
    environment: dict[torch.fx.Node, Any] = {}
    sources = iter(nodes)
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                environment[inner] = next(sources)
            elif inner.op == "output":
                result = environment[inner.args[0]]
            else:
                environment[inner] = graph.node_copy(inner, environment.__getitem__)
                environment[inner].meta.update({key: node.meta[key] for key in INHERITED if key in node.meta})
    node.replace_all_uses_with(result)
    graph.erase_node(node)
