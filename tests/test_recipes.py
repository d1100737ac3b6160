"""Recipes: what the named ones promise, how a user writes one, and what each choice does to the graph."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from models import compile_fp8, fp8_nodes, mlp, normal, run_module
from torch import nn

import fp8compile as fp8
from fp8compile import RECIPES, Cast, Gemm, Recipe
from fp8compile.ops import COMPUTE_SCALE, QUANTIZE, SCALED_MM
from fp8compile.recipe import E4M3, E5M2, OPERANDS, ROLES, get_recipe


def joint_graph(model: nn.Module, *inputs: torch.Tensor, **options) -> tuple[torch.fx.Graph, fp8.Report]:
    """The rewritten joint graph of ``model``."""
    graphs = []
    with fp8.collect_reports(lambda report, before, after, context: graphs.append(after)) as report:
        run_module(compile_fp8(model, **options), model, *inputs)
    assert len(graphs) == 1
    return graphs[0], report


def casts_of_linear(recipe: Recipe | str) -> dict[str, tuple[tuple[torch.dtype, int], tuple[torch.dtype, int], bool]]:
    """For each role of one Linear: dtype and number of scales of both operands, and whether it accumulates fast.

    M = 48 tokens, 64 features in, 32 out: a rowwise scale tells by its length which dimension it belongs to."""
    model = nn.Linear(64, 32, bias=False)
    graph, report = joint_graph(model, normal(48, 64), recipe=recipe)
    roles = {row.shape: row.role for row in report.rows}
    found = {}
    for node in graph.nodes:
        if node.target is SCALED_MM:
            a, b, scale_a, scale_b = (arg.meta["val"] for arg in node.args[:4])
            role = roles[f"{a.shape[0]}×{b.shape[0]}×{a.shape[1]}"]
            found[role] = ((a.dtype, scale_a.numel()), (b.dtype, scale_b.numel()), node.args[6])
    return found


def test_tensorwise_is_e4m3_with_e5m2_gradients() -> None:
    assert casts_of_linear("tensorwise") == {
        "fprop": ((E4M3, 1), (E4M3, 1), True),
        "dgrad": ((E5M2, 1), (E4M3, 1), False),
        "wgrad": ((E5M2, 1), (E4M3, 1), False),
    }


def test_rowwise_scales_lie_along_the_contraction_of_each_gemm() -> None:
    """fprop sums over 64 features, dgrad over 32, wgrad over 48 tokens: scales number M and N of each."""
    assert casts_of_linear("rowwise") == {
        "fprop": ((E4M3, 48), (E4M3, 32), True),
        "dgrad": ((E4M3, 48), (E4M3, 64), False),
        "wgrad": ((E4M3, 32), (E4M3, 64), False),
    }


def test_rowwise_hp_wgrad_keeps_wgrad_with_a_reason() -> None:
    assert set(casts_of_linear("rowwise_hp_wgrad")) == {"fprop", "dgrad"}
    _, report = joint_graph(nn.Linear(64, 32), normal(48, 64), recipe="rowwise_hp_wgrad")
    (kept,) = [row for row in report.rows if not row.fp8]
    assert (kept.role, kept.reason) == ("wgrad", "recipe rowwise_hp_wgrad keeps wgrad in high precision")


def test_recipe_of_ones_own_in_a_few_lines() -> None:
    """Each operand of each role on its own: dtype, granularity, scale rule, accumulation."""
    fine, coarse = Cast(E4M3, "rowwise"), Cast(E4M3, "tensorwise", power_of_two=True)
    mine = Recipe(
        "mine",
        fprop=Gemm(fine, Cast(E5M2, "rowwise"), "accurate"),
        wgrad=Gemm(Cast(E5M2, "tensorwise"), coarse, "fast"),
    )
    assert casts_of_linear(mine) == {
        "fprop": ((E4M3, 48), (E5M2, 32), False),
        "wgrad": ((E5M2, 1), (E4M3, 1), True),
    }


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("grad_dtype", [None, E4M3, E5M2])
def test_uniform_recipes_choose_dtypes_by_operand(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> None:
    recipe = Recipe.uniform("u", dtype=dtype, grad_dtype=grad_dtype)
    for role in ROLES:
        gemm = recipe.gemm(role)
        assert gemm is not None
        for operand, cast in zip(OPERANDS[role], (gemm.first, gemm.second), strict=True):
            assert cast.dtype == ((grad_dtype or dtype) if operand == "grad_output" else dtype)


def test_uniform_recipe_accumulates_as_told_in_each_role() -> None:
    each = Recipe.uniform("u", accumulation=("accurate", "fast", "accurate"))
    same = Recipe.uniform("u", accumulation="fast")
    assert [each.gemm(role).accumulation for role in ROLES] == ["accurate", "fast", "accurate"]
    assert [same.gemm(role).accumulation for role in ROLES] == ["fast"] * 3


def test_power_of_two_scales_are_powers_of_two_at_run_time() -> None:
    """Every scale that the compiled program computes, forward and backward; plain scales are not."""
    for power_of_two in (True, False):
        recipe = Recipe.uniform("p", granularity="rowwise", power_of_two=power_of_two)
        graph, _ = joint_graph(mlp(), normal(32, 64), recipe=recipe)
        flags = [node.args[3] for node in graph.nodes if node.target is COMPUTE_SCALE]
        assert flags
        assert set(flags) == {power_of_two}


def test_power_of_two_scales_quantize_powers_of_two_exactly() -> None:
    """Operands of ±2**n need one mantissa bit: with power-of-two scales the product has no error at all, with plain
    scales, amax / 448, it does."""
    weight = torch.exp2(torch.randint(-3, 3, (32, 64)).float()) * torch.randint(0, 2, (32, 64)).mul(2).sub(1)
    x = torch.exp2(torch.randint(-3, 3, (48, 64)).float())
    model = nn.Linear(64, 32, bias=False)
    with torch.no_grad():
        model.weight.copy_(weight)
        exact = x @ weight.T
        power = compile_fp8(model, recipe=Recipe.uniform("p", power_of_two=True))(x)
        torch._dynamo.reset()
        plain = compile_fp8(model, recipe=Recipe.uniform("q", power_of_two=False))(x * 1.1)
    assert torch.equal(power, exact)
    assert not torch.equal(plain, exact * 1.1)


def test_e5m2_by_e5m2_is_kept_with_a_reason_on_hopper() -> None:
    """CPUs multiply them; an H100 does not, and the graph does not depend on the machine it is made on."""
    recipe = Recipe.uniform("wide", dtype=E5M2)
    graph, report = joint_graph(nn.Linear(64, 32), normal(48, 64), recipe=recipe, target="h100")
    assert not fp8_nodes(graph)
    assert {row.reason for row in report.rows} == {"h100 does not multiply E5M2 by E5M2"}
    assert len(report.rows) == 3


def test_e5m2_by_e5m2_stops_only_the_gemm_that_has_it() -> None:
    """E5M2 weights with E4M3 inputs and E5M2 gradients: dgrad is E5M2 × E5M2, fprop and wgrad run."""
    wide = Cast(E5M2)
    recipe = Recipe("r", fprop=Gemm(Cast(), wide), dgrad=Gemm(wide, wide), wgrad=Gemm(wide, Cast()))
    assert set(casts_of_linear(recipe)) == {"fprop", "wgrad"}


def test_recipe_without_gemms_keeps_everything() -> None:
    graph, report = joint_graph(nn.Linear(64, 32), normal(48, 64), recipe=Recipe("empty"))
    assert not fp8_nodes(graph)
    assert {row.reason for row in report.rows} == {f"recipe empty keeps {role} in high precision" for role in ROLES}


def test_only_keeps_the_other_roles() -> None:
    only = RECIPES["rowwise"].only(("dgrad",))
    assert [role for role in ROLES if only.gemm(role)] == ["dgrad"]


def test_uniform_keep_is_the_roles_that_stay() -> None:
    assert [role for role in ROLES if Recipe.uniform("k", keep=("fprop", "wgrad")).gemm(role)] == ["dgrad"]


def test_recipes_are_values() -> None:
    """Equal if they say the same, hashable, and frozen."""
    assert Recipe.uniform("a") == Recipe.uniform("a")
    assert len({Recipe.uniform("a"), Recipe.uniform("a"), Recipe.uniform("a", power_of_two=True)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["rowwise"].name = "mine"  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_named_recipes_are_found_under_their_name(name: str) -> None:
    assert get_recipe(name).name == name
    assert get_recipe(RECIPES[name]) is RECIPES[name]


def test_casts_have_the_dtypes_of_the_recipe() -> None:
    graph, _ = joint_graph(mlp(), normal(32, 64), recipe=Recipe.uniform("r", grad_dtype=E5M2))
    dtypes = {node.args[2] for node in graph.nodes if node.target is QUANTIZE}
    assert dtypes == {E4M3, E5M2}


# --- Errors name the thing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cast(torch.bfloat16), r"torch\.bfloat16 is not an FP8 dtype.*float8_e4m3fn"),
        (lambda: Cast(E4M3, "colwise"), r"'colwise'.*tensorwise, rowwise"),
        (lambda: Gemm(Cast(), Cast(), "sloppy"), r"'sloppy'.*fast, accurate"),
        (lambda: Gemm(Cast(granularity="rowwise"), Cast()), r"rowwise and tensorwise differ"),
        (lambda: Recipe.uniform("r", keep=("forward",)), r"'r'.*'forward'.*fprop, dgrad, wgrad"),
        (lambda: Recipe.uniform("r", granularity="block128"), r"'block128'"),
        (lambda: Recipe.uniform("r", grad_dtype=torch.float16), r"torch\.float16"),
        (lambda: get_recipe("row"), r"'row'.*tensorwise, rowwise, rowwise_hp_wgrad"),
    ],
)
def test_wrong_recipe_is_an_error_that_names_it(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_recipe_of_a_wrong_type_is_an_error_that_names_the_type() -> None:
    with pytest.raises(TypeError, match="not int"):
        get_recipe(3)  # type: ignore[arg-type]


def test_accumulations_must_be_three() -> None:
    """One value or one per role; two are a mistake that names what is expected."""
    with pytest.raises(ValueError, match="accumulation"):
        Recipe.uniform("r", accumulation=("fast", "accurate"))  # type: ignore[arg-type]
