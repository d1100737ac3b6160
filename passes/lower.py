"""Lower: turn our operators into what Inductor fuses and into the kernels of the device, in the post-grad graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile import formulas, ops
from fp8compile.passes.builder import Builder
from fp8compile.passes.context import PassContext, PassRecord
from fp8compile.passes.dataflow import value

aten = torch.ops.aten


def lower(graph: torch.fx.Graph, context: PassContext, record: PassRecord) -> None:
    """Replace every ``fp8compile::*`` node by its lowering."""
    for node in list(graph.nodes):
        lowering = LOWERINGS.get(node.target)
        if lowering is None:
            continue
        new = lowering(Builder(graph, node, before=node), *node.args)
        new.meta.update({key: item for key, item in node.meta.items() if key not in new.meta or key == "val"})
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        record.matched += 1
    if record.matched:
        graph.lint()


def _compute_scale(build: Builder, x: Any, dims: list[int], dtype: torch.dtype, power_of_two: bool) -> torch.fx.Node:
    return formulas.compute_scale(build.call, x, dims, dtype, power_of_two)


def _quantize(
    build: Builder, x: Any, scale: Any, dtype: torch.dtype, transpose: bool, multiples: list[int]
) -> torch.fx.Node:
    data = formulas.quantize(build.call, x, scale, dtype)
    if transpose:
        rank = value(data).dim()
        data = build.call(aten.permute.default, data, [*range(rank - 2), rank - 1, rank - 2])
    if amounts := _padding(build, data, multiples):
        raw = build.call(aten.view.dtype, data, torch.uint8)
        data = build.call(aten.view.dtype, build.call(aten.constant_pad_nd.default, raw, amounts, 0), dtype)
    return build.call(aten.clone.default, data, memory_format=torch.contiguous_format)


def _padding(build: Builder, data: torch.fx.Node, multiples: list[int]) -> list[Any]:
    """Arguments of ``constant_pad_nd`` that round the last two sizes up; empty if nothing is to be added."""
    rank = value(data).dim()
    amounts: list[Any] = []
    for dim, multiple in ((rank - 1, multiples[1]), (rank - 2, multiples[0])):
        size = value(data).shape[dim]
        if isinstance(size, int):
            amounts += [0, -size % multiple]
        else:
            symbol = build.call(aten.sym_size.int, data, dim)
            amounts += [0, build.call(operator.mod, build.call(operator.neg, symbol), multiple) if multiple > 1 else 0]
    return amounts if any(not isinstance(a, int) or a for a in amounts) else []


def _scaled_mm(
    build: Builder, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out_dtype: torch.dtype, fast: bool
) -> torch.fx.Node:
    rank = value(a).dim()
    if value(a).device.type == "cpu":
        return formulas.scaled_mm(build.call, a, b, scale_a, scale_b, bias, out_dtype, rank)
    if rank != 2:
        return build.call(ops.SCALED_MM, a, b, scale_a, scale_b, bias, out_dtype, fast)
    return _hopper_scaled_mm(build, a, b, scale_a, scale_b, bias, out_dtype, fast)


def _hopper_scaled_mm(
    build: Builder, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out_dtype: torch.dtype, fast: bool
) -> torch.fx.Node:
    """``aten._scaled_mm``: cuBLASLt for tensorwise scales, CUTLASS for rowwise, which it writes in bfloat16 only."""
    columns = build.call(aten.permute.default, b, [1, 0])
    scales = (scale_a, build.call(aten.permute.default, scale_b, [1, 0]))
    rowwise = [not statically_known_true(value(scale).shape[0] == 1) for scale in (scale_a, scale_b)]
    if not any(rowwise) or (all(rowwise) and out_dtype == torch.bfloat16):
        fits = bias is not None and value(bias).dtype == out_dtype != torch.float32
        out = build.call(aten._scaled_mm.default, a, columns, *scales, bias if fits else None, None, out_dtype, fast)
        return out if bias is None or fits else _add_bias(build, out, bias, out_dtype)
    one = build.call(aten.full.default, [], 1.0, dtype=torch.float32, device=value(a).device)
    out = build.call(aten._scaled_mm.default, a, columns, one, one, None, None, torch.float32, fast)
    for scale in scales:
        out = build.call(aten.mul.Tensor, out, scale)
    out = out if bias is None else _add_bias(build, out, bias, torch.float32)
    return formulas.cast(build.call, out, out_dtype)


def _scaled_grouped_mm(
    build: Builder, a: Any, b: Any, scale_a: Any, scale_b: Any, offsets: Any, out_dtype: torch.dtype, fast: bool
) -> torch.fx.Node:
    """``aten._scaled_grouped_mm`` on a GPU (a scale per row, writes bfloat16); our operator elsewhere."""
    if value(a).device.type == "cpu":
        return build.call(ops.SCALED_GROUPED_MM, a, b, scale_a, scale_b, offsets, out_dtype, fast)
    rows = build.call(aten.expand.default, scale_a, [value(a).shape[0], 1])
    columns = build.call(aten.expand.default, scale_b, [*value(b).shape[:2], 1])
    flat = [build.call(aten.clone.default, build.call(aten.squeeze.dim, s, -1)) for s in (rows, columns)]
    out = build.call(
        aten._scaled_grouped_mm.default,
        a,
        build.call(aten.permute.default, b, [0, 2, 1]),
        *flat,
        offsets,
        None,
        None,
        torch.bfloat16,
        fast,
    )
    return formulas.cast(build.call, out, out_dtype)


def _add_bias(build: Builder, out: Any, bias: Any, dtype: torch.dtype) -> torch.fx.Node:
    return formulas.cast(build.call, build.call(aten.add.Tensor, out, bias), dtype)


LOWERINGS: dict[Any, Callable[..., torch.fx.Node]] = {
    ops.COMPUTE_SCALE: _compute_scale,
    ops.QUANTIZE: _quantize,
    ops.SCALED_MM: _scaled_mm,
    ops.SCALED_GROUPED_MM: _scaled_grouped_mm,
}
