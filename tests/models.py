"""What the tests of whole models share: compiling with ``backend="fp8"``, running, and comparing with eager.

The reference is the model itself, copied to float64 and run eagerly. The bounds are those of HARD_CASES.md, unless a
test derives another.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fp8compile
from fp8compile import formulas
from fp8compile.report import Report

RECIPES = ("tensorwise", "rowwise", "rowwise_hp_wgrad", "rowwise_once", "block")
OUT_DB = 18.0
GRAD_DB = 17.0


def sqnr(reference: torch.Tensor, got: torch.Tensor) -> float:
    """Signal to quantization-noise ratio of ``got`` in dB, over all elements; infinite if they agree."""
    reference, got = reference.detach().double(), got.detach().double()
    noise = (reference - got).square().sum().item()
    signal = reference.square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def compile_fp8(
    model: Callable[..., Any], *, fullgraph: bool = False, dynamic: bool | None = None, **options: Any
) -> Any:
    """``torch.compile(model, backend="fp8")`` with every matmul in FP8, verified, op by op; ``options`` change that."""
    chosen = {"policy": "all", "engine": "eager", "verify": True, **options}
    return torch.compile(model, backend="fp8", options=chosen, fullgraph=fullgraph, dynamic=dynamic)


@dataclass
class Run:
    """What one forward and backward gave: outputs, and gradients by parameter name and by input position."""

    outputs: list[torch.Tensor]
    grads: dict[str, torch.Tensor | None]

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {f"output {i}": out for i, out in enumerate(self.outputs)}
        return named | {f"gradient of {name}": grad for name, grad in self.grads.items() if grad is not None}


def run(
    call: Callable[..., Any],
    inputs: Sequence[Any],
    parameters: Sequence[tuple[str, torch.Tensor]] = (),
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Run:
    """Forward, and backward where something requires a gradient. Without ``loss`` the output's gradient is random
    noise, the same in every run."""
    for _, parameter in parameters:
        parameter.grad = None
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    result = call(*inputs)
    outputs = [result] if isinstance(result, torch.Tensor) else [t for t in result if isinstance(t, torch.Tensor)]
    differentiable = [out for out in outputs if out.requires_grad]
    if loss is not None:
        loss(result).backward()
    elif differentiable:
        generator = torch.Generator().manual_seed(1)
        noise = [
            torch.randn(out.shape, generator=generator, dtype=torch.float32).to(out.dtype) for out in differentiable
        ]
        torch.autograd.backward(differentiable, noise)
    grads = {name: p.grad for name, p in parameters if p.requires_grad}
    grads |= {f"input {i}": x.grad for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad}
    return Run(
        [out.detach() for out in outputs], {k: None if g is None else g.detach().clone() for k, g in grads.items()}
    )


def run_module(call: Callable[..., Any], model: nn.Module, *inputs: Any, loss: Any = None) -> Run:
    """:func:`run` with the parameters of ``model``, which ``call`` is or wraps."""
    return run(call, inputs, list(model.named_parameters()), loss)


def reference_of(model: nn.Module, *inputs: Any, loss: Any = None, count: bool = False) -> tuple[Run, int]:
    """The model and its inputs in float64, run eagerly; with ``count``, the FLOPs of its matmuls."""
    wide = copy.deepcopy(model).double()
    widened = [
        x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in inputs
    ]
    with FlopCounterMode(display=False) if count else contextlib.nullcontext() as counter:
        result = run_module(wide, wide, *widened, loss=loss)
    return result, counter.get_total_flops() if counter is not None else 0


def assert_close(reference: Run, got: Run, like: Run, out_db: float = OUT_DB, grad_db: float = GRAD_DB) -> None:
    """``got`` has the shapes and dtypes of ``like`` and the numbers of ``reference`` within the bounds; zeros stay
    zeros."""
    expected, actual, typed = reference.tensors(), got.tensors(), like.tensors()
    assert actual.keys() == typed.keys() == expected.keys()
    assert {k for k, g in got.grads.items() if g is None} == {k for k, g in like.grads.items() if g is None}
    for name, value in actual.items():
        assert (value.shape, value.dtype) == (typed[name].shape, typed[name].dtype), name
        assert value.isfinite().all(), f"{name} is not finite"
        bound = out_db if name.startswith("output") else grad_db
        assert (level := sqnr(expected[name], value)) >= bound, f"{name}: {level:.1f} dB, expected at least {bound}"


def check(
    model: nn.Module,
    *inputs: Any,
    out_db: float = OUT_DB,
    grad_db: float = GRAD_DB,
    loss: Callable[[Any], torch.Tensor] | None = None,
    compiled: Any = None,
    flops: bool = True,
    **options: Any,
) -> Report:
    """Compare ``model`` compiled for FP8 with eager, forward and backward, and return the report.

    Shapes and dtypes are those of eager in the model's own dtype, numbers are held against float64. Every site has a
    reason, and with ``flops`` the sites together do as much arithmetic as eager does: none was overlooked.
    """
    reference, expected_flops = reference_of(model, *inputs, loss=loss, count=True)
    like = run_module(model, model, *inputs, loss=loss)
    with fp8compile.collect_reports() as report:
        got = run_module(compile_fp8(model, **options) if compiled is None else compiled, model, *inputs, loss=loss)
    assert_close(reference, got, like, out_db, grad_db)
    assert all(row.reason for row in report.rows)
    if flops:
        assert sum(row.flops for row in report.rows) == expected_flops, f"a matmul is missing:\n{report}"
    return report


def fp8_nodes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes of ``graph`` that are our operators."""
    return [node for node in graph.nodes if getattr(node.target, "namespace", "") == "fp8compile"]


@dataclass
class GraphRecorder:
    """A listener for ``collect_reports`` that keeps the rewritten joint graphs."""

    graphs: list[torch.fx.Graph] = field(default_factory=list)

    def __call__(self, report: Any, before: torch.fx.Graph, after: torch.fx.Graph, context: Any) -> None:
        self.graphs.append(copy.deepcopy(after))


class CastRecorder:
    """Stands in for the casts of ``formulas``: keeps what is cast, and to which bytes, whenever one is executed."""

    def __init__(self) -> None:
        self.original = formulas.quantize, formulas.quantize_transposed, formulas.quantize_block
        self.casts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def quantize(self, call: Any, x: Any, scale: Any, dtype: torch.dtype) -> Any:
        data = self.original[0](call, x, scale, dtype)
        if call is formulas.apply:
            self.casts.append((x.detach().clone(), data.view(torch.uint8).clone()))
        return data

    def quantize_transposed(self, call: Any, x: Any, row_scale: Any, dtype: torch.dtype, rank: int, fp8: bool) -> Any:
        data, scale = self.original[1](call, x, row_scale, dtype, rank, fp8)
        if call is formulas.apply:
            if fp8:  # a cast of what these bytes were made of
                x = next(source for source, made in self.casts if torch.equal(made, x.view(torch.uint8)))
            self.casts.append((x.detach().clone(), data.mT.contiguous().view(torch.uint8)))
        return data, scale

    def quantize_block(self, call: Any, x: Any, scale: Any, shape: Any, block: Any, dtype: torch.dtype) -> Any:
        before = len(self.casts)
        data = self.original[2](call, x, scale, shape, block, dtype)
        if call is formulas.apply:
            self.casts[before:] = [(x.detach().clone(), data.contiguous().view(torch.uint8).clone())]
        return data

    def bytes_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The bytes of each cast so far whose input equals ``tensor`` or its transpose, in the orientation of
        ``tensor``."""
        found = []
        for x, data in self.casts:
            if x.shape == tensor.shape and torch.equal(x.float(), tensor.float()):
                found.append(data)
            elif x.mT.shape == tensor.shape and torch.equal(x.mT.float(), tensor.float()):
                found.append(data.mT)
        return found


def rows_by_role(report: Report) -> dict[str, list[Any]]:
    """The rows of a report by role."""
    roles: dict[str, list[Any]] = {}
    for row in report.rows:
        roles.setdefault(row.role, []).append(row)
    return roles


def mlp(width: int = 64, hidden: int = 128, **kwargs: Any) -> nn.Sequential:
    """Two Linears with a smooth activation between."""
    return nn.Sequential(nn.Linear(width, hidden, **kwargs), nn.GELU(), nn.Linear(hidden, width, **kwargs))


class Experts(nn.Module):
    """A mixture of experts after routing: tokens arrive sorted, ``counts`` says how many each expert gets."""

    def __init__(self, width: int, counts: Sequence[int]) -> None:
        super().__init__()
        self.counts = list(counts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in self.counts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(self.counts)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


class Tied(nn.Module):
    """An embedding whose weight is also the output head, and a Linear that is used twice."""

    def __init__(self, vocabulary: int = 64, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.shared = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(self.shared(torch.tanh(self.shared(x))))


class Block(nn.Module):
    """One transformer block: causal attention with separate q, k and v, and an MLP."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = mlp(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class ByteGPT(nn.Module):
    """A byte-level GPT."""

    def __init__(self, width: int = 64, layers: int = 2, context: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())


class TextBatches:
    """Batches of real text, the topics of Python's own ``pydoc_data``, in an order that the seed decides."""

    def __init__(self, batch: int = 16, context: int = 32, seed: int = 0) -> None:
        self.text = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()))
        self.random = random.Random(seed)
        self.batch, self.context = batch, context

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [self.random.randrange(len(self.text) - self.context - 1) for _ in range(self.batch)]
        rows = torch.stack([self.text[start : start + self.context + 1] for start in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def normal(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True, seed: int = 0) -> torch.Tensor:
    """Normal data that depends on nothing but its seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(requires_grad)
