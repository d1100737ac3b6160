"""What backward keeps: never more than without FP8, and less where FP8 data can stand in."""

from __future__ import annotations

import pytest
import torch
from models import RECIPES
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.report import SavedBytes
from fp8compile.saved import measure_saved_bytes

DIM, TOKENS = 64, 96


class PreNorm(nn.Module):
    """Norm, linear, activation, linear, residual: both linears' inputs are wanted by nothing else in the backward."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class PostNorm(nn.Module):
    """The linear reads the residual stream, which the norm's backward keeps anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))  # tanh's backward keeps its own output, which ``second`` reads
        return self.norm(y + self.second(y))


class Attention(nn.Module):
    """q, k and v share an input; the output projection reads what attention's backward keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, 4, dim // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, time, dim))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = PreNorm(nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class FrozenFirst(nn.Module):
    """Nothing is kept for a layer whose weight gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM).requires_grad_(False), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.silu(self.first(x)))


MODELS = {
    "gelu": lambda: PreNorm(nn.GELU()),
    "relu": lambda: PreNorm(nn.ReLU()),
    "silu": lambda: PreNorm(nn.SiLU()),
    "dropout": lambda: PreNorm(nn.Dropout(0.1)),
    "post norm": PostNorm,
    "attention": Attention,
    "checkpointed": Checkpointed,
    "frozen first": FrozenFirst,
    "linear": lambda: nn.Linear(DIM, DIM),
    "chain": lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)),
}


def saved(model: nn.Module, x: torch.Tensor, recipe: object, *, autocast: bool = False) -> SavedBytes:
    torch._dynamo.reset()
    with fp8compile.collect_reports(measure_saved_bytes) as report, torch.autocast("cpu", enabled=autocast):
        options = {"policy": "all", "engine": "eager", "verify": True, "recipe": recipe}
        torch.compile(model, backend="fp8", options=options)(x).float().sum().backward()
    assert report.in_fp8, report
    assert report.saved is not None
    return report.saved


def normal(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(2, TOKENS // 2, DIM, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_backward_never_keeps_more(name: str, recipe: str) -> None:
    kept = saved(MODELS[name]().bfloat16(), normal(), recipe)
    assert kept.fp8 <= kept.high_precision


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["gelu", "post norm", "attention", "linear"])
def test_backward_never_keeps_more_under_autocast(name: str, recipe: str) -> None:
    kept = saved(MODELS[name](), normal(torch.float32), recipe, autocast=True)
    assert kept.fp8 <= kept.high_precision


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_once"])
def test_fp8_stands_in_for_bf16(recipe: str) -> None:
    """Both linears of the pre-norm block keep one byte per element of their input instead of two: that is
    (1 + 4) · tokens · dim bytes less, and at most one float32 scale per row more: of the transposed operands, or, with
    one cast for both layouts, of the operands (both inputs' tokens) and of the weights as they lie."""
    kept = saved(PreNorm(nn.GELU()).bfloat16(), normal(), recipe)
    spared = 5 * TOKENS * DIM
    scales = 4 * max(DIM + 4 * DIM + 8, 2 * TOKENS + 4 * DIM + DIM)
    assert spared - scales <= kept.high_precision - kept.fp8 <= spared


def test_a_checkpointed_region_keeps_no_fp8_data() -> None:
    """Recomputation drops the casts with the rest of the region: all that is kept is the region's input."""
    kept = saved(Checkpointed().bfloat16(), normal(), "rowwise")
    assert kept.fp8 == kept.high_precision == 2 * TOKENS * DIM


def test_nothing_is_measured_in_inference() -> None:
    model = nn.Linear(DIM, DIM)
    with torch.no_grad():
        report = fp8compile.explain(model, torch.randn(TOKENS, DIM), options={"policy": "all"})
    assert report.in_fp8 == 1
    assert report.saved is None
