"""Find sites: every matmul and every collective of a graph, with its module, role, shape and operands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from fp8compile.passes.context import FoundCollective, FoundMatmul, PassContext, PassRecord
from fp8compile.passes.dataflow import is_backward, is_dynamic, origins, root, size_hint, value, weight_names
from fp8compile.recipe import Operand, Role
from fp8compile.site import CollectiveSite, Kind, MatmulSite

aten = torch.ops.aten


@dataclass(frozen=True)
class Matmul:
    """Where a matmul operator has its operands among its arguments."""

    op: str
    first: int
    second: int
    bias: int | None = None
    offsets: int | None = None


MATMULS: dict[Any, Matmul] = {
    aten.mm.default: Matmul("mm", 0, 1),
    aten.addmm.default: Matmul("addmm", 1, 2, bias=0),
    aten.bmm.default: Matmul("bmm", 0, 1),
    aten.baddbmm.default: Matmul("baddbmm", 1, 2, bias=0),
    aten._grouped_mm.default: Matmul("_grouped_mm", 0, 1, offsets=2),
}

WITHOUT_FP8_FORM: dict[str, Kind] = {
    "aten::mv": "vector",
    "aten::addmv": "vector",
    "aten::dot": "vector",
    "aten::vdot": "vector",
    "aten::addbmm": "product",
    "aten::_int_mm": "integer",
    "aten::_grouped_mm": "ragged",
    "aten::_scaled_mm": "scaled",
    "aten::_scaled_mm_v2": "scaled",
    "aten::_scaled_grouped_mm": "scaled",
    "aten::_scaled_grouped_mm_v2": "scaled",
    "fp8compile::scaled_mm": "scaled",
    "fp8compile::scaled_grouped_mm": "scaled",
    "aten::convolution": "convolution",
    "aten::convolution_backward": "convolution",
    "aten::_scaled_dot_product_flash_attention": "attention",
    "aten::_scaled_dot_product_flash_attention_backward": "attention",
    "aten::_scaled_dot_product_efficient_attention": "attention",
    "aten::_scaled_dot_product_efficient_attention_backward": "attention",
    "aten::_scaled_dot_product_cudnn_attention": "attention",
    "aten::_scaled_dot_product_cudnn_attention_backward": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::_scaled_dot_product_fused_attention_overrideable": "attention",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": "attention",
    "aten::_flash_attention_forward": "attention",
    "aten::_flash_attention_backward": "attention",
    "aten::_efficient_attention_forward": "attention",
    "aten::_efficient_attention_backward": "attention",
    "flex_attention": "attention",
    "flex_attention_backward": "attention",
    "aten::mkldnn_rnn_layer": "fused",
    "aten::mkldnn_rnn_layer_backward": "fused",
    "aten::_cudnn_rnn": "fused",
    "aten::_cudnn_rnn_backward": "fused",
    "aten::miopen_rnn": "fused",
}
"""Operators that multiply matrices and that we report but do not rewrite, by the name in their schema."""

COLLECTIVES = {"_c10d_functional", "_c10d_functional_autograd"}
NOT_SENDING = {"wait_tensor"}


def find_sites(graph: torch.fx.Graph, context: PassContext, record: PassRecord) -> None:
    """Find every matmul and collective; fills ``context.matmuls`` and ``context.collectives``."""
    origin = origins(graph, context.inputs)
    names = weight_names(graph, context.inputs)
    finder = _Finder(origin, names)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in MATMULS and _is_plain(node, MATMULS[node.target]):
            context.matmuls.append(finder.matmul(node, MATMULS[node.target]))
        elif (name := _schema_name(node)) in WITHOUT_FP8_FORM:
            context.matmuls.append(finder.other(node, name, WITHOUT_FP8_FORM[name]))
        elif _namespace(node) in COLLECTIVES and name.split("::")[1] not in NOT_SENDING:
            context.collectives.append(finder.collective(node, name.split("::")[1]))
        for inner, inner_name, kind in _inside(node, graph):
            context.matmuls.append(finder.other(inner, inner_name, kind, owner=node))
    record.matched = len(context.matmuls) + len(context.collectives)


def _is_plain(node: torch.fx.Node, form: Matmul) -> bool:
    """Whether a matmul operator is used in the form that we rewrite. A grouped one is: rows in groups, no bias."""
    if form.offsets is None:
        return True
    first, second, *rest = node.args
    ranks = [value(n).dim() for n in (first, second)]  # type: ignore[arg-type]
    return ranks == [2, 3] and isinstance(rest[0] if rest else None, torch.fx.Node) and not any(rest[1:2])


class _Finder:
    """Turns nodes into sites. Remembers forward matmuls, so that their backwards find them by autograd's number."""

    def __init__(self, origin: dict[torch.fx.Node, Operand], names: dict[torch.fx.Node, str]) -> None:
        self.origin = origin
        self.names = names
        self.forward: dict[int, FoundMatmul] = {}

    def matmul(self, node: torch.fx.Node, form: Matmul) -> FoundMatmul:
        first, second = node.args[form.first], node.args[form.second]
        assert isinstance(first, torch.fx.Node)
        assert isinstance(second, torch.fx.Node)
        bias = node.args[form.bias] if form.bias is not None else None
        operands = (self.origin[first], self.origin[second])
        forward = self._forward_of(node)
        role, kind, operands = _classify(operands, forward)
        a, b, out = value(first), value(second), value(node)
        batch = a.shape[0] if a.dim() == 3 else 1
        sizes = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1], "batch": batch}
        module, module_class = module_of(node)
        weight = self._weight(first, second) or (forward.site.weight if forward else None)
        site = MatmulSite(
            name=node.name,
            op=form.op,
            kind=kind,
            role=role,
            module=module or (forward.site.module if forward else ""),
            module_class=module_class,
            weight=weight,
            operands=operands,
            dynamic=frozenset(key for key, size in sizes.items() if is_dynamic(size)),
            dtypes=(a.dtype, b.dtype),
            out_dtype=out.dtype,
            traits=forward.site.traits if forward else _traits(node, second),
            **{key: size_hint(size) for key, size in sizes.items()},
        )
        found = FoundMatmul(
            site,
            node,
            first,
            second,
            bias if isinstance(bias, torch.fx.Node) else None,
            offsets=node.args[form.offsets] if form.offsets is not None else None,  # type: ignore[arg-type]
            alpha=node.kwargs.get("alpha", 1),  # type: ignore[arg-type]
            beta=node.kwargs.get("beta", 1),  # type: ignore[arg-type]
        )
        self._remember(node, found)
        return found

    def other(self, node: torch.fx.Node, name: str, kind: Kind, owner: torch.fx.Node | None = None) -> FoundMatmul:
        """A matmul that has no FP8 form here; ``owner`` is the control-flow node it is inside of."""
        tensors = [v for v in map(value, node.all_input_nodes) if isinstance(v, torch.Tensor)]
        first, second = (tensors * 2)[:2] if tensors else (torch.empty(0, 0), torch.empty(0, 0))
        out = value(node)
        out = next((v for v in out if isinstance(v, torch.Tensor)), first) if isinstance(out, (tuple, list)) else out
        module, module_class = module_of(owner or node)
        a, b = list(first.shape[-2:]), list(second.shape[-2:])
        site = MatmulSite(
            name=(owner or node).name if owner is None else f"{owner.name}/{node.name}",
            op=name.split("::")[-1],
            kind=kind,
            role="dgrad" if is_backward(owner or node) else "fprop",
            module=module,
            module_class=module_class,
            weight=None,
            operands=("input", "input"),
            batch=1,
            m=size_hint(a[0]) if len(a) == 2 else 1,
            n=size_hint(b[-1]) if b else 1,
            k=size_hint(a[-1]) if a else 1,
            dynamic=frozenset(),
            dtypes=(first.dtype, second.dtype),
            out_dtype=getattr(out, "dtype", first.dtype),
        )
        found = FoundMatmul(site, owner or node)
        self._remember(node, found)
        return found

    def collective(self, node: torch.fx.Node, op: str) -> FoundCollective:
        sent = next((v for v in map(value, node.all_input_nodes) if isinstance(v, torch.Tensor)), torch.empty(0))
        group = next((a for a in reversed(node.args) if isinstance(a, str)), "")
        shape = tuple(size_hint(s) for s in sent.shape)
        return FoundCollective(CollectiveSite(node.name, op, module_of(node)[0], shape, sent.dtype, group), node)

    def _remember(self, node: torch.fx.Node, found: FoundMatmul) -> None:
        if not is_backward(node) and (number := node.meta.get("seq_nr")) is not None:
            self.forward[number] = found

    def _forward_of(self, node: torch.fx.Node) -> FoundMatmul | None:
        """The forward matmul that ``node`` is part of the backward of: same autograd sequence number."""
        return self.forward.get(node.meta.get("seq_nr", -1)) if is_backward(node) else None

    def _weight(self, *operands: torch.fx.Node) -> str | None:
        return next((self.names[r] for r in map(root, operands) if r in self.names), None)


def _classify(
    operands: tuple[Operand, Operand], forward: FoundMatmul | None
) -> tuple[Role, Kind, tuple[Operand, Operand]]:
    """Role and kind from what the operands are, and from the forward matmul where this is a backward one."""
    if "grad_output" not in operands:
        kinds: dict[frozenset[str], Kind] = {frozenset({"input"}): "product", frozenset({"weight"}): "constant"}
        return "fprop", kinds.get(frozenset(operands), "linear"), operands
    if operands == ("grad_output", "grad_output"):
        return "dgrad", "product", operands
    if forward is not None and forward.site.kind in ("product", "constant"):
        return "dgrad", forward.site.kind, operands
    if "weight" in operands:
        return "dgrad", "linear", operands
    return "wgrad", "linear", operands


def _traits(node: torch.fx.Node, weight: torch.fx.Node) -> frozenset[str]:
    """What the consumers of a forward matmul, or of its weight, say about its place in the model."""
    traits = set()
    if any(user.target is aten.embedding.default and user.args[0] is root(weight) for user in root(weight).users):
        traits.add("tied_embedding")
    reached = {_schema_name(n) for n in _consumers(node, depth=12)}
    if "aten::topk" in reached:
        traits.add("router")
    if "aten::nll_loss_forward" in reached or {"aten::gather", "aten::log"} <= reached:
        traits.add("logits")
    return frozenset(traits)


ELEMENTWISE_TAG = torch.Tag.pointwise
SOFTMAX_PARTS = {"aten::amax", "aten::sum", "aten::_log_softmax", "aten::_softmax", "prims::prepare_softmax_online"}


def _consumers(node: torch.fx.Node, depth: int) -> set[torch.fx.Node]:
    """Forward nodes reached from ``node`` through views, pointwise operators and softmaxes, within ``depth`` steps."""
    reached: set[torch.fx.Node] = set()
    frontier = {node}
    for _ in range(depth):
        frontier = {
            u for n in frontier for u in n.users if u not in reached and u.op == "call_function" and not is_backward(u)
        }
        reached |= frontier
        frontier = {n for n in frontier if _passes_through(n)}
    return reached


def _passes_through(node: torch.fx.Node) -> bool:
    if root(node) is not node or _schema_name(node) in SOFTMAX_PARTS:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and ELEMENTWISE_TAG in node.target.tags


def _inside(node: torch.fx.Node, graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, str, Kind]]:
    """Matmuls within the graphs that a higher-order operator holds (cond, while_loop, scan, invoke_subgraph)."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or graph.owning_module is None:
        return
    for argument in node.all_input_nodes:
        inner = getattr(graph.owning_module, str(argument.target), None) if argument.op == "get_attr" else None
        if isinstance(inner, torch.fx.GraphModule):
            for member in inner.graph.nodes:
                name = _schema_name(member)
                if member.op == "call_function" and (member.target in MATMULS or name in WITHOUT_FP8_FORM):
                    yield member, name, "opaque"
                if member.op == "call_function":
                    yield from _inside(member, inner.graph)


def _schema_name(node: torch.fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else "::"


def _namespace(node: torch.fx.Node) -> str:
    return _schema_name(node).split("::")[0]


def module_of(node: torch.fx.Node) -> tuple[str, str]:
    """Name and class of the innermost module that ``node`` came from; backward nodes carry their forward's."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return "", ""
    path, cls = list(stack.values())[-1]
    return qualified_name(path), getattr(cls, "__name__", str(cls).rsplit(".", 1)[-1])


def qualified_name(path: str) -> str:
    """The name within the model of what Dynamo calls by its path in the program: ``L['self'].layers[0].fc`` and
    ``L['model']._modules['layers']._modules['0'].fc`` are both ``layers.0.fc``."""
    parts = [quoted or bare for quoted, bare in re.findall(r"\[['\"]?([^\]'\"]+)['\"]?\]|([^.\[\]'\"()]+)", path)]
    parts = [part for part in parts if part not in ("_modules", "_parameters", "_buffers")]
    is_local = path.startswith(("L[", "G["))
    return ".".join(parts[2:] if is_local else parts)
