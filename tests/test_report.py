"""Reports: one row per site, totals that add up, and text that a person can read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from models import Block, compile_fp8, normal
from torch import nn

import fp8compile as fp8
from fp8compile import Policy
from fp8compile.report import GraphReport, Report, Row, SavedBytes


def row(**changes: Any) -> Row:
    plain: dict[str, Any] = {
        "name": "mm",
        "op": "mm",
        "module": "layer",
        "role": "fprop",
        "shape": "48×32×64",
        "fp8": True,
        "recipe": "rowwise",
        "reason": "policy: all",
        "flops": 2 * 48 * 32 * 64,
    }
    return Row(**{**plain, **changes})


def graph(*rows: Row, casts: dict[str, int] | None = None, saved: SavedBytes | None = None) -> GraphReport:
    return GraphReport(list(rows), [], casts or {}, has_backward=True, saved=saved)


KEPT = {"fp8": False, "recipe": None}


def test_rows_are_those_of_all_graphs_in_order() -> None:
    report = Report([graph(row(name="a"), row(name="b")), graph(), graph(row(name="c"))])
    assert [r.name for r in report.rows] == [r.name for r in report] == ["a", "b", "c"]


def test_kept_counts_by_reason_most_frequent_first() -> None:
    report = Report([graph(row(**KEPT, reason="x"), row()), graph(*[row(**KEPT, reason="y")] * 2)])
    assert list(report.kept.items()) == [("y", 2), ("x", 1)]
    assert report.in_fp8 == 1
    assert report.in_fp8 + sum(report.kept.values()) == len(report.rows)


def test_casts_and_saved_bytes_add_up_over_graphs() -> None:
    first = graph(row(), casts={"input in forward": 2}, saved=SavedBytes(10, 30))
    second = graph(row(), casts={"input in forward": 1, "weight in forward": 1}, saved=SavedBytes(5, 10))
    report = Report([first, second, graph()])
    assert report.casts == {"input in forward": 3, "weight in forward": 1}
    assert report.saved == SavedBytes(15, 40)
    assert Report([graph()]).saved is None


def test_summary_says_how_much_of_the_work_runs_in_fp8() -> None:
    """A share of FLOPs, not of matmuls: one of three sites here does 80 % of the work."""
    report = Report([graph(row(flops=800), row(**KEPT, flops=100), row(**KEPT, flops=100, reason="small"))])
    text = report.summary()
    assert "1 of 3 matmuls and collectives in FP8, 80% of their FLOPs" in text
    assert "kept 1: small" in text


def test_summary_counts_padding_and_breaks() -> None:
    report = Report([graph(row(notes=("N padded 712→720",)), row())], graph_breaks=["print()\nin user code"])
    text = report.summary()
    assert "padded 1" in text
    assert "1 graph break(s)" in text
    assert "print()" in text
    assert "in user code" not in text
    assert "no graph breaks" in Report([graph(row())]).summary()


def test_table_has_a_line_per_site_with_reason_and_notes() -> None:
    report = Report([graph(row(notes=("N padded 712→720",)), row(**KEPT, module="head", reason="policy: none"))])
    head, rule, *lines = report.table().splitlines()
    assert head.split() == ["graph", "module", "role", "op", "M×N×K", "precision", "reason"]
    assert set(rule) == {"-", " "}
    assert len(lines) == 2
    assert "fp8 rowwise" in lines[0]
    assert "policy: all; N padded 712→720" in lines[0]
    assert "head" in lines[1]
    assert "kept" in lines[1]
    assert "policy: none" in lines[1]
    starts = {line.index("fprop") for line in lines}
    assert starts == {head.index("role")}


def test_empty_report_is_readable() -> None:
    assert "0 of 0" in str(Report())


def test_json_holds_everything() -> None:
    report = Report([graph(row(notes=("a",)), saved=SavedBytes(1, 2))], ["reason"])
    loaded = json.loads(report.to_json())
    assert loaded["graph_breaks"] == ["reason"]
    (only,) = loaded["graphs"]
    assert only["rows"][0]["module"] == "layer"
    assert only["rows"][0]["notes"] == ["a"]
    assert only["saved"] == {"fp8": 1, "high_precision": 2}


# --- Of a real model --------------------------------------------------------------------------------------------------


def test_every_site_of_a_block_is_a_row_with_a_reason() -> None:
    """18 linear GEMMs and attention forward and backward; rows name module, role and shape."""
    with fp8.collect_reports() as report:
        compile_fp8(Block(), policy=Policy.all().keep("mlp", reason="a rule"))(normal(2, 16, 64)).sum().backward()
    assert len(report.rows) == 20
    assert all(r.reason and r.shape and r.role for r in report)
    assert {r.module for r in report if r.fp8} == {"q", "k", "v", "out"}
    assert {r.reason for r in report if r.module.startswith("mlp")} == {"a rule"}
    assert all((r.recipe is None) == (not r.fp8) for r in report)


def test_padding_is_in_the_report() -> None:
    with fp8.collect_reports() as report, torch.no_grad():
        compile_fp8(nn.Linear(64, 712))(normal(32, 64))
    (only,) = report.rows
    assert only.notes == ("N padded 712→720",)
    assert "padded 1" in str(report)


def test_passes_are_timed_and_counted() -> None:
    with fp8.collect_reports() as report, torch.no_grad():
        compile_fp8(nn.Linear(64, 64), verify=False)(normal(32, 64))
    entries = {entry["pass"]: entry for entry in report.graphs[0].passes}
    assert entries["find_sites"]["matched"] == entries["quantize"]["matched"] == 1
    assert all(entry["milliseconds"] >= 0 for entry in entries.values())


def test_collectors_nest_and_end_with_their_block() -> None:
    """An outer collector sees what an inner one sees; after the block nothing is gathered."""
    model, x = nn.Linear(64, 64), normal(32, 64)
    with fp8.collect_reports() as outer:
        with fp8.collect_reports() as inner:
            compile_fp8(model)(x)
        torch._dynamo.reset()
        compile_fp8(model)(x)
    torch._dynamo.reset()
    compile_fp8(model)(x)
    assert (len(inner.graphs), len(outer.graphs)) == (1, 2)


@pytest.mark.parametrize("raises", [True, False])
def test_listener_sees_the_graph_before_and_after(raises: bool) -> None:
    """Before: an addmm. After: a scaled matmul. An error of a listener's own reaches whoever compiles."""
    seen: list[tuple[str, str]] = []

    def listen(report: GraphReport, before: torch.fx.Graph, after: torch.fx.Graph, context: Any) -> None:
        seen.append((str(before), str(after)))
        if raises:
            raise RuntimeError("mine")

    with fp8.collect_reports(listen):
        if raises:
            with pytest.raises(Exception, match="mine"):
                compile_fp8(nn.Linear(64, 64))(normal(32, 64))
        else:
            compile_fp8(nn.Linear(64, 64))(normal(32, 64))
    ((before, after),) = seen
    assert "aten.addmm" in before
    assert "fp8compile" not in before
    assert "fp8compile.scaled_mm" in after
    assert "aten.addmm" not in after


@pytest.mark.parametrize("policy", ["all", "none"])
def test_explains_a_model_without_values(policy: str) -> None:
    """On the meta device, as on the CPU; tied weights stay tied."""
    reports = []
    for device in ("cpu", "meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device, torch.bfloat16)
        model[2].weight = model[0].weight
        x = torch.zeros(32, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        reports.append(fp8.explain(model, x, options={"policy": policy}))
    on_cpu, on_meta = reports
    assert on_meta.rows == on_cpu.rows
    assert len(on_meta.rows) == 6
    assert on_meta.saved == on_cpu.saved


class HoldsTensors(nn.Module):
    """Tensors that are neither parameters nor buffers, one of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)
        self.factor = torch.ones(64)
        self.more = [torch.ones(64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.factor + self.more[0])


def test_explains_and_previews_what_holds_other_tensors_without_values() -> None:
    rows = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            rows.append(fp8.explain(HoldsTensors(), torch.zeros(32, 64), options={"policy": "all"}).rows)
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2
    pytest.importorskip("triton")
    with torch.device("meta"):
        preview = fp8.preview(HoldsTensors(), torch.zeros(32, 64), target="h100", options={"policy": "all"})
    assert [(row.module, row.role) for row in preview.report.rows] == [(row.module, row.role) for row in rows[0]]
