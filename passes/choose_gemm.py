"""Choose GEMMs: for every FP8 GEMM on a GPU, the library's kernel or ours, by the cost model or by measurement.

Where nothing speaks against it the library is taken, which others have measured: the cost model has to see ours ahead
by more than it can be trusted with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile import ops
from fp8compile.hardware import FP8_GEMM_EFFICIENCY, Chip
from fp8compile.passes.context import PassContext, PassRecord
from fp8compile.passes.dataflow import size_hint, value
from fp8compile.passes.measured_gemms import Measure, Problem, Scales
from fp8compile.recipe import E4M3

log = logging.getLogger("fp8compile")

LIBRARY, OURS = "library", "ours"
TRUSTED = 0.1
"""The cost model's predictions of two kernels differ by more than this, or say nothing."""
CHOSEN = "fp8compile_gemm"
"""Where a GEMM's node keeps the name of its candidate, in ``meta``."""


@dataclass(frozen=True)
class Candidate:
    """A way to run a GEMM.

    Attributes:
        name: as it is shown. refuses: why it cannot run a problem, or None.
        extra: bytes and launches besides those of the GEMM itself.
    """

    name: str
    refuses: Callable[[Problem], str | None]
    extra: Callable[[Problem], tuple[int, int]]


def choose_gemm(graph: torch.fx.Graph, context: PassContext, record: PassRecord) -> None:
    """Note on every FP8 GEMM of a GPU which kernel runs it; ``lower`` obeys."""
    for node in graph.nodes:
        if node.target not in CANDIDATES or value(node).device.type == "cpu":
            continue
        problem = problem_of(node)
        chosen, why = choose(problem, context)
        node.meta[CHOSEN] = chosen
        record.matched += 1
        note = f"{problem}: {CANDIDATES[node.target][chosen].name}, {why}"
        record.notes[note] += 1
        log.debug("%s: %s", node.name, note)


def chosen_for(node: torch.fx.Node) -> str:
    """The name of the candidate that runs ``node``: the noted one, else the first that can."""
    noted: str | None = node.meta.get(CHOSEN)
    return noted or next(iter(_able(problem_of(node))[0]))


def problem_of(node: torch.fx.Node) -> Problem:
    """What a ``scaled_mm`` or ``scaled_grouped_mm`` multiplies. Dynamic sizes are hints: a choice needs no guard."""
    a, b, scale_a, scale_b = (value(argument) for argument in node.args[:4])  # type: ignore[arg-type]
    *_, last, out_dtype, fast = node.args
    grouped = node.target is ops.SCALED_GROUPED_MM
    bias = value(last) if isinstance(last, torch.fx.Node) and not grouped else None
    by_row = [not statically_known_true(scale.shape[-2] == 1) for scale in (scale_a, scale_b)]
    scales: Scales = "rowwise" if all(by_row) else "mixed" if any(by_row) else "tensorwise"
    if grouped and scale_b.dim() == 3 and statically_known_true(scale_b.shape[0] != b.shape[0]):
        scales = "mixed"
    return Problem(
        kind="grouped" if grouped else "bmm" if a.dim() == 3 else "mm",
        m=size_hint(a.shape[-2]),
        n=size_hint(b.shape[-2]),
        k=size_hint(a.shape[-1]),
        count=size_hint(b.shape[0]) if b.dim() == 3 else 1,
        dtypes=(a.dtype, b.dtype),
        scales=scales,
        out=out_dtype,  # type: ignore[arg-type]
        bias=None if bias is None else bias.dtype,
        fast=bool(fast),
    )


def choose(problem: Problem, context: PassContext) -> tuple[str, str]:
    """-> name of the candidate, and why it."""
    able, refusals = _able(problem)
    if len(able) == 1:
        (only,) = able
        return only, "; ".join(refusals)
    if context.measure is not None:
        measured, failed = _measured(problem, able, context.measure)
        if measured:
            return min(measured, key=measured.__getitem__), "; ".join([f"measured {_listed(measured)}", *failed])
    predicted = {name: predicted_seconds(problem, name, context.chip) for name in able}
    first = next(iter(able))
    best = min(predicted, key=predicted.__getitem__)
    chosen = best if predicted[best] < (1 - TRUSTED) * predicted[first] else first
    return chosen, f"predicted {_listed(predicted)}"


def _able(problem: Problem) -> tuple[dict[str, Candidate], list[str]]:
    """The candidates that can run ``problem``, and why the others cannot."""
    candidates = CANDIDATES[ops.SCALED_GROUPED_MM if problem.kind == "grouped" else ops.SCALED_MM]
    refusals = {name: candidate.refuses(problem) for name, candidate in candidates.items()}
    able = {name: candidate for name, candidate in candidates.items() if refusals[name] is None}
    return able, [f"{candidates[name].name} {reason}" for name, reason in refusals.items() if reason]


def _measured(problem: Problem, able: dict[str, Candidate], measure: Measure) -> tuple[dict[str, float], list[str]]:
    """Seconds of what ran, and why the rest did not."""
    measured, failed = {}, []
    for name, candidate in able.items():
        try:
            measured[name] = measure(problem, name)
        except RuntimeError as error:
            failed.append(f"{candidate.name} failed: {str(error).splitlines()[0] if str(error) else type(error)}")
            log.warning("measuring %s: %s", problem, failed[-1])
    return measured, failed


def _listed(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e6 * time:.1f} µs" for name, time in seconds.items())


def predicted_seconds(problem: Problem, candidate: str, chip: Chip) -> float:
    """Roofline time: the longer of arithmetic, at the rate that such kernels reach, and of reads and writes; and what
    comes besides the GEMM."""
    p = problem
    matrices = 1 if p.kind == "mm" else p.count
    a, out = ((p.m if p.kind == "grouped" else matrices * p.m) * width for width in (p.k, p.n))
    moved = a + matrices * p.n * p.k + p.out.itemsize * out
    arithmetic = 2 * out * p.k / (chip.fp8_flops * FP8_GEMM_EFFICIENCY[candidate])
    target = ops.SCALED_GROUPED_MM if p.kind == "grouped" else ops.SCALED_MM
    more, launches = CANDIDATES[target][candidate].extra(p)
    return max(arithmetic, chip.memory_seconds(moved, 0)) + chip.memory_seconds(more, 1 + launches)


def _library_mm_refuses(p: Problem) -> str | None:
    if p.kind == "bmm":
        return "multiplies two matrices, not batches"
    if p.scales == "mixed":
        return "takes scales that are both tensorwise or both rowwise"
    if p.scales == "rowwise" and p.out != torch.bfloat16:
        return "writes bfloat16 if scales are rowwise"  # a cast of that would round twice
    if p.scales == "rowwise" and p.dtypes[1] != E4M3:
        return "takes E4M3 as second operand if scales are rowwise"
    return None


def _library_grouped_refuses(p: Problem) -> str | None:
    if p.scales != "rowwise":
        return "takes rowwise scales only"
    if p.out != torch.bfloat16:
        return "writes bfloat16 only"
    if p.dtypes != (E4M3, E4M3):
        return "multiplies E4M3 only"
    return None


def _separate_bias(p: Problem) -> tuple[int, int]:
    """A bias that does not fit into the library's GEMM is added by a kernel of its own."""
    if p.bias is None or p.bias_fits:
        return 0, 0
    return 2 * p.m * p.n * p.out.itemsize, 1


def _sums_of_splits(p: Problem) -> tuple[int, int]:
    """Where our kernel splits K, float32 parts are written, and read by another that sums them."""
    from fp8compile.kernels.configs import ceil_div, choose_config, choose_split

    config = choose_config(p.count, p.m, p.n, p.fast)
    split = choose_split(config.tiles(p.count, p.m, p.n), ceil_div(p.k, config.block_k))
    if split <= 1:
        return 0, 0
    return 2 * torch.float32.itemsize * split * p.count * p.m * p.n, 1


def _nothing(p: Problem) -> tuple[int, int]:
    return 0, 0


def _never(p: Problem) -> None:
    return None


CANDIDATES: dict[Any, dict[str, Candidate]] = {
    ops.SCALED_MM: {
        LIBRARY: Candidate("aten._scaled_mm", _library_mm_refuses, _separate_bias),
        OURS: Candidate("scaled_mm_kernel", _never, _sums_of_splits),
    },
    ops.SCALED_GROUPED_MM: {
        LIBRARY: Candidate("aten._scaled_grouped_mm", _library_grouped_refuses, _nothing),
        OURS: Candidate("scaled_grouped_mm_kernel", _never, _nothing),
    },
}
"""By operator; the first that can run a GEMM is preferred."""
