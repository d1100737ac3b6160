"""AOTInductor with our passes: the package computes what ``backend="fp8"`` does, and holds what the options ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fp8compile as fp8
from fp8compile.options import OptionError

pytestmark = pytest.mark.filterwarnings("ignore")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).bfloat16().eval()


@pytest.mark.parametrize("reuse", [False, True])
def test_a_package_computes_what_the_backend_does(tmp_path: Path, reuse: bool) -> None:
    m, x = model(), torch.randn(48, 64, dtype=torch.bfloat16)
    options = {"policy": fp8.Policy.all().keep("3", reason="a test"), "verify": True}
    with fp8.collect_reports() as report:
        path = fp8.aoti_compile_and_package(
            torch.export.export(m, (x,)),
            package_path=tmp_path / "model.pt2",
            options={**options, "reuse_weight_casts": reuse},
        )
    assert [(row.module, row.fp8) for row in report.rows] == [("1", True), ("3", False)]
    assert report.casts == {"input in forward": 1, "weight in forward": 1}
    loaded = torch._inductor.aoti_load_package(path)
    with torch.no_grad():
        expected = torch.compile(m, backend="fp8", options=options)(x)
        assert torch.equal(loaded(x), expected)
        assert not torch.equal(expected, m(x))


class Unusual(nn.Module):
    """A weight without a module, a matmul that Inductor would decompose on a CPU before we see it, a tied weight, a
    buffer, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(64))
        self.unused = nn.Parameter(torch.randn(3))
        self.projection = nn.Parameter(torch.randn(64, 32))
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.tiny = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.second(self.first((x * self.mask) @ self.projection))
        return y, self.tiny(y[:1])


def test_every_matmul_is_reported_as_the_backend_reports_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    m, x = Unusual().eval(), torch.randn(48, 64)
    options = {"policy": fp8.Policy.all().keep("projection", reason="named by its parameter"), "verify": True}
    with fp8.collect_reports() as exported:
        path = fp8.aoti_compile_and_package(
            torch.export.export(m, (x,)), package_path=str(tmp_path / "model.pt2"), options=options
        )
    with fp8.collect_reports() as compiled, torch.no_grad():
        expected = torch.compile(m, backend="fp8", options=options)(x)
    assert exported.rows == compiled.rows
    assert exported.casts == compiled.casts
    assert [(row.module, row.fp8) for row in exported.rows] == [
        ("projection", False), ("first", True), ("second", True), ("tiny", False),
    ]  # fmt: skip
    for got, want in zip(torch._inductor.aoti_load_package(path)(x), expected, strict=True):
        assert torch.equal(got, want)


def test_the_engine_must_be_inductor() -> None:
    with pytest.raises(OptionError, match="engine"):
        fp8.aoti_compile_and_package(
            torch.export.export(model(), (torch.zeros(2, 64, dtype=torch.bfloat16),)), options={"engine": "eager"}
        )
