"""Pointwise convolutions: a convolution with a kernel of one element is written as the matmul that it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import compile_fp8, fp8_nodes, normal
from torch import nn

import fp8compile as fp8
from fp8compile import Policy

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def rewrite(model: Any, x: torch.Tensor, **options: Any) -> tuple[torch.fx.Graph, fp8.Report, torch.Tensor]:
    graphs: list[torch.fx.Graph] = []
    with fp8.collect_reports(lambda report, before, after, context: graphs.append(after)) as report:
        out = compile_fp8(model, fullgraph=True, **options)(x)
        if out.requires_grad:
            out.square().sum().backward()
    (graph,) = graphs
    return graph, report, out


def skipped(report: fp8.Report) -> dict[str, int]:
    (entry,) = [entry for entry in report.graphs[0].passes if entry["pass"] == "pointwise_convolutions"]
    return entry["skipped"]


POINTWISE = {
    "1d": (nn.Conv1d(64, 32, 1), (2, 64, 24)),
    "2d": (nn.Conv2d(64, 32, 1), (2, 64, 4, 6)),
    "2d without bias": (nn.Conv2d(64, 32, 1, bias=False), (2, 64, 4, 6)),
    "3d": (nn.Conv3d(64, 32, 1), (2, 64, 2, 3, 4)),
    "one image": (nn.Conv2d(64, 32, 1), (1, 64, 4, 4)),
}


@pytest.mark.parametrize("name", sorted(POINTWISE))
@pytest.mark.parametrize("channels_last", [False, True])
def test_pointwise_convolution_runs_as_three_matmuls_in_fp8(name: str, channels_last: bool) -> None:
    """No convolution is left; output and gradients as in float64 within 20 dB; shapes and strides as in eager."""
    model, shape = POINTWISE[name]
    x = normal(*shape)
    if channels_last:
        if x.dim() != 4:
            pytest.skip("a memory format of four dimensions")
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    model.zero_grad()
    graph, report, out = rewrite(model, x, recipe="rowwise")
    assert [node for node in graph.nodes if node.target in CONVOLUTIONS] == []
    assert sorted(row.role for row in report.rows if row.fp8) == ["dgrad", "fprop", "wgrad"]
    got = [out, x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    expected_out = model(x)
    expected_out.square().sum().backward()
    expected = [expected_out, x.grad, *(p.grad for p in model.parameters())]
    for ours, reference in zip(got, expected, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (reference.shape, reference.dtype, reference.stride())
        assert (ours - reference).norm() <= 0.1 * reference.norm()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Conv2d(64, 32, 3), "kernel larger than one element"),
        (nn.Conv2d(64, 32, (1, 3)), "kernel larger than one element"),
        (nn.Conv2d(64, 32, 1, stride=2), "strided or padded"),
        (nn.Conv2d(64, 32, 1, padding=1), "strided or padded"),
        (nn.Conv2d(64, 32, 1, groups=2), "transposed or in groups"),
        (nn.ConvTranspose2d(64, 32, 1), "transposed or in groups"),
    ],
)
def test_other_convolutions_stay_with_a_reason(model: nn.Module, reason: str) -> None:
    graph, report, out = rewrite(model, normal(2, 64, 6, 6))
    assert len([node for node in graph.nodes if node.target in CONVOLUTIONS]) == 2
    assert skipped(report) == {reason: 2}
    assert {row.reason for row in report.rows} == {"sensitive: convolution"}
    torch.testing.assert_close(out, model(normal(2, 64, 6, 6)))


@pytest.mark.parametrize("policy", ["none", "default"])
def test_convolution_that_would_not_run_in_fp8_stays_a_convolution(policy: str) -> None:
    """Off means off; and a small one is kept by the default policy as the convolution that it was."""
    graph, report, _ = rewrite(nn.Conv2d(64, 32, 1), normal(2, 64, 4, 6), policy=policy)
    assert len([node for node in graph.nodes if node.target in CONVOLUTIONS]) == 2
    assert not fp8_nodes(graph)
    assert len(report.rows) == 2
    assert all(row.reason for row in report.rows)


def test_convolution_that_the_target_cannot_run_stays_a_convolution() -> None:
    """8 output channels are too few columns for fprop, too short a contraction for dgrad."""
    graph, _, _ = rewrite(nn.Conv2d(64, 8, 1), normal(2, 64, 4, 6))
    assert [node.target for node in graph.nodes if node.target in CONVOLUTIONS] == list(CONVOLUTIONS)


def test_rules_name_convolutions_as_any_module() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    _, report, _ = rewrite(Two(), normal(2, 64, 4, 6), policy=Policy.all().keep("second", reason="rule"))
    assert {row.module for row in report.rows if row.fp8} == {"first"}
    assert {row.reason for row in report.rows if not row.fp8} == {"rule"}
