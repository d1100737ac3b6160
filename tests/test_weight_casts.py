"""Weight casts that are kept: made once for as long as the weights stay the same, and never wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import RECIPES, Block, CastRecorder, compile_fp8, mlp, normal
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile as fp8
from fp8compile import weight_casts


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every graph of weight casts that is compiled from here on."""
    made: list[Any] = []

    class Recorded(weight_casts._Kept):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(weight_casts, "_Kept", Recorded)
    return made


def train(compiled: Callable[..., Any], model: nn.Module, micro_batches: int, steps: int) -> list[torch.Tensor]:
    """-> outputs and gradients of every micro-batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        for batch in range(micro_batches):
            out = compiled(normal(32, 64, seed=100 * step + batch))
            out.square().sum().backward()
            seen += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_cast_once_a_step_whatever_the_micro_batches(recipe: str, recorder: CastRecorder) -> None:
    """Two weights, each as fprop and as dgrad read it: 4 casts a step, and 16 in four micro-batches without."""
    counts = {}
    for reuse in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = mlp(bias=False)
        compiled = compile_fp8(model, recipe=recipe, reuse_weight_casts=reuse)
        recorder.casts.clear()
        for batch in range(4):
            compiled(normal(32, 64, seed=batch)).square().sum().backward()
        counts[reuse] = sum(len(recorder.bytes_of(p)) for p in model.parameters())
    assert counts == {False: 16, True: 4}


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_kept_casts_change_no_bit(engine: str, kept: list[Any]) -> None:
    """Three steps of three micro-batches: outputs and gradients as without, bit for bit; one run a step and graph."""
    found = {}
    for reuse in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = mlp()
        found[reuse] = train(compile_fp8(model, engine=engine, reuse_weight_casts=reuse), model, 3, 3)
    assert all(torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True))
    assert [(k.ran, k.used) for k in kept] == [(3, 9), (3, 9)], "forward and backward"


def test_every_way_to_change_a_weight_is_seen(kept: list[Any]) -> None:
    torch.manual_seed(0)
    model, x = mlp(), normal(32, 64, requires_grad=False)
    compiled = compile_fp8(model, reuse_weight_casts=True)

    def load() -> None:
        model.load_state_dict({name: tensor * 1.1 for name, tensor in model.state_dict().items()})

    def write() -> None:
        with torch.no_grad():
            model[0].weight[3, 4] = 7.0

    def replace() -> None:
        model[2].weight = nn.Parameter(torch.randn(64, 128))

    with torch.no_grad():
        compiled(x)
        for change in (load, write, replace, lambda: nn.init.normal_(model[2].weight)):
            change()
            before = kept[-1].ran
            out = compiled(x)
            fresh = compile_fp8(model)(x)
            assert torch.equal(out, fresh)
            assert torch.equal(compiled(x), fresh)
            assert sum(k.ran for k in kept) >= before + 1


def test_inference_casts_once(kept: list[Any]) -> None:
    model, x = mlp(), normal(32, 64, requires_grad=False)
    compiled = compile_fp8(model, reuse_weight_casts=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = [compiled(x) for _ in range(4)]
        assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert [(k.ran, k.used) for k in kept] == [(1, 4)] * 2


def test_models_that_share_code_keep_their_own(kept: list[Any]) -> None:
    """Two models of one class are one compiled graph; what was kept for a model goes when the model goes."""
    torch.manual_seed(0)
    models = [mlp(), mlp()]
    x = normal(32, 64, requires_grad=False)

    @torch.compile(backend="fp8", options={"policy": "all", "engine": "eager", "reuse_weight_casts": True})
    def step(first: torch.Tensor, second: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ first.t()) @ second.t()

    with torch.no_grad():
        outputs = [step(m[0].weight, m[2].weight, x) for m in models * 2]
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    (only,) = kept
    assert (only.ran, only.used, len(only.results)) == (2, 4, 2)
    models.pop()
    gc.collect()
    assert len(only.results) == 1


def test_recomputed_regions_and_dynamic_sizes() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    found = {}
    for reuse in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Checkpointed()
        compiled = compile_fp8(model, dynamic=True, reuse_weight_casts=reuse)
        found[reuse] = []
        for tokens in (16, 24, 16):
            model.zero_grad()
            out = compiled(normal(2, tokens, 64))
            out.square().sum().backward()
            found[reuse] += [out.detach(), *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True))


def test_nothing_is_cut_where_nothing_is_in_fp8(kept: list[Any]) -> None:
    model = mlp()
    compile_fp8(model, policy="none", reuse_weight_casts=True)(normal(32, 64)).sum().backward()
    assert kept == []


def test_off_unless_asked_for(kept: list[Any]) -> None:
    compile_fp8(mlp())(normal(32, 64)).sum().backward()
    assert kept == []


def test_casts_of_weights_cost_nothing_then() -> None:
    """16 tokens: a Linear of 4096 x 4096 is worth FP8 only if its weight need not be cast each time."""
    with torch.device("meta"):
        model, x = nn.Linear(4096, 4096, bias=False).bfloat16(), torch.empty(16, 4096, dtype=torch.bfloat16)
    with torch.no_grad():
        previews = [
            fp8.preview(model, x, target="h100", options={"reuse_weight_casts": reuse}) for reuse in (False, True)
        ]
    assert [p.report.in_fp8 for p in previews] == [0, 1]
    assert [k.phase for k in previews[1].fp8.weight_casts] == ["weights"]
    assert previews[1].speedup > 1
    assert "when weights change" in previews[1].summary()
