"""Quantize weights once for as long as they stay the same: over the micro-batches of a step, over calls in inference.

What a compiled graph computes from weights alone is cut out of it and compiled as a graph of its own, whose results are
kept until a weight changes. That a weight changed is seen by autograd's version counter, which every in-place operator
raises: optimizers, ``load_state_dict``, ``copy_``. Writes through ``.data`` and FSDP2's all-gathers do not raise it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch._guards import TracingContext
from torch._inductor.utils import BoxedBool
from torch._subclasses.fake_tensor import FakeTensor

from fp8compile import ops

IS_WEIGHT_GRAPH = "fp8compile_weight_graph"
"""Set in the ``meta`` of a module that holds the casts of weights."""

InnerCompile = Callable[..., Callable[[list[Any]], Any]]


@dataclass
class WeightCasts:
    """Those of one forward graph and its backward.

    Attributes:
        weights: names of the placeholders that are weights, in the joint graph and in its halves.
        derived: names of what is computed from them alone, and from which; the backward may find it among its inputs.
        runs: how often each graph of casts ran, and how often its results were used.
    """

    weights: set[str] = field(default_factory=set)
    derived: dict[str, frozenset[str]] = field(default_factory=dict)
    runs: list[_Kept] = field(default_factory=list)

    def around(self, inner_compile: InnerCompile) -> InnerCompile:
        """``inner_compile`` of graphs without their casts of weights, and of those casts."""

        def compile_without_casts(
            gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
        ) -> Callable[[list[Any]], Any]:
            names = [node.name for node in _placeholders(gm.graph)]
            casts = self._cut(gm)
            if casts is None:
                return inner_compile(gm, example_inputs, **kwargs)
            read = [names.index(node.name) for node in _placeholders(casts.graph)]
            made = [node.meta["val"] for node in _placeholders(gm.graph)[len(names) :]]
            alone = {**kwargs, "static_input_idxs": range(len(read)), "cudagraphs": BoxedBool(False)}
            with TracingContext.report_output_strides():  # of this graph nobody asks for them
                cast = inner_compile(casts, [example_inputs[i] for i in read], **alone)
            weights = [i for i, name in enumerate(names) if name in self.weights]
            kept = _Kept(cast, read, weights)
            self.runs.append(kept)
            main = inner_compile(gm, [*example_inputs, *made], **kwargs)

            def call(arguments: list[Any]) -> Any:
                arguments.extend(kept(arguments))
                return main(arguments)

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return compile_without_casts

    def _cut(self, gm: torch.fx.GraphModule) -> torch.fx.GraphModule | None:
        """Take the casts of weights out of ``gm``, where placeholders take their place; None if there are none."""
        alone = self._computed_from_weights(gm.graph)
        wanted = [node for node in alone if _is_cast(node) and any(user not in alone for user in node.users)]
        if not wanted:
            return None
        casts = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        needed = _needed_for(wanted)
        for node in gm.graph.nodes:
            if node in needed:
                copies[node] = casts.node_copy(node, lambda n: copies[n])
        casts.output(tuple(copies[node] for node in wanted))
        for node in wanted:
            last = _placeholders(gm.graph)[-1]
            with gm.graph.inserting_after(last):
                stand_in = gm.graph.placeholder(f"{node.name}_kept")
            stand_in.meta = dict(node.meta)
            node.replace_all_uses_with(stand_in)
        _return_copies(gm.graph, alone)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        module = torch.fx.GraphModule(gm, casts)
        module.meta = {**gm.meta, IS_WEIGHT_GRAPH: True}
        return module

    def _computed_from_weights(self, graph: torch.fx.Graph) -> set[torch.fx.Node]:
        """Every node but the weights themselves that depends on nothing else."""
        present = {node.name for node in _placeholders(graph)} & self.weights
        origin: dict[torch.fx.Node, frozenset[str]] = {}
        for node in graph.nodes:
            if node.name in present:
                origin[node] = frozenset({node.name})
            elif node.op == "placeholder" and self.derived.get(node.name, {""}) <= present:
                origin[node] = self.derived[node.name]
            elif node.op == "call_function" and node.all_input_nodes and all(n in origin for n in node.all_input_nodes):
                origin[node] = frozenset().union(*(origin[n] for n in node.all_input_nodes))
                self.derived[node.name] = origin[node]
        return {node for node in origin if node.op == "call_function"}


def _return_copies(graph: torch.fx.Graph, alone: set[torch.fx.Node]) -> None:
    """What the graph returns of the kept results is a copy: AOTAutograd lets the backward overwrite what it gets."""
    kept = {node for node in _placeholders(graph) if node.name.endswith("_kept")}
    output = graph.output_node()
    for node in output.all_input_nodes:
        if node in kept or (node in alone and kept & _needed_for([node])):
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            output.replace_input_with(node, copy)


def _placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _is_cast(node: torch.fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, torch.fx.Node) and source.target in ops.CASTS


def _needed_for(wanted: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    needed: set[torch.fx.Node] = set()
    pending = list(wanted)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return needed


class _Kept:
    """A graph of casts with what it returned last for each set of weights that it was called with.

    Attributes:
        cast: the graph. read: where its inputs are among the arguments. weights: where the weights are.
        ran, used: how often the graph ran, and how often its results were wanted.
    """

    def __init__(self, cast: Callable[[list[Any]], Any], read: list[int], weights: list[int]) -> None:
        self.cast = cast
        self.read = read
        self.weights = weights
        self.results: dict[tuple[int, ...], tuple[list[Any], Sequence[Any]]] = {}
        self.ran = self.used = 0

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        weights = [arguments[i] for i in self.weights]
        key = tuple(id(weight) for weight in weights)
        versions = [_version(weight) for weight in weights]
        self.used += 1
        if key not in self.results:
            for weight in weights:
                weakref.finalize(weight, self.results.pop, key, None)
        if key not in self.results or self.results[key][0] != versions:
            self.ran += 1
            self.results[key] = (versions, self.cast([arguments[i] for i in self.read]))
        return self.results[key][1]


def _version(tensor: torch.Tensor) -> object:
    """Equal while the tensor's values are; equal to nothing for inference tensors, which count no versions, and for
    fake ones, which have no values."""
    counts = not (tensor.is_inference() or isinstance(tensor, FakeTensor))
    return (tensor.data_ptr(), tensor._version) if counts else object()
