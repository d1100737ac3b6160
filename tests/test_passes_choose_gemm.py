"""Choose GEMMs: which kernel runs an FP8 GEMM, by what can run it, by the cost model, by measurement; and what is
remembered of measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_passes_lower import graph_of, operands, targets
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.fx import Graph

import fp8compile
from fp8compile import Policy
from fp8compile.hardware import CHIPS, FP8_GEMM_EFFICIENCY
from fp8compile.ops import SCALED_GROUPED_MM, SCALED_MM
from fp8compile.options import Options
from fp8compile.passes import PassContext, PassRecord, measured_gemms
from fp8compile.passes.choose_gemm import CANDIDATES, LIBRARY, OURS, choose, choose_gemm, predicted_seconds, problem_of
from fp8compile.passes.lower import lower
from fp8compile.passes.measured_gemms import Measure, Problem, Remembered
from fp8compile.preview.capture import compiled
from fp8compile.preview.lowering import ASSUMED, Lowered
from fp8compile.recipe import E4M3, E5M2, RECIPES

pytest.importorskip("triton")

aten = torch.ops.aten
H100 = CHIPS["h100"]
BF16, F32 = torch.bfloat16, torch.float32
LARGE = Problem("mm", 8192, 4096, 4096, 1, (E4M3, E4M3), "rowwise", BF16, None, True)


def context(measure: Measure | None = None) -> PassContext:
    return PassContext(Policy.all(), RECIPES["rowwise"], H100, (), measure=measure)


def scaled_mm_graph(device: str = "meta", **arguments: Any) -> Graph:
    return graph_of(SCALED_MM, *operands((True, True), **arguments), BF16, True, device=device)


def after_choosing(graph: Graph, measure: Measure | None = None) -> tuple[list[Any], PassRecord]:
    """What the GEMM of a graph is lowered to."""
    record = PassRecord("choose_gemm")
    choose_gemm(graph, context(measure), record)
    lower(graph, context(), PassRecord("lower"))
    return targets(graph), record


# --- What can run a problem -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"scales": "tensorwise"}, None),
        ({"scales": "tensorwise", "out": F32}, None),
        ({"scales": "tensorwise", "dtypes": (E4M3, E5M2)}, None),
        ({"dtypes": (E5M2, E4M3)}, None),
        ({"bias": BF16}, None),
        ({"kind": "bmm", "count": 4}, "not batches"),
        ({"scales": "mixed"}, "both tensorwise or both rowwise"),
        ({"out": F32}, "bfloat16 if scales are rowwise"),
        ({"out": torch.float16}, "bfloat16 if scales are rowwise"),
        ({"dtypes": (E4M3, E5M2)}, "E4M3 as second operand"),
        ({"kind": "grouped", "count": 4}, None),
        ({"kind": "grouped", "count": 4, "scales": "tensorwise"}, "rowwise scales only"),
        ({"kind": "grouped", "count": 4, "out": F32}, "bfloat16 only"),
        ({"kind": "grouped", "count": 4, "dtypes": (E5M2, E4M3)}, "E4M3 only"),
    ],
)
def test_what_the_library_refuses_ours_runs_and_the_reason_is_told(change: dict[str, Any], reason: str | None) -> None:
    """The library's kernel where it can run and nothing tells that ours is faster; else ours, whatever is measured."""
    problem = replace(LARGE, **change)

    def ours_is_slow(_: Problem, candidate: str) -> float:
        return 2.0 if candidate == OURS else 1.0

    for measure in (None, ours_is_slow):
        chosen, why = choose(problem, context(measure))
        assert chosen == (OURS if reason else LIBRARY)
        assert reason is None or reason in why


def test_one_row_is_not_taken_for_rowwise_scales() -> None:
    """M = 1: the library would take the only scale of a for a tensorwise one beside N scales of b."""
    (node,) = [n for n in scaled_mm_graph(m=1).nodes if n.op == "call_function"]
    assert problem_of(node).scales == "mixed"


def test_a_scale_of_b_shared_by_all_groups_is_no_rowwise_scale() -> None:
    rows, groups, n, k = 32, 2, 16, 32
    data = torch.randn(rows, k).to(E4M3), torch.randn(groups, n, k).to(E4M3)
    ends = torch.tensor([16, 32], dtype=torch.int32)
    for scales_of_b, expected in ((groups, "rowwise"), (1, "mixed")):
        arguments = (*data, torch.ones(rows, 1), torch.ones(scales_of_b, n, 1), ends, BF16, True)
        (node,) = [n for n in graph_of(SCALED_GROUPED_MM, *arguments, device="meta").nodes if n.op == "call_function"]
        problem = problem_of(node)
        assert problem.scales == expected
        assert (problem.kind, problem.m, problem.n, problem.k, problem.count) == ("grouped", rows, n, k, groups)


# --- By the cost model ------------------------------------------------------------------------------------------------


def test_predicted_time_is_the_roofline_of_the_shape() -> None:
    """By hand, for 8192x4096x4096 at the fraction of the peak that each kernel reaches: arithmetic is what takes long.
    For 16 rows: reading b is."""
    for name, efficiency in FP8_GEMM_EFFICIENCY.items():
        arithmetic = 2 * 8192 * 4096 * 4096 / (1979e12 * efficiency)
        assert predicted_seconds(LARGE, name, H100) == pytest.approx(arithmetic + 2e-6)
    read = (16 * 4096 + 4096 * 4096 + 2 * 16 * 4096) / (0.85 * 3.35e12)
    assert predicted_seconds(replace(LARGE, m=16), LIBRARY, H100) == pytest.approx(read + 2e-6)


def test_ours_is_taken_only_where_it_is_predicted_well_ahead() -> None:
    """A few percent between two kernels is less than the model knows. A bias that the library cannot add makes it read
    and write the result once more, which is more than that where the result is large beside K."""
    assert choose(LARGE, context())[0] == LIBRARY
    with_bias = replace(LARGE, scales="tensorwise", m=8192, n=8192, k=512, bias=F32)
    assert not with_bias.bias_fits
    chosen, why = choose(with_bias, context())
    assert chosen == OURS
    assert why.startswith("predicted library ")
    assert choose(replace(with_bias, bias=BF16), context())[0] == LIBRARY


# --- By measurement ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fastest", [LIBRARY, OURS])
def test_the_measured_faster_kernel_is_what_the_graph_runs(fastest: str) -> None:
    """Both candidates are measured, on the problem of the graph; the lowered graph launches the faster, and the note
    says what each took."""
    asked = []

    def measure(problem: Problem, candidate: str) -> float:
        asked.append((problem, candidate))
        return 1e-6 if candidate == fastest else 3e-6

    found, record = after_choosing(scaled_mm_graph(), measure)
    (problem,) = {problem for problem, _ in asked}
    assert problem == Problem("mm", 48, 32, 64, 1, (E4M3, E4M3), "rowwise", BF16, None, True)
    assert [candidate for _, candidate in asked] == [LIBRARY, OURS]
    assert (triton_kernel_wrapper_functional in found) is (fastest == OURS)
    assert (aten._scaled_mm.default in found) is (fastest == LIBRARY)
    (note,) = record.notes
    name = CANDIDATES[SCALED_MM][fastest].name
    slow, quick = ("3.0", "1.0") if fastest == OURS else ("1.0", "3.0")
    assert note == f"48x32x64 rowwise to bfloat16: {name}, measured library {slow} µs, ours {quick} µs"


def test_a_kernel_that_fails_is_out_of_the_choice_and_told() -> None:
    def measure(problem: Problem, candidate: str) -> float:
        if candidate == LIBRARY:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore lines")
        return 1.0

    found, record = after_choosing(scaled_mm_graph(), measure)
    assert triton_kernel_wrapper_functional in found
    (note,) = record.notes
    assert note.endswith("; aten._scaled_mm failed: CUBLAS_STATUS_NOT_SUPPORTED")

    def fails(problem: Problem, candidate: str) -> float:
        raise RuntimeError("out of memory")

    assert choose(LARGE, context(fails)) == choose(LARGE, context())


def test_dynamic_sizes_are_measured_as_traced_and_guard_nothing() -> None:
    """The step for any number of tokens measures the number it saw first and compiles once."""
    asked: list[Problem] = []

    def measure(problem: Problem, candidate: str) -> float:
        asked.append(problem)
        return 1.0 if candidate == OURS else 2.0

    lowered, model = Lowered(), nn.Linear(64, 48).to(BF16)
    options = Options.parse({"target": "h100", "policy": "all", "recipe": "rowwise"})
    step = compiled(model, H100, options, lowered)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("fp8compile.backend._measure", lambda: measure)
        patch.setitem(ASSUMED, "max_autotune", True)
        x = torch.randn(80, 64, dtype=BF16)
        torch._dynamo.mark_dynamic(x, 0)
        step(x)
        with torch._dynamo.config.patch(error_on_recompile=True):
            step(torch.randn(33, 64, dtype=BF16))
            step(torch.randn(144, 64, dtype=BF16))
    assert {problem.m for problem in asked} == {80}
    (graph,) = lowered.graphs
    assert "scaled_mm_kernel" in graph.source


def test_nothing_is_chosen_on_a_cpu() -> None:
    graph, record = scaled_mm_graph("cpu"), PassRecord("choose_gemm")
    choose_gemm(graph, context(), record)
    assert record.matched == 0


def test_the_report_tells_which_kernel_and_why() -> None:
    x = torch.empty(8192, 4096, dtype=BF16, device="meta")
    with torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False).to(BF16)
    with torch.no_grad():
        preview = fp8compile.preview(model, x, target="h100", options={"policy": "all"})
    told = [note for graph in preview.report.graphs for ran in graph.passes for note in ran["notes"]]
    assert any("8192x4096x4096 rowwise to bfloat16: aten._scaled_mm, predicted library" in note for note in told)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_the_mode_says_whether_to_measure(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, which stands in here: max-autotune measures, other modes do not."""
    made = []
    monkeypatch.setattr("fp8compile.backend._measure", lambda: made.append(1))
    torch._dynamo.reset()
    model = torch.compile(nn.Linear(32, 16), backend="fp8", options={"mode": mode, "policy": "none"})
    with torch.no_grad():
        model(torch.randn(4, 32))
    assert bool(made) is mode.startswith("max-autotune")


# --- What is remembered -----------------------------------------------------------------------------------------------


class Counted:
    """A measurement that says how often it was made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, problem: Problem, candidate: str) -> float:
        self.count += 1
        return problem.m * 1e-6 + (candidate == OURS)


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    measure = Counted()
    for _ in range(2):
        remembered = Remembered(measure, tmp_path, "a GPU")
        assert remembered(LARGE, LIBRARY) == 8192e-6
        assert remembered(LARGE, OURS) == 1 + 8192e-6
    assert measure.count == 2
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("device", "problem", "candidate"),
    [
        ("another GPU", LARGE, LIBRARY),
        ("a GPU", LARGE, OURS),
        ("a GPU", replace(LARGE, k=64), LIBRARY),
        ("a GPU", replace(LARGE, fast=False), LIBRARY),
        ("a GPU", replace(LARGE, out=F32), LIBRARY),
    ],
)
def test_another_question_is_measured(device: str, problem: Problem, candidate: str, tmp_path: Path) -> None:
    measure = Counted()
    Remembered(measure, tmp_path, "a GPU")(LARGE, LIBRARY)
    Remembered(measure, tmp_path, device)(problem, candidate)
    assert measure.count == 2


def test_other_versions_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Counted()
    Remembered(measure, tmp_path, "a GPU")(LARGE, LIBRARY)
    monkeypatch.setattr(measured_gemms, "_versions", lambda: {"torch": "2.99"})
    Remembered(measure, tmp_path, "a GPU")(LARGE, LIBRARY)
    assert measure.count == 2


def test_versions_cover_torch_triton_and_our_kernels() -> None:
    import triton

    versions = measured_gemms._versions()
    assert versions["torch"] == torch.__version__
    assert versions["triton"] == triton.__version__
    assert versions["kernels"]


@pytest.mark.parametrize(
    "damaged", [b"", b"{", b"[]", b"\xff\xfe", b'{"key": {}, "seconds": 1}', b"null", b'{"seconds": "soon", "key": 1}']
)
def test_a_damaged_file_is_measured_and_written_again(damaged: bytes, tmp_path: Path) -> None:
    measure = Counted()
    remembered = Remembered(measure, tmp_path, "a GPU")
    remembered(LARGE, LIBRARY)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damaged)
    assert remembered(LARGE, LIBRARY) == remembered(LARGE, LIBRARY) == 8192e-6
    assert measure.count == 2
    assert json.loads(file.read_text())["key"]["device"] == "a GPU"


def test_a_folder_that_cannot_be_written_costs_a_measurement(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    measure = Counted()
    remembered = Remembered(measure, blocked / "gemms", "a GPU")
    assert remembered(LARGE, LIBRARY) == remembered(LARGE, LIBRARY)
    assert measure.count == 2


PROCESS = """
import sys, torch
from pathlib import Path
from test_passes_choose_gemm import LARGE, LIBRARY, Counted
from fp8compile.passes.measured_gemms import Remembered
from dataclasses import replace
measure = Counted()
for m in range(16, 416, 16):
    assert Remembered(measure, Path(sys.argv[1]), "a GPU")(replace(LARGE, m=m), LIBRARY) == m * 1e-6
print(measure.count)
"""


def test_processes_at_once_share_what_they_measure(tmp_path: Path) -> None:
    """Two at the same time get right answers and leave whole files; one that comes later measures nothing."""

    def start() -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", PROCESS, str(tmp_path)]
        return subprocess.Popen(arguments, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)

    both = [start(), start()]
    counts = [int(process.communicate(timeout=300)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert 25 <= sum(counts) <= 50
    assert len(list(tmp_path.iterdir())) == 25
    later = start()
    assert later.communicate(timeout=300)[0].split() == ["0"]
