"""HARD_CASES.md, Training: sharing, freezing, checkpointing, autocast, modes, resuming, policies."""

from __future__ import annotations

import collections
import copy
import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    RECIPES,
    Block,
    ByteGPT,
    CastRecorder,
    GraphRecorder,
    Run,
    TextBatches,
    Tied,
    assert_close,
    check,
    compile_fp8,
    fp8_nodes,
    mlp,
    normal,
    rows_by_role,
    run,
    run_module,
    sqnr,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import Policy


def equal(first: Run, second: Run) -> bool:
    """Whether two runs gave the same bits."""
    a, b = first.tensors(), second.tensors()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def casts_by_dtype(recorder: CastRecorder) -> collections.Counter[bytes]:
    """How often which FP8 bytes were made, whatever their orientation; forgets what was recorded."""
    found = collections.Counter(
        min(data.numpy().tobytes(), data.mT.contiguous().numpy().tobytes()) for _, data in recorder.casts
    )
    recorder.casts.clear()
    return found


# T1


@pytest.mark.parametrize("recipe", RECIPES)
def test_shared_and_tied_weights(recipe: str) -> None:
    """A Linear used twice and a head tied to the embedding: one gradient each, the sum over its uses."""
    model = Tied()
    tokens = torch.randint(0, 64, (4, 16))
    report = check(model, tokens, recipe=recipe, out_db=17, grad_db=15)
    rows = rows_by_role(report)
    assert {role: len(found) for role, found in rows.items()} == {"fprop": 3, "dgrad": 3, "wgrad": 3}
    assert {row.module for row in rows["fprop"]} == {"shared", "head"}
    assert all(row.fp8 for row in rows["fprop"])


def test_each_use_of_a_shared_layer_contributes_its_gradient(recorder: CastRecorder) -> None:
    """The gradient of a layer used twice is the sum of what two separate layers with the same weight would get; its
    weight is cast once per layout and not once per use."""

    class Twice(nn.Module):
        def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    layer = nn.Linear(64, 64, bias=False)
    separate = Twice(layer, copy.deepcopy(layer))
    shared = Twice(layer, layer)
    x = normal(32, 64)
    apart = run_module(compile_fp8(separate), separate, x)
    recorder.casts.clear()
    torch._dynamo.reset()
    with fp8compile.collect_reports() as report:
        together = run_module(compile_fp8(shared), shared, x)
    assert torch.equal(together.outputs[0], apart.outputs[0])
    total = apart.grads["first.weight"] + apart.grads["second.weight"]  # type: ignore[operator]
    assert torch.equal(together.grads["first.weight"], total)  # type: ignore[arg-type]
    assert len(report.rows) == 6
    assert len(recorder.bytes_of(layer.weight)) == 2
    assert report.casts["weight in forward"] == report.casts["weight in backward"] == 1


# T2


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_gemm_for_gradients_nobody_wants(recipe: str) -> None:
    """A frozen weight has no wgrad, an input without gradient no dgrad, and neither a cast for one."""
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32))
    model[2].weight.requires_grad_(False)
    report = check(model, normal(32, 64, requires_grad=False), recipe=recipe)
    assert sorted((row.module, row.role) for row in report.rows) == [
        ("0", "fprop"),
        ("0", "wgrad"),
        ("2", "dgrad"),
        ("2", "fprop"),
    ]
    assert report.casts["weight in forward"] == 2
    assert report.casts["weight in backward"] == 1, "only the second layer's, for its dgrad"
    kept_wgrad = recipe == "rowwise_hp_wgrad"
    assert report.casts["grad_output in backward"] == (1 if kept_wgrad else 2)
    inputs = report.casts["input in forward"] + report.casts.get("input in backward", 0)
    assert inputs == (2 if kept_wgrad else 3), "the second layer's input has no wgrad to serve"


def test_only_some_inputs_need_gradients() -> None:
    """Of two inputs through one layer, one needs a gradient: one dgrad."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 32)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.linear(y)

    report = check(Two(), normal(32, 64), normal(32, 64, requires_grad=False, seed=1))
    assert {role: len(rows) for role, rows in rows_by_role(report).items()} == {"fprop": 2, "dgrad": 1, "wgrad": 2}


def test_everything_frozen_is_inference() -> None:
    """With no gradient wanted there is no backward: fprop alone, two casts per layer."""
    model = mlp().requires_grad_(False)
    report = check(model, normal(32, 64, requires_grad=False))
    assert {row.role for row in report.rows} == {"fprop"}
    assert report.casts == {"input in forward": 2, "weight in forward": 2}


def test_a_frozen_layer_below_costs_nothing_in_backward() -> None:
    """The backward stops above the last layer that is trained."""
    model = mlp()
    model[0].requires_grad_(False)
    report = check(model, normal(32, 64, requires_grad=False))
    backward = {(row.module, row.role) for row in report.rows if row.role != "fprop"}
    assert backward == {("2", "wgrad")}
    assert "weight in backward" not in report.casts


# T3


class Checkpointed(nn.Module):
    """Two MLPs, each recomputed in the backward, or not."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp(), mlp()])
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_recomputes_the_same_bytes(recipe: str, use_reentrant: bool, recorder: CastRecorder) -> None:
    """With either kind of activation checkpointing: the same outputs and gradients, bit for bit, as without, and every
    byte string that is cast is one that is cast without checkpointing."""
    runs, casts = [], []
    x = normal(32, 64)
    for kind in (None, use_reentrant):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Checkpointed(kind)
        runs.append(run_module(compile_fp8(model, recipe=recipe), model, x))
        casts.append(casts_by_dtype(recorder))
    assert equal(*runs)
    assert casts[0].keys() == casts[1].keys()
    check(model, x, recipe=recipe, flops=False)


def test_checkpointing_keeps_less_for_backward() -> None:
    """FP8 does not undo checkpointing: what is kept for the backward stays below what the model keeps without it."""
    x = normal(256, 64)
    kept = {}
    for kind in (None, False):
        torch.manual_seed(0)
        report = fp8compile.explain(Checkpointed(kind), x, options={"policy": "all", "verify": True})
        assert report.saved is not None
        kept[kind] = report.saved
    assert kept[False].fp8 < kept[None].fp8
    assert kept[False].fp8 <= kept[False].high_precision
    assert kept[None].fp8 <= kept[None].high_precision


@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_budget_recomputes_the_same_bytes(recipe: str, recorder: CastRecorder) -> None:
    """The partitioner's memory budget moves work into the backward; numbers and FP8 bytes stay."""
    runs, casts = [], []
    x = normal(32, 64)
    for budget in (1.0, 0.5):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(mlp(), nn.Tanh(), mlp())
        with torch._functorch.config.patch(activation_memory_budget=budget):
            runs.append(run_module(compile_fp8(model, recipe=recipe), model, x))
        casts.append(casts_by_dtype(recorder))
    assert equal(*runs)
    assert casts[0].keys() == casts[1].keys()


# T4


@pytest.mark.parametrize(("engine", "recipe"), [*(("eager", recipe) for recipe in RECIPES), ("inductor", "tensorwise")])
def test_autocast_casts_float32_to_fp8_directly(engine: str, recipe: str) -> None:
    """Under autocast the float32 parameters are read by the FP8 casts themselves: no bf16 copy of a weight in the
    forward. Outputs are bf16 and gradients float32, as in eager. (A block cast of an activation, a kernel of its own,
    reads bf16.)"""
    model = mlp()
    x = normal(32, 64)

    def autocasted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call(x)

        return wrapped

    reference = run_module(model, model, x)
    like = run_module(autocasted(model), model, x)
    graphs = GraphRecorder()
    with fp8compile.collect_reports(graphs) as report:
        got = run_module(autocasted(compile_fp8(model, engine=engine, recipe=recipe)), model, x)
    assert like.outputs[0].dtype == torch.bfloat16
    assert_close(reference, got, like)
    assert report.in_fp8 == (4 if recipe == "rowwise_hp_wgrad" else 6)
    (graph,) = graphs.graphs
    weights = [
        node for node in graph.nodes if node.op == "placeholder" and node.meta["val"].shape in ((128, 64), (64, 128))
    ]
    weights = [node for node in weights if not node.name.startswith("tangents")]
    assert len(weights) == 2
    for weight in weights:
        readers = [node for node in graph.nodes if weight in node.all_input_nodes and node.op != "output"]
        copies = [node for node in readers if "convert" in str(node.target) or "_to_copy" in str(node.target)]
        assert not copies, f"{weight} is copied to another dtype"
    read = [node.args[0].meta["val"].dtype for node in fp8_nodes(graph) if "quantize" in str(node.target)]
    assert read.count(torch.float32) >= (4 if recipe == "block" else 5), "x once and both weights twice"


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_bias_in_another_dtype(bias_dtype: torch.dtype) -> None:
    """A bf16 matmul whose bias is a float32 parameter, cast where it is used."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 64).bfloat16() / 8)
            self.bias = nn.Parameter(torch.randn(48, dtype=bias_dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight, self.bias.to(x.dtype))

    check(Mixed(), normal(32, 64, dtype=torch.bfloat16))


# T5


MODES = ("train", "eval", "no_grad", "inference_mode")


def in_mode(mode: str, call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> Run:
    model.train(mode == "train")
    if mode == "no_grad":
        with torch.no_grad():
            return Run([call(x)], {})
    if mode == "inference_mode":
        with torch.inference_mode():
            return Run([call(x).clone()], {})
    return run_module(call, model, x)


@pytest.mark.parametrize("order", [*itertools.islice(itertools.permutations(MODES), 0, 24, 3)], ids="-".join)
def test_modes_in_any_order(order: tuple[str, ...]) -> None:
    """One compiled object, used for training and inference alternately, gives each time what a fresh one gives."""
    model = nn.Sequential(nn.BatchNorm1d(64, momentum=0.0), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32))
    x = normal(32, 64)
    compiled = compile_fp8(model)
    for mode in (*order, order[0]):
        got, expected = in_mode(mode, compiled, model, x), in_mode(mode, model, model, x)
        assert got.outputs[0].requires_grad is False
        assert_close(expected, got, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_inference_and_training_compute_the_same_forward(recipe: str) -> None:
    """What needs no gradient changes nothing in the numbers: the forward is the same, bit for bit, in all modes."""
    model = mlp()
    x = normal(32, 64)
    compiled = compile_fp8(model, recipe=recipe)
    outputs = [in_mode(mode, compiled, model, x).outputs[0] for mode in MODES]
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)


def test_inference_has_no_backward() -> None:
    """Under ``no_grad`` and ``inference_mode`` the report has fprop alone, and casts for nothing else."""
    model = mlp()
    for mode in ("no_grad", "inference_mode"):
        torch._dynamo.reset()
        with fp8compile.collect_reports() as report:
            in_mode(mode, compile_fp8(model), model, normal(32, 64))
        assert [(row.role, row.fp8) for row in report.rows] == [("fprop", True)] * 2
        assert report.casts == {"input in forward": 2, "weight in forward": 2}


# T6


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_cast_the_same_weight_bytes(recipe: str, recorder: CastRecorder) -> None:
    """Five micro-batches with the weights unchanged: as many casts of each weight as the report says, always to the
    same bytes; gradients accumulate to the sum. After an optimizer step the bytes are others."""
    model = mlp(bias=False)
    with fp8compile.collect_reports() as report:
        compiled = compile_fp8(model, recipe=recipe)
        compiled(normal(32, 64)).sum().backward()
    per_step = report.casts["weight in forward"] + report.casts["weight in backward"]
    assert per_step == 4, "two weights, as fprop and as dgrad read them"
    recorder.casts.clear()
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    single: dict[int, list[torch.Tensor]] = {}
    for seed in range(5):
        run_ = run_module(compiled, model, normal(32, 64, seed=seed))
        single[seed] = [run_.grads[name] for name, _ in model.named_parameters()]  # type: ignore[misc]
    found = [recorder.bytes_of(weight) for weight in weights]
    assert [len(casts) for casts in found] == [10, 10]
    if recipe in ("tensorwise", "block"):
        for casts in found:
            assert all(torch.equal(data, casts[0]) for data in casts), "fprop and dgrad read the same bytes"
    else:
        for casts in found:
            different = {data.numpy().tobytes() for data in (d.contiguous() for d in casts)}
            # two layouts; the same where all rows have the power of two of the largest
            assert len(different) == 2 or (recipe == "rowwise_once" and len(different) == 1)
    assert len(recorder.casts) == 5 * sum(report.casts.values())

    model.zero_grad()
    generator = torch.Generator()
    for seed in range(5):
        y = compiled(normal(32, 64, seed=seed))
        y.backward(torch.randn(y.shape, generator=generator.manual_seed(1)))
    for index, parameter in enumerate(model.parameters()):
        total = torch.stack([single[seed][index] for seed in range(5)]).double().sum(0)
        assert sqnr(total, parameter.grad) > 120  # type: ignore[arg-type]

    recorder.casts.clear()
    before = {data.contiguous().numpy().tobytes() for casts in found for data in casts}
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    compiled(normal(32, 64)).sum().backward()
    after = {data.contiguous().numpy().tobytes() for weight in weights for data in recorder.bytes_of(weight)}
    assert after
    assert not before & after


# T7


def train(compiled: Any, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for x in batches:
        loss = (compiled(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_resuming_equals_going_on(recipe: str) -> None:
    """Save after five steps, load into a new model, compile it anew: the next five losses are the uninterrupted run's,
    bit for bit. The state dict is the plain model's, in keys and dtypes."""
    batches = [normal(32, 64, seed=seed, requires_grad=False) for seed in range(10)]
    model = mlp()
    plain = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    compiled, optimizer = compile_fp8(model, recipe=recipe), torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = train(compiled, optimizer, batches[:5])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(compiled, optimizer, batches[5:])
    assert expected[-1] < first[0]

    torch._dynamo.reset()
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in state["model"].items()} == plain
    torch.manual_seed(99)
    resumed = mlp()
    resumed.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    optimizer.load_state_dict(state["optimizer"])
    assert train(compile_fp8(resumed, recipe=recipe), optimizer, batches[5:]) == expected


# T8


@pytest.mark.parametrize(("engine", "recipe"), [("eager", "tensorwise"), ("eager", "rowwise"), ("inductor", "rowwise")])
def test_twenty_steps_without_graph_breaks_or_recompilations(engine: str, recipe: str) -> None:
    """``fullgraph=True``, one graph, and nothing compiled after the second step while the loss goes down."""
    model = nn.Sequential(Block()) if engine == "eager" else mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shape = (2, 32, 64) if engine == "eager" else (32, 64)
    x = normal(*shape, requires_grad=False)
    with fp8compile.collect_reports() as report:
        compiled = compile_fp8(model, fullgraph=True, engine=engine, recipe=recipe)

        def step() -> float:
            loss = (compiled(x) - x.flip(-1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        losses = [step(), step()]
        with torch._dynamo.config.patch(error_on_recompile=True):
            losses += [step() for _ in range(18)]
    assert len(report.graphs) == 1
    assert not report.graph_breaks
    assert report.in_fp8 > 0
    assert losses[-1] < 0.5 * losses[0]


# T9, in small


def test_thirty_steps_of_a_byte_level_gpt() -> None:
    """Thirty steps on real text from the same seed: the mean loss of the last ten within 1 % of bf16's, and well below
    ln(256), where it starts. A gross fault, such as a gradient with a missing scale, costs more than 10 %."""
    final = {}
    for name in ("bf16", "fp8"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = ByteGPT()
        batches = TextBatches()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        call = model if name == "bf16" else compile_fp8(model, fullgraph=True)
        losses = []
        for _ in range(30):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = call(*batches())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - math.log(256)) < 0.5
        final[name] = sum(losses[-10:]) / 10
    assert final["bf16"] < 4
    assert abs(final["fp8"] / final["bf16"] - 1) < 0.01


# T10


def test_switching_policies_makes_new_graphs() -> None:
    """One model object, compiled under one policy after another, without a reset between: each graph obeys its
    policy."""
    model = mlp()
    x = normal(32, 64)
    by_hand = Policy.none().use("rowwise", "2", roles=("fprop",))
    expected = {"all": 6, "none": 0, "default": 0, by_hand: 1, Policy.all().keep("0"): 3}
    outputs = {}
    for _ in range(2):
        for policy, count in expected.items():
            graphs = GraphRecorder()
            with fp8compile.collect_reports(graphs) as report:
                got = run_module(compile_fp8(model, policy=policy), model, x)
            if not report.graphs:
                assert policy in outputs
            else:
                assert report.in_fp8 == count
                assert bool(fp8_nodes(graphs.graphs[0])) is bool(count)
            assert policy not in outputs or equal(outputs[policy], got)
            outputs[policy] = got
    assert equal(outputs["none"], outputs["default"]), "too small to gain: the default keeps everything"
    plain = run_module(model, model, x)
    assert_close(plain, outputs["none"], plain, out_db=110, grad_db=110)
    assert not equal(outputs["none"], outputs["all"])
    assert not torch.equal(outputs[by_hand].outputs[0], outputs["all"].outputs[0])


def test_switching_recipes_makes_new_graphs() -> None:
    """The same for recipes."""
    model, x = mlp(), normal(32, 64)
    runs = {recipe: run_module(compile_fp8(model, recipe=recipe), model, x) for recipe in RECIPES}
    assert not torch.equal(runs["tensorwise"].outputs[0], runs["rowwise"].outputs[0])
    assert torch.equal(runs["rowwise"].outputs[0], runs["rowwise_hp_wgrad"].outputs[0])
    assert not torch.equal(runs["rowwise"].grads["0.weight"], runs["rowwise_hp_wgrad"].grads["0.weight"])  # type: ignore[arg-type]


class Tiny(nn.Module):
    """Matmuls that Inductor decomposes on CPU: M = N = 1, K = 1, a vector, a batch of them; and one that it does
    not."""

    def __init__(self) -> None:
        super().__init__()
        self.dot = nn.Linear(32, 1)
        self.outer = nn.Linear(1, 24)
        self.plain = nn.Linear(32, 16, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 8, 1))
        self.vector = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        single = self.dot(x[:1])
        wide = self.outer(single)
        column = self.outer(x[:, :1])
        batch = torch.bmm(wide.view(3, 1, 8), self.experts)
        return (
            self.plain(x).sum()
            + column.square().mean()
            + batch.sum()
            + torch.mv(x, self.vector).sin().sum()
            + x[0] @ x[1]
        )


def test_off_means_off_bit_for_bit() -> None:
    """``Policy.none()``: no node of ours, and Inductor's bits in outputs and gradients, tiny matmuls included, in
    float32 and in bf16."""
    models = nn.ModuleList(
        [nn.ModuleList([Tiny(), mlp(32, 48)]).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    )
    inputs = [normal(8, 32), normal(8, 32, dtype=torch.bfloat16)]

    def forward(wide: torch.Tensor, narrow: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = zip(models, (wide, narrow), strict=True)
        return tuple(out for (tiny, layers), x in pairs for out in (tiny(x), layers(x)))

    parameters = list(models.named_parameters())
    expected = run(torch.compile(forward, backend="inductor"), inputs, parameters)
    torch._dynamo.reset()
    graphs = GraphRecorder()
    with fp8compile.collect_reports(graphs) as report:
        got = run(compile_fp8(forward, engine="inductor", policy="none"), inputs, parameters)
    assert len(graphs.graphs) == 1
    assert not fp8_nodes(graphs.graphs[0])
    assert report.rows
    assert all(not row.fp8 and row.reason for row in report.rows)
    assert not report.casts
    assert len(got.outputs) == 4
    assert expected.tensors().keys() == got.tensors().keys()
    for name, value in expected.tensors().items():
        assert torch.equal(got.tensors()[name], value), name
