"""Reports: what was decided for every matmul and collective of a model, and why."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from fp8compile.passes import PassContext
from fp8compile.recipe import ROLES


@dataclass(frozen=True)
class Row:
    """One site. ``recipe`` is None if it is kept; ``notes`` say what was padded, or what FP8 would have cost."""

    name: str
    op: str
    module: str
    role: str
    shape: str
    fp8: bool
    recipe: str | None
    reason: str
    notes: tuple[str, ...] = ()
    flops: int = 0


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a graph keeps between forward and backward, parameters not counted: as rewritten, and without us."""

    fp8: int
    high_precision: int


@dataclass
class GraphReport:
    """One compiled graph: its rows, what each pass did, how many casts it makes, what it keeps for the backward."""

    rows: list[Row]
    passes: list[dict[str, Any]]
    casts: dict[str, int]
    has_backward: bool
    saved: SavedBytes | None = None

    @classmethod
    def of(cls, context: PassContext, has_backward: bool) -> GraphReport:
        rows = [
            Row(
                name=found.site.name,
                op=found.site.op,
                module=found.site.module or found.site.weight or "(root)",
                role=found.site.role,
                shape=found.site.shape,
                fp8=found.gemm is not None,
                recipe=found.decision.recipe.name if found.decision and found.decision.recipe else None,
                reason=found.decision.reason if found.decision else "",
                notes=tuple(found.notes),
                flops=found.site.flops,
            )
            for found in context.matmuls
        ]
        rows += [
            Row(
                name=found.site.name,
                op=found.site.op,
                module=found.site.module or "(root)",
                role="collective",
                shape="×".join(map(str, found.site.shape)),
                fp8=False,
                recipe=None,
                reason=found.decision.reason if found.decision else "",
            )
            for found in context.collectives
        ]
        report = cls(rows, [], dict(context.casts), has_backward)
        report.add_passes(context)
        return report

    def add_passes(self, context: PassContext) -> None:
        """Note what the passes that ran in ``context`` did: name, matched, skipped by reason, notes, milliseconds."""
        self.passes += [
            {
                "pass": r.name,
                "matched": r.matched,
                "skipped": dict(r.skipped),
                "notes": dict(r.notes),
                "milliseconds": round(r.milliseconds, 3),
            }
            for r in context.records
        ]


@dataclass
class Report:
    """What was decided for a model: one row per site, over all of its graphs.

    Attributes:
        graphs: the compiled graphs, in the order in which they were captured.
        graph_breaks: why the model is more than one graph, a reason each; empty for a single graph.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """All sites: module, role, shape, fp8, recipe, reason."""
        return [row for graph in self.graphs for row in graph.rows]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def in_fp8(self) -> int:
        return sum(row.fp8 for row in self.rows)

    @property
    def kept(self) -> dict[str, int]:
        """How many sites were kept, by reason, most frequent first."""
        return dict(collections.Counter(row.reason for row in self.rows if not row.fp8).most_common())

    @property
    def casts(self) -> dict[str, int]:
        """Casts to FP8 in one step, by operand."""
        total: collections.Counter[str] = collections.Counter()
        for graph in self.graphs:
            total.update(graph.casts)
        return dict(total)

    @property
    def saved(self) -> SavedBytes | None:
        """Bytes kept for backward over all graphs; None if that was not measured or nothing is trained."""
        measured = [graph.saved for graph in self.graphs if graph.saved is not None]
        if not measured:
            return None
        return SavedBytes(sum(s.fp8 for s in measured), sum(s.high_precision for s in measured))

    def summary(self) -> str:
        """Totals, without the rows."""
        total = len(self.rows)
        flops, in_fp8 = sum(r.flops for r in self.rows), sum(r.flops for r in self.rows if r.fp8)
        share = f", {in_fp8 / flops:.0%} of their FLOPs" if flops else ""
        lines = [f"{self.in_fp8} of {total} matmuls and collectives in FP8{share}"]
        by_role = collections.Counter(row.role for row in self.rows if row.fp8)
        if by_role:
            lines.append("  in FP8: " + ", ".join(f"{by_role[role]} {role}" for role in ROLES if by_role[role]))
        lines += [f"  kept {count}: {reason}" for reason, count in self.kept.items()]
        padded = sum(row.fp8 and bool(row.notes) for row in self.rows)
        if padded:
            lines.append(f"  padded {padded}")
        if self.casts:
            lines.append(
                "  casts to FP8 per step: " + ", ".join(f"{n} {kind}" for kind, n in sorted(self.casts.items()))
            )
        if self.saved is not None:
            ratio = f" ({self.saved.fp8 / self.saved.high_precision:.0%})" if self.saved.high_precision else ""
            lines.append(
                f"  kept for backward: {_bytes(self.saved.fp8)}, without FP8 {_bytes(self.saved.high_precision)}{ratio}"
            )
        breaks = f", {len(self.graph_breaks)} graph break(s)" if self.graph_breaks else ", no graph breaks"
        lines.append(f"  {len(self.graphs)} graph(s){breaks}")
        lines += [f"    {reason.splitlines()[0]}" for reason in self.graph_breaks]
        return "\n".join(lines)

    def table(self) -> str:
        """The rows, aligned."""
        head = ("graph", "module", "role", "op", "M×N×K", "precision", "reason")
        cells = [
            (
                str(index),
                row.module,
                row.role,
                row.op,
                row.shape,
                f"fp8 {row.recipe}" if row.fp8 else "kept",
                "; ".join((row.reason, *row.notes)),
            )
            for index, graph in enumerate(self.graphs)
            for row in graph.rows
        ]
        widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
        lines = [
            "  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in [head, *cells]
        ]
        return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])

    def to_json(self) -> str:
        """Everything, as JSON."""
        return json.dumps({"graphs": [asdict(g) for g in self.graphs], "graph_breaks": self.graph_breaks}, indent=1)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.summary()}" if self.rows else self.summary()


def _bytes(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
        count /= 1000  # type: ignore[assignment]
    raise AssertionError
