"""The kernels of a lowered step, each with what it computes, moves and costs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx
from torch._inductor import ir
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fp8compile.hardware import Chip
from fp8compile.passes.dataflow import size_hint
from fp8compile.recipe import LARGEST

aten = torch.ops.aten

Kind = Literal["gemm", "attention", "memory"]
Phase = Literal["weights", "forward", "backward", "inference"]
"""The graph that a kernel belongs to; ``"weights"``: casts that run only when weights have changed."""

ATTENTION = {
    getattr(aten, name)
    for name in dir(aten)
    if name.startswith(("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_"))
}
GEMMS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm, aten._grouped_mm, aten._scaled_grouped_mm}
LIBRARIES = {"gemm": "cuBLASLt", "attention": "FlashAttention", "memory": "ATen"}


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
        name: as in the generated program. maker: Inductor, fp8compile or a library.
        kind: ``"gemm"``, ``"attention"``, or ``"memory"`` for what only reads and writes.
        phase: the graph that it belongs to. computes: the ATen operators in it.
        read, written: bytes, each buffer once. flops: of a GEMM or attention (half where it is causal).
        dtype: of the operands of a GEMM, else of the first output.
        seconds: predicted.
    """

    name: str
    maker: str
    kind: Kind
    phase: Phase
    computes: str
    read: int
    written: int
    flops: int
    dtype: str
    seconds: float

    @property
    def moved(self) -> int:
        return self.read + self.written


def kernels_of(steps: Sequence[tuple[BaseSchedulerNode, list[Any]]], phase: Phase, chip: Chip) -> Iterator[Kernel]:
    """The kernels of one lowered graph, in order. ``steps``: each scheduled node with the wrapper lines it wrote."""
    for node, lines in steps:
        if isinstance(node, NopKernelSchedulerNode):
            continue
        if isinstance(node, ExternKernelSchedulerNode):
            if not isinstance(node.node, (ir.MultiOutput, ir.TMADescriptor, ir.MutationOutput)):
                yield _extern(node, phase, chip)
            continue
        yield from _generated(node, lines, phase, chip)


def _generated(node: BaseSchedulerNode, lines: list[Any], phase: Phase, chip: Chip) -> Iterator[Kernel]:
    """A node for which Inductor wrote a kernel, and what it leaves to ATen: the second halves of split reductions."""
    names = [line.kernel_name for line in lines if hasattr(line, "kernel_name") and hasattr(line, "call_args")]
    sums = [match for line in lines if isinstance(line, str) and (match := SECOND_HALF.search(line))]
    partial = sum(4 * int(match["splits"]) * int(match["columns"]) for match in sums)
    outputs = [buffer.node for buffer in node.get_outputs()]
    dtype = outputs[0].get_dtype() if outputs else torch.float32
    for index, name in enumerate(names):
        # a node that became several kernels reads and writes its buffers once
        read, written = (node.get_read_buffer_sizes(), node.get_write_buffer_sizes() + partial) if not index else (0, 0)
        seconds = chip.memory_seconds(read + written)
        yield Kernel(name, "Inductor", "memory", phase, _operators(node), read, written, 0, _short(dtype), seconds)
    for match in sums:
        read, written = (4 * int(match["splits"]) * int(match["columns"]), 4 * int(match["columns"]))
        seconds = chip.memory_seconds(read + written)
        yield Kernel("sum", "ATen", "memory", phase, "second half of a split sum", read, written, 0, "float32", seconds)


SECOND_HALF = re.compile(r"\.view\((?P<splits>\d+), (?P<columns>\d+)\)\.(sum|amin|amax|prod)\(dim=0\)")
"""How the wrapper finishes a reduction over rows that Inductor fused with one over columns."""


def _extern(node: ExternKernelSchedulerNode, phase: Phase, chip: Chip) -> Kernel:
    """A call of a library, or of a Triton kernel that is not Inductor's."""
    kernel: Any = node.node
    if isinstance(kernel, ir.UserDefinedTritonKernel):
        return _user_defined(kernel, phase, chip)
    target = getattr(kernel, "op_overload", None)
    origins = [o for o in kernel.get_origins() if target is None or o.target is target]
    origin = kernel.get_origin_node() or (origins[0] if len(origins) == 1 else None)
    packet = getattr(target or getattr(origin, "target", None), "overloadpacket", None)
    kind: Kind = "gemm" if packet in GEMMS else "attention" if packet in ATTENTION else "memory"
    operands = [leaf.meta["val"] for leaf in origin.all_input_nodes] if origin is not None else []
    dtype = next((val.dtype for val in operands if isinstance(val, torch.Tensor)), torch.float32)
    flops = _flops(origin, packet) if origin is not None else 0
    read, written = node.get_read_buffer_sizes(), node.get_write_buffer_sizes()
    name = str(kernel.get_kernel_name())
    return _timed(name, LIBRARIES[kind], kind, phase, str(packet or name), read, written, flops, dtype, chip)


def _user_defined(kernel: ir.UserDefinedTritonKernel, phase: Phase, chip: Chip) -> Kernel:
    function: Any = kernel.get_kernel_and_metadata()[0]
    origin = next(o for o in kernel.get_origins() if "kernel_idx" in o.kwargs)
    arguments: dict[str, Any] = origin.kwargs["kwargs"]
    changed = {argument.get_name() for argument in kernel.mutable_args}
    sizes: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for buffer in kernel.inputs:
        buffer = buffer.tensor if isinstance(buffer, ir.TMADescriptor) else buffer
        assert isinstance(buffer, ir.IRNode)
        numel = V.graph.sizevars.optimization_hint(buffer.get_numel(), fallback=0)
        sizes[buffer.get_name() in changed][buffer.get_name()] = numel * buffer.get_dtype().itemsize
    name = function.fn.__name__
    is_gemm = {"M", "N", "K"} <= set(arguments)
    sides = [_hint(arguments.get(name, 1)) for name in ("BATCH", "M", "N", "K")]
    flops = 2 * math.prod(sides) if is_gemm else 0
    shown = arguments["a"] if is_gemm else next(a for a in arguments.values() if isinstance(a, torch.fx.Node))
    maker = "fp8compile" if function.fn.__module__.startswith("fp8compile.") else "user"
    return _timed(
        name,
        maker,
        "gemm" if is_gemm else "memory",
        phase,
        name.removesuffix("_kernel"),
        sum(sizes[False].values()),
        sum(sizes[True].values()),
        flops,
        shown.meta["val"].dtype,
        chip,
    )


def _timed(
    name: str,
    maker: str,
    kind: Kind,
    phase: Phase,
    computes: str,
    read: int,
    written: int,
    flops: int,
    dtype: torch.dtype,
    chip: Chip,
) -> Kernel:
    """A kernel with its predicted time: the longer of its arithmetic and its reads and writes, plus a launch."""
    rate = chip.rate(fp8=dtype in LARGEST, blocks=name == "block_scaled_mm_kernel")
    seconds = max(flops / rate if flops else 0.0, chip.memory_seconds(read + written, 0)) + chip.launch
    return Kernel(name, maker, kind, phase, computes, read, written, flops, _short(dtype), seconds)


def _flops(origin: torch.fx.Node, packet: Any) -> int:
    args, kwargs, out = torch.fx.map_arg((origin.args, origin.kwargs, origin), lambda node: _sized(node.meta["val"]))
    if packet in ATTENTION:
        shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
        # every query head has its keys; torch 2.11 does not count keys that several heads share
        shapes = [torch.Size((s[0], shapes[0][1], *s[2:])) for s in shapes[:4] if len(s) == 4]
        causal = any(arg is True for arg in args) or kwargs.get("is_causal", False)
        count = sdpa_flop_count(*shapes[:3]) if "backward" not in str(packet) else sdpa_backward_flop_count(*shapes[:4])
        return int(count) // (2 if causal else 1)
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=out))


def _sized(leaf: Any) -> Any:
    """A tensor of hints where sizes are dynamic: counting by them adds no guard."""
    if isinstance(leaf, torch.Tensor):
        return torch.empty([_hint(size) for size in leaf.shape], dtype=leaf.dtype, device="meta")
    return _hint(leaf) if isinstance(leaf, torch.SymInt) else leaf


def _hint(size: Any) -> int:
    """A size, or the one that a dynamic size had when it was traced."""
    return size_hint(size.meta["val"] if isinstance(size, torch.fx.Node) else size)


def _operators(node: BaseSchedulerNode) -> str:
    """The ATen operators that a fused kernel computes, each once, in the graph's order."""
    origins = {o for part in node.get_nodes() if part.node is not None for o in part.node.get_origins()}
    order = {o: i for o in origins for i, other in enumerate(o.graph.nodes) if other is o}
    packets = [getattr(o.target, "overloadpacket", o.target) for o in sorted(origins, key=lambda o: order[o])]
    names = [str(packet).removeprefix("aten.").removeprefix("prims.") for packet in packets]
    return ", ".join(dict.fromkeys(names))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
