"""Shared fixtures: one thread, a fresh Dynamo around every test, and a recorder of what is cast at run time."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch
from models import CastRecorder

from fp8compile import formulas


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Every test compiles from nothing, with the same random numbers, and leaves no compiled code behind."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CastRecorder:
    """Sees every cast that ``engine="eager"`` executes from here on."""
    record = CastRecorder()
    monkeypatch.setattr(formulas, "quantize", record.quantize)
    monkeypatch.setattr(formulas, "quantize_transposed", record.quantize_transposed)
    monkeypatch.setattr(formulas, "quantize_block", record.quantize_block)
    return record
