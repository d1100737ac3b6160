"""How many bytes a graph keeps between forward and backward, with FP8 and without."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fp8compile.passes import PassContext
from fp8compile.passes.dataflow import is_tangent, size_hint, value, weight_names
from fp8compile.report import GraphReport, SavedBytes


def measure_saved_bytes(
    report: GraphReport, before: torch.fx.Graph, after: torch.fx.Graph, context: PassContext
) -> None:
    """Partition the graph as it was and as it is now, and note in ``report`` what each keeps."""
    if report.has_backward:
        report.saved = SavedBytes(saved_bytes(after, context), saved_bytes(before, context))


def saved_bytes(graph: torch.fx.Graph, context: PassContext) -> int:
    """Bytes of what Inductor's partitioner keeps for the backward of this joint graph, parameters not counted."""
    joint = torch.fx.GraphModule(graph.owning_module or torch.nn.Module(), copy.deepcopy(graph))
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    primals = [node for node in placeholders if not is_tangent(node)]
    parameters = weight_names(joint.graph, context.inputs)
    outputs = len(_outputs(joint.graph)) - len(primals)
    forward, _ = min_cut_rematerialization_partition(
        joint,
        [value(node) for node in placeholders],
        num_fwd_outputs=outputs,
        static_lifetime_input_indices=[i for i, node in enumerate(primals) if node in parameters],
    )
    return kept_bytes(forward.graph, outputs, {node.name for node in parameters})


def kept_bytes(forward: torch.fx.Graph, outputs: int, parameters: set[str]) -> int:
    """Bytes of what a forward graph returns behind its first ``outputs``, save the inputs called ``parameters``."""
    kept = _outputs(forward)[outputs:]
    tensors = {node for node in kept if isinstance(node, torch.fx.Node) and node.name not in parameters}
    return sum(_size(value(node)) for node in tensors)


def _outputs(graph: torch.fx.Graph) -> list[Any]:
    returned: Any = graph.output_node().args[0]
    return list(returned)


def _size(val: object) -> int:
    if not isinstance(val, torch.Tensor):
        return 0
    return math.prod(size_hint(size) for size in val.shape) * val.dtype.itemsize
