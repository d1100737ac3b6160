"""Decide: FP8 or not for every site, and why: the policy, then what the target can run, then what it gains."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import networkx
import torch.fx

from fp8compile.hardware import Chip
from fp8compile.passes.casts import CastPlan, plan_casts
from fp8compile.passes.context import FoundMatmul, PassContext, PassRecord
from fp8compile.passes.dataflow import HIGH_PRECISION, depends_on_data, value
from fp8compile.recipe import BLOCK
from fp8compile.site import MatmulSite, keep

WORTH_PADDING = 1.25
"""A GEMM is padded to the target's alignment if that adds at most a quarter to its work; else it is kept."""


def decide(graph: torch.fx.Graph, context: PassContext, record: PassRecord) -> None:
    """Decide for every site; sets ``decision`` on what ``find_sites`` found."""
    for collective in context.collectives:
        collective.decision = context.ask_policy(collective.site)
    for found in context.matmuls:
        found.decision = context.ask_policy(found.site)
        if not found.decision.fp8:
            continue
        if found.gemm is None:
            found.decision = keep(f"recipe {found.decision.recipe} keeps {found.site.role} in high precision")
        elif reason := cannot_run(found, context.chip):
            found.decision = keep(reason)
        else:
            found.notes += _padding(found.site, context.chip)
    keep_what_loses(context)
    for found in context.matmuls:
        assert found.decision is not None
        if found.decision.fp8:
            record.matched += 1
        else:
            record.skipped[found.decision.reason] += 1


def cannot_run(found: FoundMatmul, chip: Chip) -> str | None:
    """Why the target cannot run this matmul in FP8, or None if it can."""
    site, gemm = found.site, found.gemm
    assert gemm is not None
    if found.first is None or found.second is None:
        return f"{site.op} has no FP8 form"
    if not set(site.dtypes) <= HIGH_PRECISION or site.out_dtype not in HIGH_PRECISION:
        return f"operands are {' and '.join(sorted({str(d).removeprefix('torch.') for d in site.dtypes}))}"
    if reason := chip.refuses(gemm.first.dtype, gemm.second.dtype):
        return reason
    if site.batch * site.m * site.n * site.k == 0:
        return "empty: a dimension is zero"
    if gemm.first.granularity == "block":
        if found.offsets is not None or value(found.first).dim() != 2 or value(found.second).dim() != 2:
            return "block scales are for products of two matrices, not for batches and groups"
        if "k" in site.dynamic:
            return f"K is dynamic: blocks of {BLOCK} along it need to know its size"
    if "n" in site.dynamic:
        return f"N is dynamic: {chip.name} needs a multiple of {chip.alignment}, and only K is padded dynamically"
    if depends_on_data(value(found.first).shape[-1]):
        return f"K depends on data, so that it cannot be padded to the multiple of {chip.alignment} that FP8 needs"
    return _too_small(site, chip) or _wasteful(site, chip)


def _too_small(site: MatmulSite, chip: Chip) -> str | None:
    features = {"m": "output features", "n": "columns", "k": "contraction"}
    # the tokens are a GEMM's M in fprop and dgrad, where any number will do
    checked = "nk" if site.role != "wgrad" or site.kind != "linear" else "mnk"
    for key in checked:
        if (size := getattr(site, key)) < chip.alignment and key not in site.dynamic:
            return f"{features[key]} {key.upper()}={size} below {chip.name}'s FP8 minimum of {chip.alignment}"
    return None


def _wasteful(site: MatmulSite, chip: Chip) -> str | None:
    sizes = {key: getattr(site, key) for key in "nk" if key not in site.dynamic}
    growth = math.prod(_aligned(size, chip) / size for size in sizes.values())
    if growth <= WORTH_PADDING:
        return None
    shape = ", ".join(f"{k.upper()} {s}→{_aligned(s, chip)}" for k, s in sizes.items() if s % chip.alignment)
    return f"padding to multiples of {chip.alignment} ({shape}) would add {growth - 1:.0%} to its work"


def _padding(site: MatmulSite, chip: Chip) -> list[str]:
    notes = []
    for key in "nk":
        size = getattr(site, key)
        if key in site.dynamic:
            notes.append(f"{key.upper()} padded to a multiple of {chip.alignment}")
        elif size % chip.alignment:
            notes.append(f"{key.upper()} padded {size}→{_aligned(size, chip)}")
    return notes


def _aligned(size: int, chip: Chip) -> int:
    return -(-size // chip.alignment) * chip.alignment


def gemm_gain(site: MatmulSite, chip: Chip, *, blocks: bool = False) -> float:
    """Seconds that the GEMM alone saves in FP8, casts not counted; ``blocks``: with scales for blocks."""
    sizes = (site.batch, site.m, site.n, site.k)
    high = chip.matmul_seconds(*sizes, fp8=False, out_bytes=site.out_dtype.itemsize)
    return high - chip.matmul_seconds(*sizes, fp8=True, blocks=blocks, out_bytes=site.out_dtype.itemsize)


def cast_costs(plan: CastPlan, chip: Chip) -> dict[Any, float]:
    """Seconds for the scale and for the data of one operand, by the key under which other operands share them.

    A tensorwise scale is a pass of its own over the tensor; a rowwise scale comes with the cast that follows it.
    """
    read, written = plan.elements * plan.itemsize, plan.elements
    own_pass = len(plan.dims) > 1
    return {
        plan.scale_key: chip.memory_seconds(read) if own_pass else 0.0,
        plan.data_key: chip.memory_seconds(read + written),
    }


def costs_of(found: FoundMatmul, context: PassContext) -> dict[Any, float]:
    """The costs of the casts that a matmul needs; casts of weights that are kept from step to step cost nothing."""
    costs: dict[Any, float] = {}
    for operand, plan in zip(found.site.operands, plan_casts(found, context.chip.alignment), strict=True):
        if not (operand == "weight" and context.keeps_weight_casts):
            costs |= cast_costs(plan, context.chip)
    return costs


def keep_what_loses(context: PassContext) -> None:
    """Of the sites that run in FP8 only if that is faster, choose those that together gain most; keep the others.

    A cast is paid once however many GEMMs read it, so GEMMs cannot be judged one by one. Choosing a set that maximizes
    the gains of its members minus the costs of the casts they need is the project-selection problem, which a minimum
    cut solves exactly: source → site (its gain), site → cast (infinite), cast → sink (its cost).
    """
    graph = networkx.DiGraph()
    open_sites: dict[int, tuple[FoundMatmul, float]] = {}
    paid: set[Any] = set()
    chip = context.chip
    in_fp8 = [(i, found, found.decision) for i, found in enumerate(context.matmuls) if found.gemm is not None]
    for _, found, decision in in_fp8:
        if decision and not decision.if_faster:
            paid.update(costs_of(found, context))
    for index, found, decision in in_fp8:
        if not decision or not decision.if_faster:
            continue
        assert found.gemm is not None
        gain = gemm_gain(found.site, chip, blocks=found.gemm.first.granularity == "block")
        open_sites[index] = (found, gain)
        costs = costs_of(found, context)
        if gain > 0:
            graph.add_edge("source", index, capacity=gain)
        else:
            graph.add_edge(index, "sink", capacity=-gain)
        for key, cost in costs.items():
            if key not in paid:
                graph.add_edge(index, key)
                graph.add_edge(key, "sink", capacity=cost)
    chosen = _source_side(graph)
    for index, (found, gain) in open_sites.items():
        assert found.decision is not None
        if index in chosen and gain > 0:
            found.decision = dataclasses.replace(found.decision, if_faster=False)
        else:
            found.notes = [_loss(found, gain, context)]
            found.decision = keep(f"slower on {chip.name}")


def _source_side(graph: networkx.DiGraph) -> set[Any]:
    """The source's side of a minimum cut; each connected component is solved by itself, which keeps this linear."""
    if "source" not in graph or "sink" not in graph:
        return set(graph)
    gains = graph["source"]
    inner = graph.subgraph(set(graph) - {"source", "sink"})
    chosen: set[Any] = set()
    for component in networkx.weakly_connected_components(inner):
        part = networkx.DiGraph()
        part.add_nodes_from(("source", "sink"))
        part.add_edges_from(("source", node, gains[node]) for node in component if node in gains)
        part.add_edges_from((node, *edge) for node in component for edge in graph[node].items())
        chosen |= networkx.minimum_cut(part, "source", "sink")[1][0]
    return chosen


def _loss(found: FoundMatmul, gain: float, context: PassContext) -> str:
    spent = sum(costs_of(found, context).values())
    return f"FP8 saves {max(gain, 0) * 1e6:.1f} µs of GEMM, its casts alone cost {spent * 1e6:.1f} µs"
