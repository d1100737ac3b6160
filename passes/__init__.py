"""The passes, in the order in which a graph goes through them.

A pass is a function of a graph, a :class:`~fp8compile.passes.context.PassContext` and the record that it fills.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.fx

from fp8compile.passes.choose_gemm import choose_gemm
from fp8compile.passes.context import FoundCollective, FoundMatmul, GraphInput, Pass, PassContext, PassRecord, run_pass
from fp8compile.passes.decide import decide
from fp8compile.passes.find_sites import find_sites, qualified_name
from fp8compile.passes.fuse_block_casts import fuse_block_casts
from fp8compile.passes.inductor_decompositions import restore_decompositions
from fp8compile.passes.lower import lower
from fp8compile.passes.pointwise_convolutions import pointwise_convolutions
from fp8compile.passes.quantize import quantize
from fp8compile.passes.verify import VerificationError, verify

JOINT_PASSES: list[Pass] = [pointwise_convolutions, find_sites, decide, quantize, restore_decompositions]
"""On the joint graph in training, on the forward graph in inference."""

POST_GRAD_PASSES: list[Pass] = [choose_gemm, fuse_block_casts, lower]
"""On the forward and on the backward graph, after partitioning."""


def run_passes(
    passes: list[Pass],
    graph: torch.fx.Graph,
    context: PassContext,
    *,
    check: bool = False,
    after_each: Callable[[str, torch.fx.Graph], None] | None = None,
) -> None:
    """Run ``passes`` in order; with ``check``, verify after each. ``after_each`` sees the graph after every pass."""
    for function in passes:
        run_pass(function, graph, context)
        if after_each is not None:
            after_each(function.__name__, graph)
        if check:
            run_pass(verify, graph, context)


__all__ = [
    "JOINT_PASSES",
    "POST_GRAD_PASSES",
    "FoundCollective",
    "FoundMatmul",
    "GraphInput",
    "Pass",
    "PassContext",
    "PassRecord",
    "VerificationError",
    "qualified_name",
    "run_passes",
]
