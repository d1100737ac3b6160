"""Lower captured graphs for a chip that is not here, through the same passes and the same Inductor as always.

Autograd refuses fake CUDA tensors where there is no driver. So a model is traced on the CPU; the joint graph's metadata
moves to a CUDA device before our passes see it; and from there on everything believes that the chip is present.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.fx
import torch.utils._pytree as pytree
from functorch.compile import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.utils import BoxedBool

from fp8compile.backend import Engine
from fp8compile.hardware import Chip
from fp8compile.preview.program import Kernel, Phase, kernels_of
from fp8compile.preview.stand_in import DEVICE, pretend
from fp8compile.saved import kept_bytes
from fp8compile.weight_casts import IS_WEIGHT_GRAPH

ASSUMED = {
    "fx_graph_cache": False,
    "max_autotune": False,  # it measures, and there is nothing to measure on
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "shape_padding": False,  # decided by measuring too
    "cpp_wrapper": False,
    "compile_threads": 1,
}
"""Settings of Inductor that a preview needs, whatever the user's."""


@dataclass
class LoweredGraph:
    """One graph as Inductor lowered it: the wrapper's source, and its kernels, in order."""

    phase: Phase
    graph: GraphLowering
    source: str = ""
    kernels: list[Kernel] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    mutated: list[int] = field(default_factory=list)


Runner = Callable[[LoweredGraph], Callable[[list[Any]], Any]]


@dataclass
class Lowered:
    """What the graphs of a step became: in the order in which they were compiled, and what they keep for backward."""

    graphs: list[LoweredGraph] = field(default_factory=list)
    saved: int = 0
    """Bytes that forward graphs keep for backward ones, parameters not counted."""


def previewing(chip: Chip, lowered: Lowered, runner: Runner | None = None) -> Engine:
    """The engine that lowers for ``chip``, notes what came out in ``lowered``, and runs it by ``runner``, or, if there
    is none, answers with the reference path on the CPU (which on fake tensors costs nothing)."""

    def inner_compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        on_cpu = _on_cpu(gm)
        kwargs.pop("cudagraphs", None)
        graph = lower(gm, [_moved(example, DEVICE) for example in example_inputs], chip, **kwargs)
        lowered.graphs.append(graph)
        return make_boxed_func(on_cpu) if runner is None else make_boxed_call(runner(graph))

    def before_joint(graph: torch.fx.Graph) -> None:
        move_metadata(graph, DEVICE)

    def note_saved(count: int) -> None:
        lowered.saved += count

    return Engine(inner_compile, before_joint, {**ASSUMED, "custom_partitioner_fn": _Partitioner(chip, note_saved)})


def make_boxed_call(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark ``call`` as one that takes a list of arguments and may empty it."""

    def boxed(arguments: list[Any]) -> Any:
        return call(arguments)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def lower(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], chip: Chip, **kwargs: Any) -> LoweredGraph:
    """Take a forward, backward or inference graph, its metadata on the chip, through Inductor up to the wrapper."""
    phase: Phase = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
    if gm.meta.get(IS_WEIGHT_GRAPH):
        phase = "weights"
    move_factories(gm.graph, DEVICE)
    captured: list[LoweredGraph] = []
    visits: list[tuple[GraphLowering, int, BaseSchedulerNode]] = []
    enter_context = Scheduler.enter_context

    def visit(scheduler: Scheduler, node: BaseSchedulerNode) -> None:
        from torch._inductor.virtualized import V

        visits.append((V.graph, len(V.graph.wrapper_code.lines), node))
        enter_context(scheduler, node)

    def compile_to_module(graph: GraphLowering) -> Any:
        source, _ = graph.codegen()
        captured.append(
            LoweredGraph(
                phase=phase,
                graph=graph,
                source=str(getattr(source, "value", source)),
                kernels=list(kernels_of(_steps(graph, visits), phase, chip)),
                constants=dict(graph.constants),
                mutated=[i for i, name in enumerate(graph.graph_input_names) if name in graph.mutated_inputs],
            )
        )
        raise _Captured

    with (
        pretend(chip),
        mock.patch.object(Scheduler, "enter_context", visit),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        contextlib.suppress(_Captured),
    ):
        compile_fx_inner(gm, list(example_inputs), cudagraphs=BoxedBool(False), **kwargs)
    return captured[0]


class _Captured(BaseException):
    """Ends a compilation where the wrapper would be loaded; not an Exception, which Inductor would wrap."""


def _steps(
    graph: GraphLowering, visits: list[tuple[GraphLowering, int, BaseSchedulerNode]]
) -> list[tuple[BaseSchedulerNode, list[Any]]]:
    lines = graph.wrapper_code.lines
    mine = [(start, node) for owner, start, node in visits if owner is graph]
    ends = [start for start, _ in mine[1:]] + [len(lines)]
    return [(node, lines[start:end]) for (start, node), end in zip(mine, ends, strict=True)]


class _Partitioner(CustomPartitionerFn):
    """Inductor's partitioner, believing that the chip is present. Inductor copies its settings, and this with them."""

    def __init__(self, chip: Chip, note_saved: Callable[[int], None]) -> None:
        self.chip = chip
        self.note_saved = note_saved

    def uuid(self) -> str:
        return f"fp8compile.preview {self.chip.name}"

    def __call__(
        self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        with pretend(self.chip):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        placeholders = [node.name for node in forward.graph.nodes if node.op == "placeholder"]
        parameters = {placeholders[i] for i in kwargs.get("static_lifetime_input_indices") or ()}
        self.note_saved(kept_bytes(forward.graph, kwargs["num_fwd_outputs"], parameters))
        return forward, backward


def move_metadata(graph: torch.fx.Graph, device: torch.device) -> None:
    """Let the metadata of every tensor say that it is on ``device``.

    Factories go on naming the device they named, since Inductor's constant folding calls those of the joint graph.
    """
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(lambda leaf: _moved(leaf, device), node.meta["val"])


def move_factories(graph: torch.fx.Graph, device: torch.device) -> None:
    """Let every node that names a device name ``device``."""
    for node in graph.nodes:
        if any(isinstance(leaf, torch.device) for leaf in pytree.tree_leaves((node.args, node.kwargs))):
            node.args, node.kwargs = pytree.tree_map(
                lambda leaf: device if isinstance(leaf, torch.device) else leaf, (node.args, node.kwargs)
            )


def _moved(leaf: Any, device: torch.device) -> Any:
    """A fake tensor as it would be on ``device``; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    mode = getattr(leaf, "fake_mode", None)
    with mode if mode is not None else contextlib.nullcontext():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)


def _on_cpu(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """The graph as a function of CPU tensors."""
    copy = torch.fx.GraphModule(gm, torch.fx.Graph())
    copy.graph.output(copy.graph.graph_copy(gm.graph, {}))
    move_factories(copy.graph, torch.device("cpu"))
    copy.recompile()
    return copy.forward  # type: ignore[no-any-return]
