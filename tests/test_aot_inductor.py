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


def test_the_engine_must_be_inductor() -> None:
    with pytest.raises(OptionError, match="engine"):
        fp8.aoti_compile_and_package(
            torch.export.export(model(), (torch.zeros(2, 64, dtype=torch.bfloat16),)), options={"engine": "eager"}
        )
