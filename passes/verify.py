"""Verify: a table of rules that every rewritten graph obeys.

A rule looks at one node and answers what is wrong with it, or None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile import ops
from fp8compile.hardware import Chip
from fp8compile.passes.context import PassContext, PassRecord
from fp8compile.passes.dataflow import VIEWS, value
from fp8compile.recipe import BLOCK, LARGEST

aten = torch.ops.aten


class VerificationError(RuntimeError):
    """A pass left a graph that breaks a rule; says which node and which rule."""


def verify(graph: torch.fx.Graph, context: PassContext, record: PassRecord) -> None:
    """Check every node against :data:`RULES`.

    Raises:
        VerificationError: names every node that breaks a rule.
    """
    broken = []
    for node in graph.nodes:
        for target, rule in RULES:
            if target is not ANY and node.target is not target:
                continue
            record.matched += 1
            if (complaint := rule(node, context.chip)) is not None:
                broken.append(f"{node.name} ({rule.__name__.strip('_')}): {complaint}")
                break  # a rule may rely on those before it
    if broken:
        raise VerificationError("the rewritten graph breaks a rule:\n  " + "\n  ".join(broken))


ANY = object()
Rule = Callable[[torch.fx.Node, Chip], str | None]

MAY_READ_FP8: set[Any] = {
    *ops.GEMMS,
    ops.QUANTIZE_TRANSPOSED,
    aten.slice.Tensor,
    aten.clone.default,
    aten.view.dtype,
    torch.ops.prims.convert_element_type.default,
    aten.copy_.default,
} | VIEWS


def _differ(size: Any, other: Any) -> bool:
    """Whether two sizes are known to differ; never guards on a size that is not known."""
    return statically_known_true(size != other)


def _has_value(node: torch.fx.Node, chip: Chip) -> str | None:
    ours = node.op == "call_function" and getattr(node.target, "namespace", "") == "fp8compile"
    without = [n.name for n in (node, *node.all_input_nodes) if ours and "val" not in n.meta]
    return f"{', '.join(without)}: no meta['val']" if without else None


def _scale_is_float32(node: torch.fx.Node, chip: Chip) -> str | None:
    dtype = value(node).dtype
    return None if dtype == torch.float32 else f"scale is {dtype}, not float32"


def _scale_fits(node: torch.fx.Node, chip: Chip) -> str | None:
    x, scale = (value(arg) for arg in node.args[:2])  # type: ignore[arg-type]
    if scale.dtype != torch.float32:
        return f"scale is {scale.dtype}, not float32"
    if scale.dim() != x.dim() or any(
        _differ(s, 1) and _differ(s, size) for s, size in zip(scale.shape, x.shape, strict=False)
    ):
        return f"scale {tuple(scale.shape)} does not broadcast to {tuple(x.shape)}"
    return None


def _quantizes_to_fp8(node: torch.fx.Node, chip: Chip) -> str | None:
    return None if value(node).dtype in LARGEST else f"result is {value(node).dtype}, not FP8"


def _has_a_scale_per_row(node: torch.fx.Node, chip: Chip) -> str | None:
    x, scale = (value(arg) for arg in node.args[:2])  # type: ignore[arg-type]
    if _differ(scale.shape[-1], 1) or _differ(scale.shape[-2], x.shape[-2]):
        return f"scale {tuple(scale.shape)} is not one number per row of {tuple(x.shape)}"
    return None


def _operands_are_fp8(node: torch.fx.Node, chip: Chip) -> str | None:
    a, b = (value(arg) for arg in node.args[:2])  # type: ignore[arg-type]
    return chip.refuses(a.dtype, b.dtype)


def _contractions_agree(node: torch.fx.Node, chip: Chip) -> str | None:
    a, b = (value(arg) for arg in node.args[:2])  # type: ignore[arg-type]
    return f"contraction {a.shape[-1]} against {b.shape[-1]}" if _differ(a.shape[-1], b.shape[-1]) else None


def _is_aligned(node: torch.fx.Node, chip: Chip) -> str | None:
    a, b = (value(arg) for arg in node.args[:2])  # type: ignore[arg-type]
    for key, size in (("K", a.shape[-1]), ("N", b.shape[-2])):
        if isinstance(size, int) and size % chip.alignment:
            return f"{key}={size} is not a multiple of {chip.alignment}"
    return None


def _operands_are_k_major(node: torch.fx.Node, chip: Chip) -> str | None:
    for key, arg in zip("ab", node.args[:2], strict=True):
        if _differ(value(arg).stride(-1), 1):  # type: ignore[arg-type]
            return f"operand {key} has stride {value(arg).stride(-1)} along the contraction"  # type: ignore[arg-type]
    return None


def _scales_match_operands(node: torch.fx.Node, chip: Chip) -> str | None:
    a, b, scale_a, scale_b = (value(arg) for arg in node.args[:4])  # type: ignore[arg-type]
    for key, data, scale in (("a", a, scale_a), ("b", b, scale_b)):
        if scale.dim() != data.dim() or _differ(scale.shape[-1], 1):
            return f"scale of {key} is {tuple(scale.shape)}, not one number per row"
        if _differ(scale.shape[-2], 1) and _differ(scale.shape[-2], data.shape[-2]):
            return f"scale of {key} has {scale.shape[-2]} rows, its data {data.shape[-2]}"
    return None


def _block_lies_along_the_contraction(node: torch.fx.Node, chip: Chip) -> str | None:
    x, (_, block, _, _, transpose, _) = value(node.args[0]), node.args  # type: ignore[arg-type]
    if x.dim() != 2:
        return f"scales for blocks of {x.dim()} dimensions"
    along = block[0 if transpose else 1]  # type: ignore[index]
    return None if along == BLOCK else f"block {block} has {along} along the contraction"


def _block_scales_match_operands(node: torch.fx.Node, chip: Chip) -> str | None:
    a, b, scale_a, scale_b = (value(arg) for arg in node.args[:4])  # type: ignore[arg-type]
    for key, data, scale in (("a", a, scale_a), ("b", b, scale_b)):
        by_row, by_block = ([*map(_differ, scale.shape, _blocks(data.shape, (rows, BLOCK)))] for rows in (1, BLOCK))
        if data.dim() != 2 or scale.dim() != 2 or (any(by_row) and any(by_block)):
            return f"scale of {key} is {tuple(scale.shape)}, its data {tuple(data.shape)}"
    return None


def _blocks(shape: Any, block: Any) -> list[Any]:
    return [(size + step - 1) // step for size, step in zip(shape, block, strict=True)]


def _only_gemms_read_fp8(node: torch.fx.Node, chip: Chip) -> str | None:
    both = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    is_part = isinstance(both, torch.fx.Node) and both.target in (ops.QUANTIZE_TRANSPOSED, ops.QUANTIZE_BLOCK)
    if node.op != "call_function" or not (node.target is ops.QUANTIZE or is_part):
        return None
    wrong = [u.name for u in node.users if u.op != "output" and u.target not in MAY_READ_FP8]
    return f"FP8 data read by {', '.join(wrong)}" if wrong else None


GEMM_RULES: list[Rule] = [_operands_are_fp8, _contractions_agree, _is_aligned, _operands_are_k_major]

RULES: list[tuple[Any, Rule]] = [
    (ANY, _has_value),
    (ANY, _only_gemms_read_fp8),
    (ops.COMPUTE_SCALE, _scale_is_float32),
    (ops.QUANTIZE, _scale_fits),
    (ops.QUANTIZE, _quantizes_to_fp8),
    (ops.QUANTIZE_TRANSPOSED, _scale_fits),
    (ops.QUANTIZE_TRANSPOSED, _has_a_scale_per_row),
    (ops.QUANTIZE_BLOCK, _block_lies_along_the_contraction),
    *((gemm, rule) for gemm in ops.GEMMS for rule in GEMM_RULES),
    (ops.SCALED_MM, _scales_match_operands),
    (ops.SCALED_GROUPED_MM, _scales_match_operands),
    (ops.BLOCK_SCALED_MM, _block_scales_match_operands),
]
