"""Facts about the values of a joint graph: what they depend on, and which are the same tensor seen differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTInput,
    TangentAOTInput,
)

from fp8compile.passes.context import GraphInput
from fp8compile.recipe import Operand

aten = torch.ops.aten
prims = torch.ops.prims

ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
PERMUTES = {aten.permute.default, aten.t.default, aten.transpose.int}
SQUEEZES = {aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}
VIEWS = RESHAPES | PERMUTES | SQUEEZES
CONVERSIONS = {prims.convert_element_type.default, aten._to_copy.default}
HIGH_PRECISION = {torch.float32, torch.bfloat16, torch.float16}


def value(node: torch.fx.Node) -> Any:
    """The fake tensor (or symbolic number, or tuple) that ``node`` stands for."""
    return node.meta.get("val")


def is_backward(node: torch.fx.Node) -> bool:
    """Whether ``node`` was traced in the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def size_hint(size: int | torch.SymInt, unknown: int = 4096) -> int:
    """``size`` as a number: itself, the value it had while tracing, or ``unknown`` if it depends on data."""
    if isinstance(size, int):
        return size
    known: Any = size.node.maybe_as_int()
    if known is None and size.node.has_hint():
        known = size.node.hint
    return unknown if known is None else int(known)


def is_dynamic(size: int | torch.SymInt) -> bool:
    return not isinstance(size, int) and size.node.maybe_as_int() is None


def depends_on_data(size: int | torch.SymInt) -> bool:
    """Whether a size is known only when the program runs (an unbacked symbol)."""
    return is_dynamic(size) and not size.node.has_hint()  # type: ignore[union-attr]


def is_conversion(node: torch.fx.Node) -> bool:
    """A conversion between floating-point dtypes that changes nothing else."""
    if node.target not in CONVERSIONS or not isinstance(value(node), torch.Tensor):
        return False
    if set(node.kwargs) - {"dtype"} and any(v is not None for k, v in node.kwargs.items() if k != "dtype"):
        return False
    before = value(node.all_input_nodes[0])
    return before.dtype in HIGH_PRECISION and value(node).dtype in HIGH_PRECISION


def is_plain_clone(node: torch.fx.Node) -> bool:
    """A copy that keeps the layout."""
    return node.target is aten.clone.default and node.kwargs.get("memory_format") in (None, torch.preserve_format)


def input_of(placeholder: torch.fx.Node, position: int, inputs: tuple[GraphInput, ...]) -> GraphInput | None:
    """The graph input that ``placeholder`` carries; None for tangents, symbols and seeds."""
    descriptor: Any = placeholder.meta.get("desc")
    while hasattr(descriptor, "base"):
        descriptor = descriptor.base
    if isinstance(descriptor, (ParamAOTInput, BufferAOTInput)):  # Inductor's freezing leaves parameters in the module
        return GraphInput(descriptor.target, is_parameter=True)
    if descriptor is None:
        index = position
    elif isinstance(descriptor, PlainAOTInput):
        index = descriptor.idx
    else:
        return None
    return inputs[index] if index < len(inputs) else None


def is_inside_control_flow(graph: torch.fx.Graph) -> bool:
    """Whether ``graph`` is the body of a higher-order operator: AOTAutograd describes inputs of whole graphs only."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return bool(placeholders) and not any("desc" in node.meta for node in placeholders)


def is_tangent(placeholder: torch.fx.Node) -> bool:
    descriptor = placeholder.meta.get("desc")
    return isinstance(descriptor, TangentAOTInput) or str(placeholder.target).startswith("tangents")


def origins(graph: torch.fx.Graph, inputs: tuple[GraphInput, ...]) -> dict[torch.fx.Node, Operand]:
    """What each node is computed from: ``"grad_output"`` if from a tangent, else ``"input"`` if from data, else
    ``"weight"`` (parameters, buffers and constants)."""
    rank: dict[torch.fx.Node, int] = {}
    kinds: tuple[Operand, ...] = ("weight", "input", "grad_output")
    position = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            source = input_of(node, position, inputs)
            position += 1
            if is_tangent(node):
                rank[node] = 2
            else:
                rank[node] = 0 if source is not None and source.is_parameter else 1
        elif node.op != "output":
            rank[node] = max((rank[arg] for arg in node.all_input_nodes), default=0)
    return {node: kinds[r] for node, r in rank.items()}


def weight_names(graph: torch.fx.Graph, inputs: tuple[GraphInput, ...]) -> dict[torch.fx.Node, str]:
    """The names of the parameters: of placeholders, and of what the graph's module holds, as of exported programs."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    named = ((node, input_of(node, i, inputs)) for i, node in enumerate(placeholders))
    given = {node: source.name for node, source in named if source is not None and source.is_parameter}
    return given | {node: str(node.target) for node in graph.nodes if node.op == "get_attr"}


def root(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor of which ``node`` is a view, conversion or plain copy."""
    while node is not (source := _one_step_back(node)):
        node = source
    return node


def family(node: torch.fx.Node) -> set[torch.fx.Node]:
    """All views, conversions and plain copies of ``root(node)``, itself included."""
    members, pending = set(), [root(node)]
    while pending:
        member = pending.pop()
        members.add(member)
        pending += [user for user in member.users if user not in members and _one_step_back(user) is member]
    return members


Step = tuple[str, tuple[Any, ...], torch.fx.Node | None]
"""A view in logical terms: ``"view"`` with its shape or ``"permute"`` with its order, and the node it was read from;
None if the graph has no such view."""


def steps(node: torch.fx.Node) -> list[Step]:
    """The views between ``root(node)`` and ``node``, in order and without detours; conversions and copies left out."""
    chain = []
    while node is not (source := _one_step_back(node)):
        chain.append(node)
        node = source
    shape = _key(value(node).shape)
    result: list[Step] = []
    starts: list[tuple[Any, ...]] = []  # the shape before each step of ``result``
    for member in reversed(chain):
        before, shape = shape, _key(value(member).shape)
        if member.target in PERMUTES:
            order = _permutation(member)
            start = before
            if result and result[-1][0] == "permute":
                earlier, start = result.pop()[1], starts.pop()
                order = tuple(earlier[d] for d in order)
            if order != tuple(range(len(order))):
                result.append(("permute", order, member))
                starts.append(start)
        elif shape != before:
            start = before
            if result and result[-1][0] == "view":
                result.pop()
                start = starts.pop()
            if shape != start:
                result.append(("view", shape, member))
                starts.append(start)
    return result


def with_transposition(views: Sequence[Step], rank: int) -> list[Step]:
    """``views`` and, behind them, a swap of the last two dimensions; two permutations are one."""
    order = (*range(rank - 2), rank - 1, rank - 2)
    if views and views[-1][0] == "permute":
        *views, (_, earlier, _) = views
        order = tuple(earlier[d] for d in order)
    return [*views, ("permute", order, None)]


def is_transposed(last: Step) -> bool:
    """Whether a step swaps the last two dimensions and no others."""
    kind, order, _ = last
    rank = len(order)
    return kind == "permute" and rank >= 2 and order == (*range(rank - 2), rank - 1, rank - 2)


def _one_step_back(node: torch.fx.Node) -> torch.fx.Node:
    if node.op == "call_function" and (
        node.target in ALIASES or node.target in VIEWS or is_conversion(node) or is_plain_clone(node)
    ):
        return node.all_input_nodes[0]
    return node


def _permutation(node: torch.fx.Node) -> tuple[int, ...]:
    rank = value(node).dim()
    order = list(range(rank))
    if node.target is aten.permute.default:
        return tuple(int(d) % rank for d in node.args[1])  # type: ignore[union-attr, arg-type]
    first, second = (0, 1) if node.target is aten.t.default else (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
    if rank >= 2:
        order[first], order[second] = order[second], order[first]
    return tuple(order)


def _key(sizes: Any) -> tuple[Any, ...]:
    return tuple(size if isinstance(size, int) else size.node.expr for size in sizes)
