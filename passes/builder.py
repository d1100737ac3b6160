"""Adds nodes to a graph, each with the fake value that Inductor expects in ``meta["val"]``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._mode_utils import no_dispatch

from fp8compile.ops import SHAPE_RULES

INHERITED = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "stack_trace",
    "original_aten",
    "from_node",
    "seq_nr",
    "partitioner_tag",
    "autograd_backward",
    "recompute",
    "ac_graph_id",
    "custom",
)
"""What a new node takes over from the node it is made for."""


class Builder:
    """Inserts calls one after another, behind ``after`` or in front of ``before``, on behalf of the node ``owner``."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        owner: torch.fx.Node,
        *,
        after: torch.fx.Node | None = None,
        before: torch.fx.Node | None = None,
        tag: str | None = None,
    ) -> None:
        self.graph = graph
        self.owner = owner
        self.after = self._behind_placeholders(after) if after is not None else None
        self.before = before
        self.tag = tag

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Insert ``target(*args, **kwargs)``."""
        node = self._insert(target, args, kwargs)
        node.meta["val"] = self._value(node)
        return node

    def _insert(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
        where = (
            self.graph.inserting_after(self.after)
            if self.after is not None
            else self.graph.inserting_before(self.before)
        )
        with where:
            node = self.graph.call_function(target, args, kwargs)
        if self.after is not None:
            self.after = node
        node.meta = {key: self.owner.meta[key] for key in INHERITED if key in self.owner.meta}
        if self.tag is not None:
            node.meta["partitioner_tag"] = self.tag
        return node

    def inline(self, function: Callable[..., Any], *args: Any) -> Any:
        """Insert what ``function(*args)`` does, operator by operator; launches of Triton kernels are one node each."""
        nodes = [arg for arg in args if isinstance(arg, torch.fx.Node)]

        def of_tensors(*tensors: Any) -> Any:
            given = iter(tensors)
            return function(*(next(given) if isinstance(arg, torch.fx.Node) else arg for arg in args))

        values = [node.meta["val"] for node in nodes]
        mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), contextlib.nullcontext())
        with mode:  # launches have no tensor among their arguments themselves to find it by
            traced = make_fx(of_tensors)(*values).graph
        traced.eliminate_dead_code()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        placeholders = [node for node in traced.nodes if node.op == "placeholder"]
        copies.update(zip(placeholders, nodes, strict=True))
        for node in traced.nodes:
            if node.op != "call_function":
                continue
            arguments, keywords = torch.fx.map_arg((node.args, node.kwargs), lambda n: copies[n])
            copies[node] = self._insert(node.target, arguments, keywords)
            copies[node].meta["val"] = node.meta["val"]
        return torch.fx.map_arg(traced.output_node().args[0], lambda n: copies[n])

    def _value(self, node: torch.fx.Node) -> Any:
        args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
        mode = next((v.fake_mode for v in pytree.tree_leaves(args) if isinstance(v, FakeTensor)), None)
        if mode is None:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if (rule := SHAPE_RULES.get(node.target)) is not None:  # many times faster than dispatching to a fake kernel
            shape, dtype = rule(*args)
            with no_dispatch():
                return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), args[0].device)
        with mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _behind_placeholders(self, node: torch.fx.Node) -> torch.fx.Node:
        while node.op == "placeholder" and node.next.op == "placeholder":
            node = node.next
        return node
