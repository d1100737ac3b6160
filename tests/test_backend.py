"""The backend as a user meets it: names, modes, engines, logging, the debug folder, explain, inference."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models import sqnr
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import fp8compile

ALL = {"policy": "all", "verify": True}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def step(compiled: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = compiled(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("backend", ["fp8", fp8compile.fp8])
def test_backend_by_name_and_as_object(backend: Any) -> None:
    model, x = mlp(), torch.randn(32, 64)
    with fp8compile.collect_reports() as report:
        out = torch.compile(model, backend=backend, options={**ALL, "engine": "eager"})(x)
    assert report.in_fp8 == len(report.rows) == 5
    assert 20 < sqnr(model(x), out) < 40  # FP8 ran: neither wrong nor exact


def test_engines_agree() -> None:
    """One rewritten graph: run op by op and through Inductor it gives the same numbers in float32, but for the order of
    float32 sums, which moves single values across a rounding boundary of FP8."""
    model, x = mlp(), torch.randn(32, 64)
    results = []
    for engine in ("eager", "inductor"):
        torch._dynamo.reset()
        results.append(step(torch.compile(model, backend="fp8", options={**ALL, "engine": engine}), model, x))
    for eager, compiled in zip(*results, strict=True):
        assert sqnr(eager, compiled) > 50


@pytest.mark.parametrize("how", ["argument", "option"])
def test_mode_reaches_inductor(how: str) -> None:
    seen = {}

    def listener(*_: Any) -> None:
        seen["max_autotune"] = torch._inductor.config.max_autotune

    options = {**ALL, "engine": "eager"}
    model, x = mlp(), torch.randn(32, 64)
    if how == "option":
        compiled = torch.compile(model, backend="fp8", options={**options, "mode": "max-autotune-no-cudagraphs"})
    else:
        compiled = torch.compile(model, backend="fp8", mode="max-autotune-no-cudagraphs")
    with fp8compile.collect_reports(listener):
        compiled(x)
    assert seen["max_autotune"] is True


def test_inductors_own_options_reach_inductor() -> None:
    seen = {}

    def listener(*_: Any) -> None:
        seen["epilogue_fusion"] = torch._inductor.config.epilogue_fusion

    options = {**ALL, "engine": "eager", "epilogue_fusion": False}
    with fp8compile.collect_reports(listener):
        torch.compile(mlp(), backend="fp8", options=options)(torch.randn(32, 64))
    assert seen["epilogue_fusion"] is False


def test_one_line_says_that_nothing_goes_to_fp8_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fp8compile"):
        torch.compile(mlp(), backend="fp8", options={"engine": "eager"})(torch.randn(32, 64))
    (message,) = [record.getMessage() for record in caplog.records if record.name == "fp8compile"]
    assert message.startswith("nothing in this graph goes to FP8")
    assert "slower on h100" in message
    assert "\n" not in message


def test_no_warning_when_fp8_runs_or_was_declined(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fp8compile"):
        for policy in ("all", "none"):
            torch._dynamo.reset()
            torch.compile(mlp(), backend="fp8", options={"engine": "eager", "policy": policy})(torch.randn(32, 64))
    assert not [record for record in caplog.records if record.name == "fp8compile"]


def test_debug_folder(tmp_path: Path) -> None:
    """A folder a graph, files that read in order, decisions as text and as JSON; debugging changes no bit."""
    model, x = mlp(), torch.randn(32, 64)
    plain = step(torch.compile(model, backend="fp8", options={**ALL, "engine": "eager"}), model, x)
    torch._dynamo.reset()
    options = {**ALL, "engine": "eager", "debug": str(tmp_path / "deep" / "debug")}
    debugged = step(torch.compile(model, backend="fp8", options=options), model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, debugged, strict=True))
    (folder,) = (tmp_path / "deep" / "debug").iterdir()
    names = [path.name for path in sorted(folder.iterdir())]
    assert names[0] == "00_joint_before.py"
    before = (folder / names[0]).read_text()
    after = next(p for p in folder.iterdir() if "after_quantize" in p.name).read_text()
    assert "fp8compile" not in before
    assert "torch.ops.fp8compile.scaled_mm" in after
    rows = json.loads(next(folder.glob("*.json")).read_text())["graphs"][0]["rows"]
    assert [row["module"] for row in rows][:2] == ["0", "2"]


def test_debug_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = {**ALL, "engine": "eager", "debug": str(tmp_path / "file" / "below")}
    with pytest.raises(Exception, match="option 'debug': cannot write to"):
        torch.compile(mlp(), backend="fp8", options=options)(torch.randn(32, 64))


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


def test_explain_counts_graphs_and_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # asking again gives the same answer
        report = fp8compile.explain(Breaks(), torch.randn(32, 64), options=ALL)
        assert len(report.graphs) == 2
        assert len(report.graph_breaks) == 1
    assert {row.module for row in report} == {"a", "b"}
    assert "1 graph break(s)" in capsys.readouterr().out


def test_explain_uses_the_options_of_a_compiled_model() -> None:
    x = torch.randn(32, 64)
    compiled = torch.compile(mlp(), backend="fp8", options={**ALL, "recipe": "rowwise"})
    assert {row.recipe for row in fp8compile.explain(compiled, x)} == {"rowwise"}
    model = mlp()
    model.compile(backend="fp8", options={**ALL, "recipe": "rowwise_hp_wgrad"})
    report = fp8compile.explain(model, x)
    assert [row.reason for row in report if row.role == "wgrad"] == [
        "recipe rowwise_hp_wgrad keeps wgrad in high precision"
    ] * 2


def test_explain_leaves_compiled_models_alone() -> None:
    """What was compiled before stays compiled."""
    model, x = mlp(), torch.randn(32, 64)
    compiled = torch.compile(model, backend="fp8", options={**ALL, "engine": "eager"})
    first = step(compiled, model, x)
    fp8compile.explain(model, x)
    with fp8compile.collect_reports() as report:
        again = step(compiled, model, x)
    assert not report.graphs
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_explain_without_memory() -> None:
    """Shapes are enough: a layer of 3 GB on fake tensors."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Linear(28672, 28672, dtype=torch.bfloat16)
        report = fp8compile.explain(model, torch.randn(8192, 28672, dtype=torch.bfloat16))
    assert [(row.role, row.fp8) for row in report] == [("fprop", True), ("wgrad", True)]


def test_frozen_weights_are_cast_once(tmp_path: Path) -> None:
    """Under Inductor's freezing the casts of weights are constants of the compiled graph: same result, half the casts
    left, and parameters are still known as such."""
    model, x = mlp().eval(), torch.randn(32, 64)
    results, casts = [], []
    for freezing in (False, True):
        torch._dynamo.reset()
        folder = tmp_path / str(freezing)
        with torch.no_grad(), torch._inductor.config.patch(freezing=freezing), fp8compile.collect_reports() as report:
            results.append(torch.compile(model, backend="fp8", options={**ALL, "debug": str(folder)})(x))
        assert report.in_fp8 == 2
        (graph,) = folder.glob("*/*post_grad_before.py")
        casts.append(graph.read_text().count("torch.ops.fp8compile.quantize.default"))
    assert casts == [4, 2]
    assert torch.equal(*results)
    assert 20 < sqnr(model(x), results[0]) < 40


def test_decisions_depend_on_the_target_and_not_on_the_machine() -> None:
    x = torch.randn(32, 64)
    reasons = {
        target: {row.reason for row in fp8compile.explain(mlp(), x, options={**ALL, "target": target})}
        for target in ("a100", "h100", "b200")
    }
    assert reasons["a100"] == {"a100 has no FP8 tensor cores"}
    assert reasons["h100"] == reasons["b200"] == {"policy: all"}


class MarksRelu(CustomGraphPass):
    """A user's own pass: turns ReLU into tanh, so that its effect shows in the result."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.tanh.default

    def uuid(self) -> str:
        return "marks relu"


def test_a_users_own_pass_runs_too() -> None:
    """Inductor has one slot for a custom pass; taking it does not drop what was there."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(32, 64)
    options = {**ALL, "engine": "eager", "joint_custom_pre_pass": MarksRelu()}
    with torch.no_grad(), fp8compile.collect_reports() as report:
        out = torch.compile(model, backend="fp8", options=options)(x)
    assert report.in_fp8 == 1
    assert sqnr(model[0](x).tanh(), out) > 20


class FirstLayer(fp8compile.Policy):
    def decide(self, site: fp8compile.MatmulSite) -> Any:
        return super().decide(site) if site.module == "0" else None


def test_a_policy_that_does_not_decide_is_an_error() -> None:
    with pytest.raises(Exception, match=r"FirstLayer\.decide\(\) returned None for 2.*fp8compile\.keep"):
        torch.compile(mlp(), backend="fp8", options={"policy": FirstLayer("all"), "engine": "eager"})(
            torch.randn(32, 64)
        )


def test_the_options_recipe_fills_in_for_a_subclass() -> None:
    class Half(fp8compile.Policy):
        def decide(self, site: fp8compile.MatmulSite) -> fp8compile.Decision:
            return super().decide(site) if site.module == "0" else fp8compile.keep("not the first")

    options = {**ALL, "policy": Half("all"), "recipe": "rowwise"}
    report = fp8compile.explain(mlp(), torch.randn(32, 64), options=options)
    assert {(row.module, row.recipe) for row in report} == {("0", "rowwise"), ("2", None)}
