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
    casts: dict[Any, dict[bool, torch.fx.Node]] = collections.defaultdict(dict)
    for node in graph.nodes:
        if node.target is not ops.QUANTIZE_BLOCK or value(node.args[0]).device.type == "cpu":
            continue
        x, block, dtype, power_of_two, transpose, _ = node.args
        if reason := _cannot_fuse(value(x)):
            record.skipped[reason] += 1
        elif transpose not in (found := casts[x, 1 not in block, dtype, power_of_two]):
            found[transpose] = node
    for (x, square, dtype, power_of_two), found in casts.items():
        _fuse(graph, x, square, dtype, power_of_two, found)
        record.matched += len(found)
    if record.matched:
        graph.lint()


def _cannot_fuse(x: torch.Tensor) -> str | None:
    if not all(isinstance(size, int) for size in x.shape):
        return "its size is dynamic"
    if not statically_known_true(x.stride(1) == 1):
        return "its rows are not contiguous"
    return None


def _fuse(
    graph: torch.fx.Graph,
    x: torch.fx.Node,
    square: bool,
    dtype: torch.dtype,
    power_of_two: bool,
    by_layout: dict[bool, torch.fx.Node],
) -> None:
    """One launch before the first of the casts, which are as the matrix lies and transposed."""
    from fp8compile.kernels.quantize_block import launch_quantize_block

    multiples = [tuple(by_layout[layout].args[5]) if layout in by_layout else None for layout in (False, True)]  # type: ignore[arg-type]
    first = min(by_layout.values())
    build = Builder(graph, first, before=first)
    made = build.inline(launch_quantize_block, x, dtype, power_of_two, square, *multiples)
    for layout, node in by_layout.items():
        for part in list(node.users):
            new = made[2 * layout + part.args[1]]  # type: ignore[operator]
            part.replace_all_uses_with(new)
            graph.erase_node(part)
        graph.erase_node(node)
