"""Fuse block casts: on a GPU, one read of a matrix for its scales and for both layouts of its FP8 data.

Inductor makes a reduction and a cast of each layout, which read the matrix four times where our kernel reads it once.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile import ops
from fp8compile.passes.builder import Builder
from fp8compile.passes.context import PassContext, PassRecord
from fp8compile.passes.dataflow import value


def fuse_block_casts(graph: torch.fx.Graph, context: PassContext, record: PassRecord) -> None:
    """Replace the casts of a matrix to FP8 with scales for blocks by one launch of our kernel."""
    casts: dict[Any, list[torch.fx.Node]] = collections.defaultdict(list)
    for node in graph.nodes:
        if node.target is not ops.QUANTIZE_BLOCK or value(node).device.type == "cpu":
            continue
        if reason := _cannot_fuse(node):
            record.skipped[reason] += 1
        else:
            x, scale, block, dtype = node.args[:4]
            casts[x, 1 not in block, dtype, scale.args[3]].append(node)
    for (x, square, dtype, power_of_two), nodes in casts.items():
        _fuse(graph, x, square, dtype, power_of_two, nodes)
        record.matched += len(nodes)
    if record.matched:
        graph.lint()


def _cannot_fuse(node: torch.fx.Node) -> str | None:
    x, scale, block, _, transpose, _ = node.args
    assert isinstance(x, torch.fx.Node)
    assert isinstance(scale, torch.fx.Node)
    if scale.target is not ops.COMPUTE_BLOCK_SCALE or scale.args[:2] != (x, block):
        return "its scales were computed elsewhere"
    if not all(isinstance(size, int) for size in value(x).shape):
        return "its size is dynamic"
    if not statically_known_true(value(x).stride(1) == 1):
        return "its rows are not contiguous"
    if 1 in block and transpose != (block[1] == 1):  # type: ignore[operator, index]
        return "its scales do not lie along the contraction"
    return None


def _fuse(
    graph: torch.fx.Graph,
    x: torch.fx.Node,
    square: bool,
    dtype: torch.dtype,
    power_of_two: bool,
    nodes: list[torch.fx.Node],
) -> None:
    """Before the first of ``nodes``, which differ in their layout, but for padding."""
    from fp8compile.kernels.quantize_block import launch_quantize_block

    by_layout = {bool(node.args[4]): node for node in reversed(nodes)}
    wanted = [tuple(by_layout[layout].args[5]) if layout in by_layout else None for layout in (False, True)]  # type: ignore[arg-type]
    scales: dict[torch.fx.Node, bool] = {node.args[1]: layout for layout, node in by_layout.items()}  # type: ignore[misc]
    build = Builder(graph, nodes[0], before=min(scales))
    made = build.inline(launch_quantize_block, x, dtype, power_of_two, square, *wanted)
    for layout, node in by_layout.items():
        node.replace_all_uses_with(made[2 * layout])
        graph.erase_node(node)
    for scale, layout in scales.items():
        scale.replace_all_uses_with(made[2 * layout + 1])
        graph.erase_node(scale)
