"""Launch a kernel on real tensors, or record its launch in the graph that is being traced."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses.fake_tensor import FakeTensor
from triton.tools.tensor_descriptor import TensorDescriptor


def launch(
    kernel: Any,
    programs: int | torch.SymInt,
    arguments: Mapping[str, Any],
    *,
    writes: Sequence[str],
    blocks: Mapping[str, tuple[int, ...]],
    num_warps: int,
    num_stages: int,
) -> dict[str, torch.Tensor]:
    """Run ``kernel[(programs,)](**arguments)``; while a graph is traced, record the launch in it.

    Args:
        kernel: a jit function, compiled or interpreted.
        programs: size of the grid.
        arguments: all arguments of the kernel by name. Tensors that ``blocks`` names are passed as tensor descriptors.
        writes: names of the arguments that the kernel writes.
        blocks: block shape of each tensor descriptor. In the kernel's signature they come behind every pointer: each
            is several parameters to the compiler, and Inductor, which looks up what a kernel writes by position,
            counts one.
        num_warps, num_stages: as in Triton.

    Returns:
        What has been written, by name. In a graph these are new values, so use them and not the arguments.
    """
    # Descriptors are made by the host. Made by the kernel they need scratch memory, of which torch 2.11 allocates one
    # program's share for the whole grid when it compiles ahead of time. wrap_triton does not record them, so we do.
    if any(isinstance(argument, FakeTensor) for argument in arguments.values()):
        kernel = _with_options(kernel, num_warps, num_stages)
        return _record(kernel, programs, arguments, writes, blocks)
    described = {name: TensorDescriptor.from_tensor(arguments[name], list(block)) for name, block in blocks.items()}
    kernel[(programs,)](**{**arguments, **described}, num_warps=num_warps, num_stages=num_stages)
    return {name: arguments[name] for name in writes}


def _record(
    kernel: Any,
    programs: int | torch.SymInt,
    arguments: Mapping[str, Any],
    writes: Sequence[str],
    blocks: Mapping[str, tuple[int, ...]],
) -> dict[str, torch.Tensor]:
    descriptors: dict[str, Any] = {name: ("stable", (list(block),)) for name, block in blocks.items()}
    return triton_kernel_wrapper_functional(
        kernel_idx=kernel_side_table.add_kernel(kernel),
        constant_args_idx=kernel_side_table.add_constant_args({}),
        grid=[(programs, 1, 1)],
        tma_descriptor_metadata=descriptors,
        kwargs=dict(arguments),
        tensors_to_clone=list(writes),  # Inductor writes in place where it can
    )


@functools.cache
def _with_options(kernel: Any, num_warps: int, num_stages: int) -> Any:
    """The kernel with the only configuration it has: how Inductor learns of warps and stages."""
    return triton.autotune(configs=[triton.Config({}, num_warps=num_warps, num_stages=num_stages)], key=[])(kernel)
