"""Quantize: replace each matmul that was decided for FP8 by casts and a scaled matmul.

One cast per tensor and use: operands that show the same tensor in the same layout share it, and it reads the tensor as
it was before dtype conversions. A cast that only the backward needs is placed so that backward keeps the fewest bytes:
in the forward, which then saves FP8, or in the backward where its source is saved or free anyway.
"""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from fp8compile import ops
from fp8compile.passes.builder import Builder
from fp8compile.passes.casts import CastPlan, plan_casts
from fp8compile.passes.context import FoundMatmul, PassContext, PassRecord
from fp8compile.passes.dataflow import RESHAPES, family, is_backward, origins, size_hint, value
from fp8compile.recipe import Operand

aten = torch.ops.aten

MUST_BE_IN_BACKWARD = "must_be_in_backward"
"""The partitioner's tag for a node that it must not move into the forward."""


def quantize(graph: torch.fx.Graph, context: PassContext, record: PassRecord) -> None:
    """Insert ``compute_scale``, ``quantize`` and ``scaled_mm`` for every site decided for FP8."""
    chosen = [found for found in context.matmuls if found.gemm is not None]
    if not chosen:
        return
    writer = _CastWriter(graph, context, chosen)
    for found in chosen:
        old = found.node
        _replace(graph, found, writer, context.chip.alignment)
        writer.renamed(old, found.node)
        record.matched += 1
    graph.eliminate_dead_code()
    graph.lint()


class _CastWriter:
    """Writes casts into the graph, each once."""

    def __init__(self, graph: torch.fx.Graph, context: PassContext, chosen: list[FoundMatmul]) -> None:
        self.graph = graph
        self.context = context
        self.origin = origins(graph, context.inputs)
        self.made: dict[Any, torch.fx.Node] = {}
        self.readers: dict[torch.fx.Node, list[FoundMatmul]] = collections.defaultdict(list)
        for found in chosen:
            for operand in {found.first, found.second, found.bias}:
                if operand is not None:
                    self.readers[operand].append(found)
        plans = [(found, plan) for found in chosen for plan in plan_casts(found, context.chip.alignment)]
        self.planned: dict[torch.fx.Node, set[Any]] = collections.defaultdict(set)
        for _, plan in plans:
            self.planned[plan.source].add(plan.layout_key)
        recomputed = {plan.source for found, plan in plans if "recompute" in found.node.meta}
        replaced = {found.node for found in chosen}
        self.saved_as_fp8 = {
            plan.source: plan.source not in recomputed and not _kept_for_backward(plan.source, replaced)
            for found, plan in plans
            if is_backward(found.node) and self.origin[plan.source] == "input"
        }

        self.spared_bytes = sum(
            (value(source).dtype.itemsize - 1) * math.prod(size_hint(size) for size in value(source).shape)
            for source, as_fp8 in self.saved_as_fp8.items()
            if as_fp8
        )
        self.kept_scales: set[Any] = set()

    def renamed(self, old: torch.fx.Node, new: torch.fx.Node) -> None:
        """``new`` has taken the place of ``old``."""
        self.origin[new] = self.origin[old]
        self.planned[new] = self.planned.pop(old, set())
        if old in self.saved_as_fp8:
            self.saved_as_fp8[new] = self.saved_as_fp8[old]
        for found in self.readers.get(old, ()):
            found.first = new if found.first is old else found.first
            found.second = new if found.second is old else found.second
            found.bias = new if found.bias is old else found.bias
        self.readers[new] = self.readers.pop(old, [])

    def write(self, plan: CastPlan, found: FoundMatmul, kind: Operand) -> tuple[torch.fx.Node, torch.fx.Node]:
        """-> FP8 data as the GEMM reads it, and its scale as the GEMM reads it."""
        if plan.brings_to_one_scale:
            return self._write_with_one_scale(plan, found, kind)
        late = self._belongs_in_backward(plan, found)
        matrix = self._matrix(plan, found, late)
        counted = f"{kind} in {'backward' if late or self.origin[plan.source] == 'grad_output' else 'forward'}"
        if plan.block is not None:
            return self._write_blocks(plan, found, late, matrix, counted)
        scale = self._scale(plan, found, late, matrix)
        data = self._once(
            (plan.data_key, late),
            lambda build: build.call(
                ops.QUANTIZE, matrix, scale, plan.cast.dtype, plan.transpose, list(plan.multiples)
            ),
            after=max(matrix, scale),
            found=found,
            late=late,
            counted=counted,
        )
        if len(plan.dims) == 1:
            rows = _transposed(Builder(self.graph, found.node, before=found.node), scale) if plan.transpose else scale
            return data, self._padded(plan, found, rows, data)
        return data, scale

    def _write_blocks(
        self, plan: CastPlan, found: FoundMatmul, late: bool, matrix: torch.fx.Node, counted: str
    ) -> tuple[torch.fx.Node, torch.fx.Node]:
        assert plan.block is not None
        block, cast = list(plan.block), plan.cast
        both = self._once(
            (plan.data_key, late),
            lambda build: build.call(
                ops.QUANTIZE_BLOCK, matrix, block, cast.dtype, cast.power_of_two, plan.transpose, list(plan.multiples)
            ),
            after=matrix,
            found=found,
            late=late,
            counted=counted,
        )
        data, scale = self._part(both, 0), self._part(both, 1)
        return data, self._padded(plan, found, scale, data) if 1 in block else scale

    def _write_with_one_scale(
        self, plan: CastPlan, found: FoundMatmul, kind: Operand
    ) -> tuple[torch.fx.Node, torch.fx.Node]:
        """Transposed data with the largest scale of the rows: from the FP8 data, if another GEMM reads those and they
        cost nothing to keep, else from the matrix."""
        late = self._belongs_in_backward(plan, found)
        if not late and plan.as_it_lies.layout_key in self.planned[plan.source]:
            source, row_scale = self.write(plan.as_it_lies, found, kind)
        else:
            source = self._matrix(plan, found, late)
            row_scale = self._scale(plan, found, late, source)
        late = late or (is_backward(found.node) and self.origin[plan.source] != "grad_output")
        both = self._once(
            (plan.data_key, late),
            lambda build: build.call(ops.QUANTIZE_TRANSPOSED, source, row_scale, plan.cast.dtype, list(plan.multiples)),
            after=max(source, row_scale),
            found=found,
            late=late,
            counted=f"{kind} in {'backward' if is_backward(found.node) else 'forward'}",
        )
        return self._part(both, 0), self._part(both, 1)

    def _part(self, both: torch.fx.Node, index: int) -> torch.fx.Node:
        key = (both, index)
        if key not in self.made:
            build = Builder(self.graph, both, after=both, tag=both.meta.get("partitioner_tag"))
            self.made[key] = build.call(operator.getitem, both, index)
        return self.made[key]

    def _belongs_in_backward(self, plan: CastPlan, found: FoundMatmul) -> bool:
        """Whether a cast of something from the forward waits for the backward: always for a weight, which costs nothing
        to keep; for an activation unless keeping its FP8 data spares keeping itself."""
        if not is_backward(found.node) or self.origin[plan.source] == "grad_output":
            return False
        return self.origin[plan.source] == "weight" or not self.saved_as_fp8[plan.source]

    def _matrix(self, plan: CastPlan, found: FoundMatmul, late: bool) -> torch.fx.Node:
        """The node that shows the operand as a matrix, free of dtype conversions if its source may be read instead."""
        if late and self.origin[plan.source] == "input":
            return self._converted_matrix(plan, found)
        narrowed = value(plan.operand).dtype.itemsize < value(plan.source).dtype.itemsize
        if plan.block is not None and self.origin[plan.source] != "weight" and narrowed:
            # the cast is a kernel of its own, which is to read 16 bits of what is computed in 32
            key = (plan.matrix_key, value(plan.operand).dtype)
            if key not in self.made:
                self.made[key] = self._converted_matrix(plan, found)
            return self.made[key]
        if plan.matrix_key in self.made:
            return self.made[plan.matrix_key]
        shown = plan.operand if plan.views and plan.views[-1][2] is None else None  # the matrix is this transposed
        last = shown or (plan.views[-1][2] if plan.views else None) or plan.source
        converted = value(last).dtype != value(plan.source).dtype
        may_replay = all(kind == "permute" or (node and node.target in RESHAPES) for kind, _, node in plan.views)
        if not shown and not (converted and may_replay):
            return self.made.setdefault(plan.matrix_key, last)

        def replay(build: Builder) -> torch.fx.Node:
            if not (converted and may_replay):
                return _transposed(build, last)
            node = plan.source
            for kind, argument, view in plan.views:
                if kind == "permute":
                    node = build.call(aten.permute.default, node, list(argument))
                else:
                    assert view is not None
                    node = build.call(aten.reshape.default, node, view.args[1])
            return node

        # behind the last existing view, where its source and the sizes in its arguments are known
        return self._once(plan.matrix_key, replay, after=last, found=found, late=False)

    def _converted_matrix(self, plan: CastPlan, found: FoundMatmul) -> torch.fx.Node:
        """The operand as the backward has it, after conversions: that is what is saved anyway."""
        if not plan.flipped:
            return plan.operand
        return _transposed(Builder(self.graph, found.node, before=found.node), plan.operand)

    def _scale(self, plan: CastPlan, found: FoundMatmul, late: bool, matrix: torch.fx.Node) -> torch.fx.Node:
        if late and self._may_keep_scale(plan, matrix):
            late = False  # computed once, for forward and backward
        return self._once(
            (plan.scale_key, late),
            lambda build: build.call(
                ops.COMPUTE_SCALE, matrix, list(plan.dims), plan.cast.dtype, plan.cast.power_of_two
            ),
            after=matrix,
            found=found,
            late=late,
        )

    def _may_keep_scale(self, plan: CastPlan, matrix: torch.fx.Node) -> bool:
        """Whether the backward may read the forward's scale: if both use the same, and keeping it leaves the backward
        with no more bytes than it would keep without FP8."""
        shared = plan.brings_to_one_scale or len(plan.dims) == value(matrix).dim()
        if shared and plan.scale_key not in self.kept_scales:
            sizes = [size_hint(s) for dim, s in enumerate(value(matrix).shape) if dim not in plan.dims]
            count = torch.float32.itemsize * math.prod(sizes)
            if count <= self.spared_bytes:
                self.spared_bytes -= count
                self.kept_scales.add(plan.scale_key)
        return plan.scale_key in self.kept_scales

    def _padded(self, plan: CastPlan, found: FoundMatmul, scale: torch.fx.Node, data: torch.fx.Node) -> torch.fx.Node:
        """A scale per row with as many rows as the data."""
        missing = value(data).shape[-2] - value(scale).shape[-2] if plan.multiples[0] != 1 else 0
        build = Builder(self.graph, found.node, before=found.node)
        return build.call(aten.constant_pad_nd.default, scale, [0, 0, 0, int(missing)], 1.0) if missing else scale

    def _once(
        self,
        key: Any,
        make: Callable[[Builder], torch.fx.Node],
        *,
        after: torch.fx.Node,
        found: FoundMatmul,
        late: bool,
        counted: str | None = None,
    ) -> torch.fx.Node:
        if key not in self.made:
            if late:
                build = Builder(self.graph, found.node, before=found.node, tag=MUST_BE_IN_BACKWARD)
            else:
                build = Builder(self.graph, found.node, after=after, tag=after.meta.get("partitioner_tag"))
            self.made[key] = make(build)
            if counted:
                self.context.casts[counted] += 1
        return self.made[key]


def _transposed(build: Builder, node: torch.fx.Node) -> torch.fx.Node:
    order = list(range(value(node).dim()))
    order[-1], order[-2] = order[-2], order[-1]
    return build.call(aten.permute.default, node, order)


def _kept_for_backward(source: torch.fx.Node, replaced: set[torch.fx.Node]) -> bool:
    """Whether the backward needs ``source``, or a conversion of it, for something else than the matmuls we replace."""
    members = family(source)
    users = {user for member in members for user in member.users} - members - replaced
    return any(is_backward(user) for user in users)


def _replace(graph: torch.fx.Graph, found: FoundMatmul, writer: _CastWriter, alignment: int) -> None:
    gemm, site, node = found.gemm, found.site, found.node
    assert gemm is not None
    first, second = plan_casts(found, alignment)
    a, scale_a = writer.write(first, found, site.operands[0])
    b, scale_b = writer.write(second, found, site.operands[1])
    old = value(node)
    columns = old.shape[-1]
    padded = value(b).shape[-2] != columns
    fused = found.bias is not None and found.alpha == found.beta == 1 and value(found.bias).dim() == 1 and not padded
    build = Builder(graph, node, before=node)
    fast = gemm.accumulation == "fast"
    if gemm.first.granularity == "block":
        out = build.call(ops.BLOCK_SCALED_MM, a, b, scale_a, scale_b, found.bias if fused else None, old.dtype)
    elif found.offsets is not None:
        out = build.call(ops.SCALED_GROUPED_MM, a, b, scale_a, scale_b, found.offsets, old.dtype, fast)
    else:
        out = build.call(ops.SCALED_MM, a, b, scale_a, scale_b, found.bias if fused else None, old.dtype, fast)
    if padded:
        out = build.call(aten.slice.Tensor, out, old.dim() - 1, 0, columns)
        out = build.call(aten.clone.default, out, memory_format=torch.contiguous_format)
    if found.alpha != 1:
        out = build.call(aten.mul.Tensor, out, found.alpha)
    if found.bias is not None and not fused and found.beta != 0:
        bias = build.call(aten.mul.Tensor, found.bias, found.beta) if found.beta != 1 else found.bias
        out = build.call(aten.add.Tensor, out, bias)
    for key, item in node.meta.items():
        out.meta.setdefault(key, item)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    found.node = out
