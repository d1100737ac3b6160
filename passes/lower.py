"""Lower: turn our operators into what Inductor fuses and into the kernels of the device, in the post-grad graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._inductor import inductor_prims
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile import formulas, ops
from fp8compile.passes.builder import Builder
from fp8compile.passes.choose_gemm import LIBRARY, chosen_for
from fp8compile.passes.context import PassContext, PassRecord
from fp8compile.passes.dataflow import value
from fp8compile.recipe import LARGEST

aten = torch.ops.aten


def lower(graph: torch.fx.Graph, context: PassContext, record: PassRecord) -> None:
    """Replace every ``fp8compile::*`` node by its lowering: ATen operators, or launches of our kernels."""
    for node in list(graph.nodes):
        lowering = LOWERINGS.get(node.target)
        if lowering is None:
            continue
        new = lowering(Builder(graph, node, before=node), *node.args)
        if isinstance(new, tuple):
            for part in list(node.users):
                _replace(graph, part, new[part.args[1]])  # type: ignore[index]
            graph.erase_node(node)
        else:
            _replace(graph, node, new)
        record.matched += 1
    if record.matched:
        graph.lint()


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, new: torch.fx.Node) -> None:
    new.meta.update({key: item for key, item in node.meta.items() if key not in new.meta or key == "val"})
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _compute_scale(build: Builder, x: Any, dims: list[int], dtype: torch.dtype, power_of_two: bool) -> torch.fx.Node:
    scale = formulas.compute_scale(build.call, x, dims, dtype, power_of_two)
    return scale if value(scale).device.type == "cpu" else _stored(build, scale)


def _stored(build: Builder, node: torch.fx.Node) -> torch.fx.Node:
    """The node's value, contiguous; on a GPU in memory once, for all the kernels that read it.

    Inductor would compute a value that it has not stored yet anew for every kernel that is not its own.
    """
    sizes, device = value(node).shape, value(node).device
    if device.type == "cpu" or not all(isinstance(size, int) for size in sizes):
        return build.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    strides = [math.prod(max(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes))]
    return build.call(inductor_prims.force_stride_order, node, strides)


def _quantize(
    build: Builder, x: Any, scale: Any, dtype: torch.dtype, transpose: bool, multiples: list[int]
) -> torch.fx.Node:
    data = formulas.quantize(build.call, x, scale, dtype)
    if transpose:
        rank = value(data).dim()
        data = build.call(aten.permute.default, data, [*range(rank - 2), rank - 1, rank - 2])
    return _laid_out(build, data, dtype, multiples)


def _laid_out(build: Builder, data: torch.fx.Node, dtype: torch.dtype, multiples: list[int]) -> torch.fx.Node:
    if amounts := _padding(build, data, multiples):
        raw = build.call(aten.view.dtype, data, torch.uint8)
        data = build.call(aten.view.dtype, build.call(aten.constant_pad_nd.default, raw, amounts, 0), dtype)
    return _stored(build, data)


def _quantize_transposed(
    build: Builder, x: Any, row_scale: Any, dtype: torch.dtype, multiples: list[int]
) -> tuple[torch.fx.Node, torch.fx.Node]:
    is_fp8 = value(x).dtype in LARGEST
    if value(x).device.type != "cpu" and value(x).dim() == 2 and statically_known_true(value(x).stride(1) == 1):
        from fp8compile.kernels.quantize_transposed import launch_quantize_transposed

        made: tuple[torch.fx.Node, torch.fx.Node] = build.inline(
            launch_quantize_transposed, x, row_scale, dtype, tuple(multiples)
        )
        return made
    data, scale = formulas.quantize_transposed(build.call, x, row_scale, dtype, value(x).dim(), is_fp8)
    return _laid_out(build, data, dtype, multiples), scale


def _quantize_block(
    build: Builder,
    x: Any,
    block: list[int],
    dtype: torch.dtype,
    power_of_two: bool,
    transpose: bool,
    multiples: list[int],
) -> torch.fx.Node | tuple[torch.fx.Node, torch.fx.Node]:
    """What ``fuse_block_casts`` has left. On a CPU our operator: Inductor's loops there leave out what is beyond the
    last whole block."""
    if value(x).device.type == "cpu":
        return build.call(ops.QUANTIZE_BLOCK, x, block, dtype, power_of_two, transpose, multiples)
    shape = value(x).shape
    scale = _stored(build, formulas.compute_block_scale(build.call, x, shape, block, dtype, power_of_two))
    data = formulas.quantize_block(build.call, x, scale, shape, block, dtype)
    if transpose:
        data, scale = (build.call(aten.permute.default, node, [1, 0]) for node in (data, scale))
    return _laid_out(build, data, dtype, multiples), scale


def _block_scaled_mm(
    build: Builder, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out_dtype: torch.dtype
) -> torch.fx.Node:
    if value(a).device.type == "cpu":
        return build.call(ops.BLOCK_SCALED_MM, a, b, scale_a, scale_b, bias, out_dtype)
    from fp8compile.kernels.block_scaled_mm import launch_block_scaled_mm

    ours: torch.fx.Node = build.inline(launch_block_scaled_mm, a, b, scale_a, scale_b, bias, out_dtype)
    return ours


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
    if value(a).device.type == "cpu":
        return formulas.scaled_mm(build.call, a, b, scale_a, scale_b, bias, out_dtype, value(a).dim())
    if chosen_for(build.owner) == LIBRARY:
        return _library_scaled_mm(build, a, b, scale_a, scale_b, bias, out_dtype, fast)
    from fp8compile.kernels.scaled_mm import launch_scaled_mm

    def product(*arguments: Any) -> Any:
        return launch_scaled_mm(*arguments)[0]

    ours: torch.fx.Node = build.inline(product, a, b, scale_a, scale_b, bias, out_dtype, fast)
    return ours


def _library_scaled_mm(
    build: Builder, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out_dtype: torch.dtype, fast: bool
) -> torch.fx.Node:
    """``aten._scaled_mm``: cuBLASLt for tensorwise scales, CUTLASS for rowwise."""
    columns = build.call(aten.permute.default, b, [1, 0])
    scales = (scale_a, build.call(aten.permute.default, scale_b, [1, 0]))
    fits = bias is not None and value(bias).dtype == out_dtype != torch.float32
    out = build.call(aten._scaled_mm.default, a, columns, *scales, bias if fits else None, None, out_dtype, fast)
    return out if bias is None or fits else _add_bias(build, out, bias, out_dtype)


def _scaled_grouped_mm(
    build: Builder, a: Any, b: Any, scale_a: Any, scale_b: Any, offsets: Any, out_dtype: torch.dtype, fast: bool
) -> torch.fx.Node:
    """On a GPU ``aten._scaled_grouped_mm`` or our kernel; elsewhere our operator."""
    if value(a).device.type == "cpu":
        return build.call(ops.SCALED_GROUPED_MM, a, b, scale_a, scale_b, offsets, out_dtype, fast)
    if chosen_for(build.owner) == LIBRARY:
        columns = build.call(aten.permute.default, b, [0, 2, 1])
        scales = [build.call(aten.squeeze.dim, scale, -1) for scale in (scale_a, scale_b)]
        arguments = (a, columns, *scales, offsets, None, None, out_dtype, fast)
        return build.call(aten._scaled_grouped_mm.default, *arguments)
    from fp8compile.kernels.grouped_mm import launch_scaled_grouped_mm

    ours: torch.fx.Node = build.inline(launch_scaled_grouped_mm, a, b, scale_a, scale_b, offsets, out_dtype, fast)
    return ours


def _add_bias(build: Builder, out: Any, bias: Any, dtype: torch.dtype) -> torch.fx.Node:
    return formulas.cast(build.call, build.call(aten.add.Tensor, out, bias), dtype)


LOWERINGS: dict[Any, Callable[..., torch.fx.Node | tuple[torch.fx.Node, ...]]] = {
    ops.COMPUTE_SCALE: _compute_scale,
    ops.QUANTIZE: _quantize,
    ops.QUANTIZE_TRANSPOSED: _quantize_transposed,
    ops.SCALED_MM: _scaled_mm,
    ops.SCALED_GROUPED_MM: _scaled_grouped_mm,
    ops.QUANTIZE_BLOCK: _quantize_block,
    ops.BLOCK_SCALED_MM: _block_scaled_mm,
}
