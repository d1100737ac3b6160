"""Verify: every rule fires on a graph that is broken on purpose, and none on what the passes make."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, compile_fp8, normal
from torch.fx import Graph, Node

import fp8compile as fp8
from fp8compile import Policy
from fp8compile.hardware import CHIPS
from fp8compile.ops import BLOCK_SCALED_MM, COMPUTE_SCALE, QUANTIZE, QUANTIZE_BLOCK, QUANTIZE_TRANSPOSED, SCALED_MM
from fp8compile.passes import PassContext, PassRecord, VerificationError, run_passes
from fp8compile.passes.verify import RULES, verify
from fp8compile.recipe import E4M3, E5M2, RECIPES

aten = torch.ops.aten


def context() -> PassContext:
    return PassContext(Policy.all(), RECIPES["rowwise"], CHIPS["h100"], ())


def call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
    return node


def placeholder(graph: Graph, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return node


def sound_graph() -> tuple[Graph, dict[str, Node]]:
    """x @ wᵀ with rowwise scales, as the passes write it."""
    graph = Graph()
    x, w = placeholder(graph, "x", 48, 64), placeholder(graph, "w", 32, 64)
    scale_x, scale_w = (call(graph, COMPUTE_SCALE, t, [1], E4M3, False) for t in (x, w))
    a, b = (call(graph, QUANTIZE, t, s, E4M3, False, [1, 1]) for t, s in ((x, scale_x), (w, scale_w)))
    out = call(graph, SCALED_MM, a, b, scale_x, scale_w, None, torch.bfloat16, False)
    graph.output(out)
    return graph, {"x": x, "w": w, "scale_x": scale_x, "scale_w": scale_w, "a": a, "b": b, "out": out}


def retype(node: Node, *shape: int, dtype: torch.dtype | None = None) -> None:
    old = node.meta["val"]
    node.meta["val"] = torch.empty(shape or old.shape, dtype=dtype or old.dtype, device="meta")


def test_sound_graph_passes() -> None:
    graph, _ = sound_graph()
    record = PassRecord("verify")
    verify(graph, context(), record)
    assert record.matched > len(RULES)


# --- One way to break each rule ---------------------------------------------------------------------------------------


def without_value(graph: Graph, nodes: dict[str, Node]) -> None:
    del nodes["scale_x"].meta["val"]


def read_by_arithmetic(graph: Graph, nodes: dict[str, Node]) -> None:
    with graph.inserting_after(nodes["a"]):
        graph.call_function(aten.add.Tensor, (nodes["a"], 1))


def half_precision_scale(graph: Graph, nodes: dict[str, Node]) -> None:
    retype(nodes["scale_x"], dtype=torch.bfloat16)


def scale_of_another_tensor(graph: Graph, nodes: dict[str, Node]) -> None:
    nodes["a"].args = (nodes["x"], nodes["scale_w"], *nodes["a"].args[2:])


def quantized_to_half(graph: Graph, nodes: dict[str, Node]) -> None:
    retype(nodes["a"], dtype=torch.float16)


def e5m2_on_both_sides(graph: Graph, nodes: dict[str, Node]) -> None:
    retype(nodes["a"], dtype=E5M2)
    retype(nodes["b"], dtype=E5M2)


def high_precision_operand(graph: Graph, nodes: dict[str, Node]) -> None:
    nodes["out"].args = (nodes["x"], *nodes["out"].args[1:])


def different_contractions(graph: Graph, nodes: dict[str, Node]) -> None:
    retype(nodes["b"], 32, 48)


def unaligned_contraction(graph: Graph, nodes: dict[str, Node]) -> None:
    retype(nodes["a"], 48, 60)
    retype(nodes["b"], 32, 60)


def unaligned_columns(graph: Graph, nodes: dict[str, Node]) -> None:
    retype(nodes["b"], 30, 64)


def transposed_operand(graph: Graph, nodes: dict[str, Node]) -> None:
    nodes["b"].meta["val"] = torch.empty(64, 32, dtype=E4M3, device="meta").t()


def swapped_scales(graph: Graph, nodes: dict[str, Node]) -> None:
    a, b, scale_a, scale_b, *rest = nodes["out"].args
    nodes["out"].args = (a, b, scale_b, scale_a, *rest)


def scale_along_the_rows(graph: Graph, nodes: dict[str, Node]) -> None:
    retype(nodes["scale_x"], 1, 64)


def transposed_with_scales_along_the_columns(graph: Graph, nodes: dict[str, Node]) -> None:
    with graph.inserting_after(nodes["a"]):
        scale = call(graph, COMPUTE_SCALE, nodes["x"], [0], E4M3, True)
    with graph.inserting_after(scale):
        both = graph.call_function(QUANTIZE_TRANSPOSED, (nodes["x"], scale, E4M3, [1, 1]))
    both.meta["val"] = (torch.empty(64, 48, dtype=E4M3, device="meta"), torch.empty(1, 1, device="meta"))


def transposed_data_read_by_arithmetic(graph: Graph, nodes: dict[str, Node]) -> None:
    with graph.inserting_after(nodes["a"]):
        both = call(graph, QUANTIZE_TRANSPOSED, nodes["x"], nodes["scale_x"], E4M3, [1, 1])
    with graph.inserting_after(both):
        data = call(graph, operator.getitem, both, 0)
    with graph.inserting_after(data):
        graph.call_function(aten.add.Tensor, (data, 1))


def scale_without_dimensions(graph: Graph, nodes: dict[str, Node]) -> None:
    a, b, _, scale_b, *rest = nodes["out"].args
    with graph.inserting_before(nodes["a"]):
        one = graph.call_function(aten.full.default, ([], 1.0))
    one.meta["val"] = torch.empty((), device="meta")
    nodes["out"].args = (a, b, one, scale_b, *rest)


def block_along_the_rows(graph: Graph, nodes: dict[str, Node]) -> None:
    with graph.inserting_after(nodes["a"]):
        call(graph, QUANTIZE_BLOCK, nodes["x"], [128, 1], E4M3, False, False, [1, 1])


def block_scales_of_other_rows(graph: Graph, nodes: dict[str, Node]) -> None:
    with graph.inserting_before(nodes["out"]):
        scale = placeholder(graph, "scale", 47, 1, dtype=torch.float32)
        call(graph, BLOCK_SCALED_MM, nodes["a"], nodes["b"], nodes["scale_x"], nodes["scale_w"], None, torch.bfloat16)
        broken = graph.call_function(
            BLOCK_SCALED_MM, (nodes["a"], nodes["b"], scale, nodes["scale_w"], None, torch.float32)
        )
        broken.meta["val"] = nodes["out"].meta["val"]


BROKEN: list[tuple[Callable[[Graph, dict[str, Node]], None], str, str]] = [
    (without_value, "has_value", "no meta['val']"),
    (read_by_arithmetic, "only_gemms_read_fp8", "read by add"),
    (transposed_with_scales_along_the_columns, "has_a_scale_per_row", "(1, 64) is not one number per row"),
    (transposed_data_read_by_arithmetic, "only_gemms_read_fp8", "read by add"),
    (block_along_the_rows, "block_lies_along_the_contraction", "[128, 1] has 1 along the contraction"),
    (block_scales_of_other_rows, "block_scales_match_operands", "scale of a is (47, 1), its data (48, 64)"),
    (half_precision_scale, "scale_is_float32", "torch.bfloat16"),
    (half_precision_scale, "scale_fits", "torch.bfloat16"),
    (scale_of_another_tensor, "scale_fits", "(32, 1) does not broadcast to (48, 64)"),
    (quantized_to_half, "quantizes_to_fp8", "torch.float16"),
    (e5m2_on_both_sides, "operands_are_fp8", "E5M2 by E5M2"),
    (high_precision_operand, "operands_are_fp8", "torch.bfloat16"),
    (different_contractions, "contractions_agree", "64 against 48"),
    (unaligned_contraction, "is_aligned", "K=60 is not a multiple of 16"),
    (unaligned_columns, "is_aligned", "N=30 is not a multiple of 16"),
    (transposed_operand, "operands_are_k_major", "operand b has stride 32"),
    (swapped_scales, "scales_match_operands", "scale of a has 32 rows, its data 48"),
    (scale_along_the_rows, "scales_match_operands", "scale of a is (1, 64)"),
    (scale_without_dimensions, "scales_match_operands", "scale of a is ()"),
]


@pytest.mark.parametrize(("break_it", "rule", "complaint"), BROKEN)
def test_rule_fires_and_says_where_and_what(break_it: Any, rule: str, complaint: str) -> None:
    graph, nodes = sound_graph()
    break_it(graph, nodes)
    with pytest.raises(VerificationError) as caught:
        verify(graph, context(), PassRecord("verify"))
    lines = str(caught.value).splitlines()[1:]
    assert any(f"({rule}): " in line and complaint in line for line in lines), lines


def test_every_rule_has_a_graph_that_breaks_it() -> None:
    assert {rule for _, rule, _ in BROKEN} == {rule.__name__.strip("_") for _, rule in RULES}


def test_all_complaints_are_listed_not_only_the_first() -> None:
    graph, nodes = sound_graph()
    read_by_arithmetic(graph, nodes)
    unaligned_columns(graph, nodes)
    with pytest.raises(VerificationError) as caught:
        verify(graph, context(), PassRecord("verify"))
    assert "only_gemms_read_fp8" in str(caught.value)
    assert "is_aligned" in str(caught.value)


# --- Where it stands in the pipeline ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_what_the_passes_make_is_sound_after_each_of_them(recipe: str) -> None:
    with fp8.collect_reports() as report:
        compile_fp8(Block(), recipe=recipe)(normal(2, 16, 64)).sum().backward()
    names = [entry["pass"] for entry in report.graphs[0].passes]
    passes = [name for name in names if name != "verify"]
    assert names == [name for pass_name in passes for name in (pass_name, "verify")]
    assert {"find_sites", "decide", "quantize"} <= set(passes)


def test_broken_pass_is_caught_behind_itself_if_verification_is_on_and_only_then() -> None:
    def breaks(graph: Graph, context: PassContext, record: PassRecord) -> None:
        (gemm,) = [node for node in graph.nodes if node.target is SCALED_MM]
        gemm.args = (gemm.args[1], gemm.args[0], *gemm.args[2:])

    def never(graph: Graph, context: PassContext, record: PassRecord) -> None:
        raise AssertionError("runs behind a broken pass")

    graph, _ = sound_graph()
    with pytest.raises(VerificationError, match="scales_match_operands"):
        run_passes([breaks, never], graph, context(), check=True)
    graph, _ = sound_graph()
    run_passes([breaks], graph, context(), check=False)


def test_error_reaches_whoever_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``verify`` on, a rule that is broken stops the compilation with its message; with it off nothing does."""

    def unhappy(node: Node, chip: Any) -> str:
        return "on principle"

    model, x = torch.nn.Linear(64, 32), normal(48, 64)
    monkeypatch.setattr(sys.modules["fp8compile.passes.verify"], "RULES", [(SCALED_MM, unhappy)])
    with pytest.raises(Exception, match=r"\(unhappy\): on principle"):
        compile_fp8(model)(x)
    torch._dynamo.reset()
    assert compile_fp8(model, verify=False)(x).shape == (48, 32)
