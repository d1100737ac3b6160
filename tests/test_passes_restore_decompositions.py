"""Restore decompositions: kept matmuls end up as Inductor would have traced them, on every machine's own rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import compile_fp8, normal
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp8compile as fp8
from fp8compile import Policy
from fp8compile.hardware import CHIPS
from fp8compile.ops import SCALED_MM
from fp8compile.passes import PassContext, PassRecord
from fp8compile.passes.inductor_decompositions import WITHHELD, restore_decompositions, tracing_decompositions
from fp8compile.recipe import RECIPES

aten = torch.ops.aten

MATMULS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm with K = 1": (torch.mm, ((3, 1), (1, 4))),
    "mm with M = N = 1": (torch.mm, ((1, 64), (64, 1))),
    "mm with M = 1": (torch.mm, ((1, 64), (64, 32))),
    "mm": (torch.mm, ((48, 64), (64, 32))),
    "addmm with K = 1": (torch.addmm, ((4,), (3, 1), (1, 4))),
    "addmm with M = N = 1": (torch.addmm, ((1,), (1, 64), (64, 1))),
    "addmm": (torch.addmm, ((32,), (48, 64), (64, 32))),
    "bmm with M = 1": (torch.bmm, ((2, 1, 64), (2, 64, 32))),
    "bmm with N = 1": (torch.bmm, ((2, 8, 64), (2, 64, 1))),
    "bmm": (torch.bmm, ((2, 8, 16), (2, 16, 8))),
    "mv": (torch.mv, ((32, 64), (64,))),
    "addmv": (torch.addmv, ((32,), (32, 64), (64,))),
    "dot": (torch.dot, ((64,), (64,))),
}


def traced(function: Callable[..., torch.Tensor], shapes: Any, table: Any) -> torch.fx.Graph:
    with FakeTensorMode():
        tensors = [torch.empty(shape) for shape in shapes]
    return make_fx(function, decomposition_table=table, tracing_mode="fake")(*tensors).graph


def operators(graph: torch.fx.Graph) -> list[str]:
    return [f"{node.target}{tuple(node.meta['val'].shape)}" for node in graph.nodes if node.op == "call_function"]


def restored(graph: torch.fx.Graph) -> PassRecord:
    record = PassRecord("restore_decompositions")
    restore_decompositions(graph, PassContext(Policy.none(), RECIPES["rowwise"], CHIPS["h100"], ()), record)
    graph.lint()
    return record


@pytest.mark.parametrize("name", sorted(MATMULS))
def test_kept_matmul_becomes_what_inductor_traces(name: str) -> None:
    """Operators and shapes equal those of a trace with Inductor's own table, for shapes with a rule and without."""
    function, shapes = MATMULS[name]
    graph = traced(function, shapes, tracing_decompositions())
    assert len([node for node in graph.nodes if node.target in WITHHELD]) == 1
    restored(graph)
    assert operators(graph) == operators(traced(function, shapes, select_decomp_table()))


@pytest.mark.parametrize("name", sorted(MATMULS))
def test_result_of_the_restored_graph_is_right(name: str) -> None:
    function, shapes = MATMULS[name]
    graph = traced(function, shapes, tracing_decompositions())
    restored(graph)
    tensors = [torch.randn(shape) for shape in shapes]
    out = torch.fx.GraphModule(nn.Module(), graph)(*tensors)
    torch.testing.assert_close(out, function(*tensors), rtol=1e-5, atol=1e-5)


def test_some_shapes_are_decomposed_and_some_are_not() -> None:
    """Otherwise the tests above would hold for a pass that does nothing, or for one that does too much."""
    counts = {}
    for name, (function, shapes) in MATMULS.items():
        graph = traced(function, shapes, tracing_decompositions())
        record = restored(graph)
        counts[name] = record.matched
        assert record.matched + record.skipped["no rule for its shape"] <= 1
    assert counts["mm"] == counts["addmm"] == 0
    assert counts["mm with M = N = 1"] == 1
    assert counts["mv"] == 1


def test_only_matmuls_are_withheld_from_tracing() -> None:
    """Everything else is decomposed as by Inductor."""
    full, ours = select_decomp_table(), tracing_decompositions()
    assert set(full) - set(ours) == set(full) & set(WITHHELD)
    assert all(ours[op] is full[op] for op in ours)


def test_inserted_nodes_belong_where_the_matmul_was() -> None:
    """They inherit the partitioner's tag and the module; each has a value."""
    graphs: list[torch.fx.Graph] = []
    with fp8.collect_reports(lambda report, before, after, context: graphs.append(after)):
        compile_fp8(nn.Linear(64, 1), policy="none")(normal(1, 64)).sum().backward()
    (graph,) = graphs
    computing = [node for node in graph.nodes if node.op == "call_function"]
    assert not any(node.target is aten.addmm.default for node in computing)
    for node in computing:
        assert node.meta["partitioner_tag"] in ("is_forward", "is_backward")
        assert "val" in node.meta


def test_matmuls_that_inductor_would_hide_are_sites() -> None:
    """M = N = 1 and K = 1 on tiny tensors: on a CPU they are multiplied and summed before anyone sees a matmul."""
    with fp8.collect_reports() as report:
        compile_fp8(nn.Linear(64, 1))(normal(1, 64)).sum().backward()
    assert sorted(row.role for row in report.rows) == ["dgrad", "fprop", "wgrad"]
    assert all(not row.fp8 and row.reason for row in report.rows)


def test_matmuls_in_fp8_are_not_touched() -> None:
    """A row of one token is a matmul in FP8, though Inductor's CPU rules would have decomposed it."""
    graphs: list[torch.fx.Graph] = []
    with fp8.collect_reports(lambda report, before, after, context: graphs.append(after)), torch.no_grad():
        compile_fp8(nn.Linear(64, 32))(normal(1, 64))
    assert [node.target for node in graphs[0].nodes].count(SCALED_MM) == 1
