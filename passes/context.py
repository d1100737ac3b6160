"""What passes share: the graph's facts, what earlier passes found, and the record each pass leaves."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.fx

from fp8compile.hardware import Chip
from fp8compile.passes.measured_gemms import Measure
from fp8compile.policy import Policy
from fp8compile.recipe import OPERANDS, Gemm, Recipe
from fp8compile.site import CollectiveSite, Decision, MatmulSite, Site


@dataclass(frozen=True)
class GraphInput:
    """An input of the captured graph: its name in the user's program, and whether it is a parameter or buffer."""

    name: str
    is_parameter: bool


@dataclass
class FoundMatmul:
    """A matmul site with its nodes.

    ``first @ second`` is ``[..., m, k] @ [..., k, n]``. ``bias`` is None or what is added, scaled by ``beta``; the
    product is scaled by ``alpha``. In a grouped matmul ``offsets`` says where each group of rows ends.
    """

    site: MatmulSite
    node: torch.fx.Node
    first: torch.fx.Node | None = None
    second: torch.fx.Node | None = None
    bias: torch.fx.Node | None = None
    offsets: torch.fx.Node | None = None
    alpha: float = 1
    beta: float = 1
    decision: Decision | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def gemm(self) -> Gemm | None:
        """How it runs in FP8, casts in the order of its operands, or None if it is kept."""
        gemm = self.decision.gemm(self.site.role) if self.decision else None
        if gemm is not None and self.site.operands == OPERANDS[self.site.role][::-1]:
            return dataclasses.replace(gemm, first=gemm.second, second=gemm.first)
        return gemm


@dataclass
class FoundCollective:
    site: CollectiveSite
    node: torch.fx.Node
    decision: Decision | None = None


@dataclass
class PassRecord:
    """What one pass did: how many places it changed, why it left others alone, what else is to be said of them, and
    how long it took."""

    name: str
    matched: int = 0
    skipped: collections.Counter[str] = field(default_factory=collections.Counter)
    notes: collections.Counter[str] = field(default_factory=collections.Counter)
    milliseconds: float = 0.0


@dataclass
class PassContext:
    """One graph on its way through the passes."""

    policy: Policy
    recipe: Recipe
    chip: Chip
    inputs: tuple[GraphInput, ...]
    keeps_weight_casts: bool = False
    measure: Measure | None = None
    matmuls: list[FoundMatmul] = field(default_factory=list)
    collectives: list[FoundCollective] = field(default_factory=list)
    records: list[PassRecord] = field(default_factory=list)
    casts: collections.Counter[str] = field(default_factory=collections.Counter)

    def ask_policy(self, site: Site) -> Decision:
        """The policy's decision, with the recipe that it left to the options.

        Raises:
            TypeError: if a policy answers with something else than a decision.
        """
        decision = self.policy.decide(site)
        if not isinstance(decision, Decision):
            raise TypeError(
                f"{type(self.policy).__name__}.decide() returned {decision!r} for {site.module or '(root)'}; "
                "it must return fp8compile.use(...) or fp8compile.keep(...)"
            )
        if decision.fp8 and decision.recipe is None:
            return dataclasses.replace(decision, recipe=self.recipe)
        return decision


Pass = Callable[[torch.fx.Graph, PassContext, PassRecord], None]


def run_pass(function: Pass, graph: torch.fx.Graph, context: PassContext) -> PassRecord:
    """Run one pass and keep its record."""
    record = PassRecord(function.__name__)
    start = time.perf_counter()
    function(graph, context, record)
    record.milliseconds = (time.perf_counter() - start) * 1e3
    context.records.append(record)
    return record
