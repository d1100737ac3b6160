"""Decide: policy, then what the target can run, then what it gains, each with a reason.

The choice among sites that must be faster is a minimum cut; here it is held against all subsets.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import compile_fp8, normal
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fp8compile as fp8
from fp8compile import RECIPES, Decision, MatmulSite, Policy, Recipe, keep, use
from fp8compile.hardware import CHIPS
from fp8compile.passes import FoundMatmul, PassContext, PassRecord
from fp8compile.passes.casts import plan_casts
from fp8compile.passes.decide import WORTH_PADDING, cast_costs, decide, gemm_gain, keep_what_loses
from fp8compile.recipe import E5M2, OPERANDS, Cast, Gemm

H100 = CHIPS["h100"]


# --- A graph of matmuls without a model -------------------------------------------------------------------------------


class Matmuls:
    """Matmuls among named tensors, as ``find_sites`` would leave them."""

    def __init__(self, recipe: Recipe = RECIPES["tensorwise"]) -> None:
        self.graph = torch.fx.Graph()
        self.recipe = recipe
        self.tensors: dict[tuple[Any, ...], torch.fx.Node] = {}
        self.context = PassContext(Policy.default(), recipe, H100, ())

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.fx.Node:
        key = (name, *shape)
        if key not in self.tensors:
            node = self.graph.placeholder(f"{name}_{len(self.tensors)}")
            node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
            self.tensors[key] = node
        return self.tensors[key]

    def add(
        self,
        first: torch.fx.Node,
        second: torch.fx.Node,
        *,
        decision: Decision | None = None,
        role: str = "fprop",
        **changes: Any,
    ) -> FoundMatmul:
        (m, k), n = first.meta["val"].shape, second.meta["val"].shape[1]
        node = self.graph.call_function(torch.ops.aten.mm.default, (first, second))
        node.meta["val"] = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
        site = MatmulSite(
            name=node.name,
            op="mm",
            kind="linear",
            role=role,
            module=f"layer{len(self.context.matmuls)}",
            module_class="Linear",
            weight=None,
            operands=OPERANDS[role],
            batch=1,
            m=m,
            n=n,
            k=k,
            dynamic=frozenset(),
            dtypes=(first.meta["val"].dtype, second.meta["val"].dtype),
            out_dtype=torch.bfloat16,
        )
        found = FoundMatmul(replace(site, **changes), node, first, second, decision=decision)
        self.context.matmuls.append(found)
        return found

    def decide(self, policy: Policy) -> list[Decision]:
        self.context.policy = policy
        decide(self.graph, self.context, PassRecord("decide"))
        return [found.decision for found in self.context.matmuls if found.decision is not None]


def one(m: int = 4096, n: int = 4096, k: int = 4096, policy: Policy | None = None, recipe: Any = None, **changes: Any):
    """The decision and the notes for a single GEMM; ``changes`` are made to its site."""
    graph = Matmuls(recipe or RECIPES["rowwise"])
    found = graph.add(graph.tensor("x", m, k), graph.tensor("w", k, n), **changes)
    (decision,) = graph.decide(policy or Policy.all())
    return decision, found.notes


# --- What the target can run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtypes": (torch.float64, torch.float64)}, "operands are float64"),
        ({"dtypes": (torch.bfloat16, torch.float64)}, "operands are bfloat16 and float64"),
        ({"dtypes": (torch.complex64, torch.complex64)}, "operands are complex64"),
        ({"out_dtype": torch.float64}, "operands are bfloat16"),
        ({"m": 0}, "empty: a dimension is zero"),
        ({"k": 0}, "empty: a dimension is zero"),
        ({"batch": 0}, "empty: a dimension is zero"),
        ({"n": 8}, "columns N=8 below h100's FP8 minimum of 16"),
        ({"n": 15}, "columns N=15 below h100's FP8 minimum of 16"),
        ({"k": 2}, "contraction K=2 below h100's FP8 minimum of 16"),
        ({"role": "wgrad", "k": 13}, "contraction K=13 below h100's FP8 minimum of 16"),
        ({"role": "wgrad", "m": 8}, "output features M=8 below h100's FP8 minimum of 16"),
        ({"n": 17}, "padding to multiples of 16 (N 17→32) would add 88% to its work"),
        ({"k": 24}, "padding to multiples of 16 (K 24→32) would add 33% to its work"),
        ({"n": 60, "k": 54}, "padding to multiples of 16 (N 60→64, K 54→64) would add 26% to its work"),
        ({"dynamic": frozenset({"n"})}, "N is dynamic: h100 needs a multiple of 16, and only K is padded dynamically"),
        ({"kind": "attention"}, "sensitive: attention's inner products"),
    ],
)
def test_kept_with_this_reason(changes: dict[str, Any], reason: str) -> None:
    decision, notes = one(**changes)
    assert decision == keep(reason)
    assert notes == []


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({}, []),
        ({"m": 1}, []),
        ({"m": 13}, []),
        ({"m": 4097}, []),
        ({"n": 16, "k": 16}, []),
        ({"n": 712, "k": 896}, ["N padded 712→720"]),
        ({"n": 896, "k": 712}, ["K padded 712→720"]),
        ({"n": 1000, "k": 500}, ["N padded 1000→1008", "K padded 500→512"]),
        ({"dynamic": frozenset({"m"})}, []),
        ({"dynamic": frozenset({"k"}), "k": 13}, ["K padded to a multiple of 16"]),
        ({"dtypes": (torch.float32, torch.float32), "out_dtype": torch.float32}, []),
        ({"dtypes": (torch.float16, torch.bfloat16)}, []),
    ],
)
def test_runs_with_these_notes(changes: dict[str, Any], notes: list[str]) -> None:
    """Any number of rows; columns and contraction are padded where that is cheap, and it is said."""
    decision, found = one(**changes)
    assert decision.fp8
    assert found == notes


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))
@settings(max_examples=200, deadline=None)
def test_padding_never_adds_more_than_a_quarter(m: int, n: int, k: int) -> None:
    """For any shape there is a decision with a reason, and what runs does at most a quarter of padding's work."""
    decision, notes = one(m, n, k)
    assert decision.reason
    padded = -(-n // 16) * 16 * -(-k // 16) * 16
    if decision.fp8:
        assert padded <= WORTH_PADDING * n * k
        assert bool(notes) == (padded != n * k)
    else:
        assert min(n, k) < 16 or padded > WORTH_PADDING * n * k


def test_e5m2_by_e5m2_is_refused_before_shapes_are_looked_at() -> None:
    wide = Cast(E5M2, "rowwise")
    decision, _ = one(recipe=Recipe("wide", fprop=Gemm(wide, wide)), n=15)
    assert decision == keep("h100 does not multiply E5M2 by E5M2")


def test_role_without_a_gemm_in_the_recipe_is_kept() -> None:
    decision, _ = one(recipe=Recipe.uniform("mine", keep=("wgrad",)), role="wgrad")
    assert decision == keep("recipe mine keeps wgrad in high precision")


def test_chip_without_fp8_keeps_everything() -> None:
    graph = Matmuls()
    graph.add(graph.tensor("x", 4096, 4096), graph.tensor("w", 4096, 4096))
    graph.context.chip = CHIPS["a100"]
    assert graph.decide(Policy.all()) == [keep("a100 has no FP8 tensor cores")]


def test_record_counts_what_runs_and_what_is_kept_by_reason() -> None:
    graph = Matmuls(RECIPES["rowwise"])
    x = graph.tensor("x", 4096, 4096)
    for columns in (4096, 8, 8, 2048):
        graph.add(x, graph.tensor("w", 4096, columns))
    record = PassRecord("decide")
    graph.context.policy = Policy.all().keep("layer3", reason="rule")
    decide(graph.graph, graph.context, record)
    assert record.matched == 1
    assert record.skipped == {"columns N=8 below h100's FP8 minimum of 16": 2, "rule": 1}


# --- What it gains ----------------------------------------------------------------------------------------------------


def test_small_gemm_is_kept_as_slower_with_its_numbers_and_a_rule_overrides() -> None:
    decision, notes = one(512, 512, 512, policy=Policy.default())
    assert decision == keep("slower on h100")
    assert len(notes) == 1
    assert "µs" in notes[0]
    assert one(512, 512, 512, policy=Policy.all())[0].fp8
    assert one(512, 512, 512, policy=Policy.default().use("rowwise", "layer0"))[0].fp8


def test_large_gemm_runs() -> None:
    decision, notes = one(8192, 8192, 8192, policy=Policy.default())
    assert decision.fp8
    assert not decision.if_faster
    assert notes == []


def test_gemms_that_lose_alone_win_together() -> None:
    """q, k and v read one input: none of k and v pays for its cast, together with q all do."""
    alone = Matmuls()
    alone.add(alone.tensor("x", 8192, 4096), alone.tensor("k", 4096, 384))
    together = Matmuls()
    for name, columns in (("q", 4096), ("k", 384), ("v", 384)):
        together.add(together.tensor("x", 8192, 4096), together.tensor(name, 4096, columns))
    assert [d.fp8 for d in alone.decide(Policy.default())] == [False]
    assert [d.fp8 for d in together.decide(Policy.default())] == [True, True, True]


def test_cast_that_a_rule_already_pays_for_is_free() -> None:
    """A GEMM that would lose alone runs if another one, which a rule sends to FP8, casts its input anyway."""
    graph = Matmuls()
    x = graph.tensor("x", 8192, 4096)
    graph.add(x, graph.tensor("k", 4096, 384))
    graph.add(x, graph.tensor("tiny", 4096, 16))
    decisions = graph.decide(Policy.default().use("tensorwise", "layer1"))
    assert [d.fp8 for d in decisions] == [True, True]
    other = graph_of_pair(shared=False)
    assert [d.fp8 for d in other.decide(Policy.default().use("tensorwise", "layer1"))] == [False, True]


def graph_of_pair(shared: bool) -> Matmuls:
    graph = Matmuls()
    graph.add(graph.tensor("x", 8192, 4096), graph.tensor("k", 4096, 384))
    graph.add(graph.tensor("x" if shared else "y", 8192, 4096), graph.tensor("tiny", 4096, 16))
    return graph


@dataclass(frozen=True)
class Problem:
    """GEMMs as (input, weight, M, N, K, role); equal names and shapes are the same tensor. ``firm`` ones run anyway."""

    gemms: tuple[tuple[str, str, int, int, int, str], ...]
    firm: tuple[bool, ...]
    recipe: str


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    sizes = st.sampled_from([256, 1024, 2048, 4096, 8192])
    number = draw(st.integers(1, 8))
    tokens, features = draw(sizes), draw(sizes)
    gemms = tuple(
        (
            draw(st.sampled_from("xyz")),
            draw(st.sampled_from("uvw")),
            tokens,
            draw(sizes),
            features,
            draw(st.sampled_from(["fprop", "wgrad"])),
        )
        for _ in range(number)
    )
    firm = tuple(draw(st.lists(st.sampled_from([False, False, False, True]), min_size=number, max_size=number)))
    return Problem(gemms, firm, draw(st.sampled_from(["tensorwise", "rowwise"])))


@given(problems())
@settings(max_examples=150, deadline=None)
def test_choice_equals_the_best_of_all_subsets(problem: Problem) -> None:
    """The chosen set's gain minus what its casts cost, each counted once and not if a firm GEMM pays it, is the largest
    that any subset reaches."""
    recipe = RECIPES[problem.recipe]
    graph = Matmuls(recipe)
    for (x, w, m, n, k, role), firm in zip(problem.gemms, problem.firm, strict=True):
        decision = use(recipe, "test", if_faster=not firm)
        graph.add(graph.tensor(x, m, k), graph.tensor(w, k, n), role=role, decision=decision)
    matmuls = graph.context.matmuls
    costs = [
        {key: cost for plan in plan_casts(found, 16) for key, cost in cast_costs(plan, H100).items()}
        for found in matmuls
    ]
    gains = [gemm_gain(found.site, H100) for found in matmuls]
    firm = [i for i, is_firm in enumerate(problem.firm) if is_firm]
    free = [i for i, is_firm in enumerate(problem.firm) if not is_firm]
    paid = {key for i in firm for key in costs[i]}

    def worth(chosen: Any) -> float:
        casts = {key: cost for i in chosen for key, cost in costs[i].items() if key not in paid}
        return sum(gains[i] for i in chosen) - sum(casts.values())

    best = max(worth(subset) for size in range(len(free) + 1) for subset in itertools.combinations(free, size))
    keep_what_loses(graph.context)
    chosen = [i for i in free if matmuls[i].decision.fp8]
    assert worth(chosen) == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert all(matmuls[i].decision.fp8 for i in firm)
    assert all(not found.decision.if_faster for found in matmuls)
    assert all(matmuls[i].decision == keep("slower on h100") for i in free if i not in chosen)


# --- Whole layers -----------------------------------------------------------------------------------------------------


class LlamaBlock(nn.Module):
    """The projections of a Llama block; norms and rotary embeddings do not matter here."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        kv = width // heads * kv_heads

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)

        self.q, self.out = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, kv), linear(width, kv)
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(width, hidden),
            linear(width, hidden),
            linear(hidden, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (
            layer(x).view(batch, length, number, -1).transpose(1, 2)
            for layer, number in zip((self.q, self.k, self.v), sizes, strict=True)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def decisions_of_block(tokens: int, width: int, heads: int, kv_heads: int, hidden: int, **options: Any) -> fp8.Report:
    """What the default policy does with a block in bfloat16 that no memory is allocated for."""
    with FakeTensorMode(allow_non_fake_inputs=True), fp8.collect_reports() as report:
        block = LlamaBlock(width, heads, kv_heads, hidden)
        x = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        compile_fp8(block, policy="default", **options)(x)
    return report


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_all_gemms_of_a_llama_block_go_to_fp8(recipe: str) -> None:
    """DESIGN.md, section 6: 8192 tokens, width 4096, 8 key heads, hidden 14336: 21 GEMMs, all gain; attention stays."""
    report = decisions_of_block(8192, 4096, 32, 8, 14336, recipe=recipe)
    assert [row.fp8 for row in report.rows if row.op == "mm"] == [True] * 21
    assert all("attention" in row.reason for row in report.rows if not row.fp8)


def test_nothing_of_a_small_block_goes_to_fp8() -> None:
    """Below about 2000 in every dimension FP8 loses; each GEMM says so."""
    report = decisions_of_block(1024, 768, 12, 4, 1536)
    rows = [row for row in report.rows if row.op == "mm"]
    assert len(rows) == 21
    assert {row.reason for row in rows} == {"slower on h100"}


def test_graph_depends_on_the_target_and_not_on_the_machine() -> None:
    """A policy that takes all gives the same nodes for every chip with FP8; a chip without gets none."""
    shapes = []
    for target in ("h100", "h200", "b200", "a100"):
        torch._dynamo.reset()
        graphs: list[torch.fx.Graph] = []
        with fp8.collect_reports(lambda report, before, after, context, graphs=graphs: graphs.append(after)):
            compile_fp8(nn.Linear(64, 64), target=target)(normal(32, 64))
        shapes.append([(node.name, str(node.target)) for node in graphs[0].nodes])
    assert shapes[0] == shapes[1] == shapes[2]
    assert not any("fp8compile" in target for _, target in shapes[3])
