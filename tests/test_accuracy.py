"""Accuracy: the SQNR that E4M3's and E5M2's mantissas allow, and no worse than torchao for the same recipe.

Rounding to 3 mantissa bits costs about 31.5 dB an operand, to 2 bits about 25.5; a product of two sees both errors.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import compile_fp8, normal, sqnr
from torch import nn

import fp8compile as fp8
from fp8compile.recipe import E4M3, E5M2, LARGEST, OPERANDS, RECIPES

TORCHAO_DB = 0.5


def linear(bias: bool = False) -> nn.Linear:
    """Features and tokens differ so that each GEMM has its own shape; normal weights."""
    layer = nn.Linear(512, 256, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(normal(256, 512, requires_grad=False, seed=1) * 512**-0.5)
    return layer


@dataclass
class Step:
    """Output and gradients of one forward and backward."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]


def step(call: Any, model: nn.Module, x: torch.Tensor) -> Step:
    """The output's gradient is normal noise."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = call(x)
    noise = normal(*out.shape, requires_grad=False, seed=2)
    out.backward(noise.to(out.dtype))
    assert x.grad is not None
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(out.detach(), {"input": x.grad, **gradients})


def compiled_step(model: nn.Module, x: torch.Tensor, recipe: Any) -> Step:
    with fp8.collect_reports() as report:
        result = step(compile_fp8(model, recipe=recipe), model, x)
    assert all(row.fp8 for row in report.rows)
    return result


def exact_step(model: nn.Module, x: torch.Tensor) -> Step:
    wide = copy.deepcopy(model).double()
    return step(wide, wide, x.double())


@pytest.mark.parametrize(("recipe", "gradients"), [("rowwise", 28.0), ("tensorwise", 24.0)])
def test_one_linear(recipe: str, gradients: float) -> None:
    """At least 28 dB at the output, 28 dB for gradients in E4M3 and 24 dB in E5M2; the bias's gradient is exact."""
    model, x = linear(bias=True), normal(768, 512)
    got, exact = compiled_step(model, x, recipe), exact_step(model, x)
    assert sqnr(exact.output, got.output) >= 28.0
    for name in ("input", "weight"):
        assert sqnr(exact.gradients[name], got.gradients[name]) >= gradients, name
    assert sqnr(exact.gradients["bias"], got.gradients["bias"]) >= 100


def test_e4m3_gradients_reach_28_db_tensorwise() -> None:
    model, x = linear(), normal(768, 512)
    got, exact = compiled_step(model, x, fp8.Recipe.uniform("e4m3")), exact_step(model, x)
    for name in ("input", "weight"):
        assert sqnr(exact.gradients[name], got.gradients[name]) >= 28.0, name


@pytest.mark.parametrize("granularity", ["rowwise", "tensorwise"])
def test_power_of_two_scales_cost_little(granularity: str) -> None:
    """A power-of-two scale leaves up to a binade of range unused, which costs nothing while values stay normal."""
    model, x = linear(), normal(768, 512)
    exact = exact_step(model, x)
    levels = []
    for power_of_two in (False, True):
        torch._dynamo.reset()
        recipe = fp8.Recipe.uniform("p", granularity=granularity, power_of_two=power_of_two)
        levels.append(sqnr(exact.output, compiled_step(model, x, recipe).output))
    assert levels[1] >= 28.0
    assert abs(levels[1] - levels[0]) <= 1.0


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_mlp_of_two(recipe: str) -> None:
    """At least 25 dB at the output and 21 dB for every gradient."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    x = normal(512, 256)
    result = step(compile_fp8(model, recipe=recipe), model, x)
    exact = exact_step(model, x)
    assert sqnr(exact.output, result.output) >= 25.0
    for name, gradient in exact.gradients.items():
        assert sqnr(gradient, result.gradients[name]) >= 21.0, name


def test_accuracy_is_that_of_the_format_and_not_better() -> None:
    """A bound from above: if FP8 did not run, the error would be float32's. Uniform rounding to 3 bits in both operands
    leaves about 28.5 dB."""
    model, x = linear(), normal(768, 512)
    level = sqnr(exact_step(model, x).output, compiled_step(model, x, "rowwise").output)
    assert level <= 32.0


# --- Against torchao 0.18 ---------------------------------------------------------------------------------------------


def torchao_step(model: nn.Module, x: torch.Tensor, recipe: str) -> Step:
    """torchao's float8 training on the same tensors, emulated: it dequantizes and multiplies in high precision."""
    torchao_float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    from torchao.float8.config import CastConfig

    config = torchao_float8.Float8LinearConfig.from_recipe_name(recipe)
    assert isinstance(config.cast_config_input, CastConfig)
    object.__setattr__(config, "emulate", True)
    converted = torchao_float8.convert_to_float8_training(copy.deepcopy(model), config=config)
    assert any("Float8" in type(module).__name__ for module in converted.modules())
    return step(converted, converted, x)


def formula_step(model: nn.Linear, x: torch.Tensor, recipe: str) -> Step:
    """torchao's formula in plain torch: scale = largest / max(amax, 1e-12), divided in float64, kept in float32; data =
    clamp(x·scale), rounded; a matmul, divided by both scales."""
    chosen = RECIPES[recipe]
    tensors = {"input": x.detach(), "weight": model.weight.detach()}
    tensors["grad_output"] = normal(x.shape[0], model.out_features, requires_grad=False, seed=2)
    # for every role, operands as [rows, contraction]
    operands = {
        "fprop": (tensors["input"], tensors["weight"]),
        "dgrad": (tensors["grad_output"], tensors["weight"].T),
        "wgrad": (tensors["grad_output"].T, tensors["input"].T),
    }
    results = {}
    for role, (first, second) in operands.items():
        gemm = chosen.gemm(role)
        if gemm is None:
            results[role] = first @ second.T
            continue
        wide = []
        for matrix, cast in zip((first, second), (gemm.first, gemm.second), strict=True):
            dims = (1,) if cast.granularity == "rowwise" else (0, 1)
            amax = matrix.abs().amax(dims, keepdim=True).double()
            scale = (LARGEST[cast.dtype] / amax.clamp(min=1e-12)).float()
            data = (matrix * scale).clamp(-LARGEST[cast.dtype], LARGEST[cast.dtype]).to(cast.dtype)
            wide.append(data.float() / scale)
        results[role] = wide[0] @ wide[1].T
    return Step(results["fprop"], {"input": results["dgrad"], "weight": results["wgrad"]})


def assert_as_good(ours: Step, theirs: Step, exact: Step) -> None:
    """Not more than 0.5 dB below theirs, in the output and in every gradient."""
    assert sqnr(exact.output, ours.output) >= sqnr(exact.output, theirs.output) - TORCHAO_DB
    for name, gradient in exact.gradients.items():
        level, other = sqnr(gradient, ours.gradients[name]), sqnr(gradient, theirs.gradients[name])
        assert level >= other - TORCHAO_DB, f"{name}: {level:.2f} dB against {other:.2f}"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_as_good_as_torchaos_published_formula(recipe: str) -> None:
    """And, from the same casts, practically the same numbers: what differs is less than a tenth of the FP8 error."""
    model, x = linear(), normal(768, 512)
    ours, theirs, exact = compiled_step(model, x, recipe), formula_step(model, x, recipe), exact_step(model, x)
    assert_as_good(ours, theirs, exact)
    assert sqnr(theirs.output, ours.output) >= sqnr(exact.output, ours.output) + 10


TORCHAO_RECIPES = {
    "rowwise": fp8.Recipe.uniform("torchao's rowwise", granularity="rowwise", power_of_two=True),
    "tensorwise": RECIPES["tensorwise"],
    "rowwise_with_gw_hp": fp8.Recipe.uniform(
        "torchao's rowwise_with_gw_hp", granularity="rowwise", power_of_two=True, keep=("wgrad",)
    ),
}


@pytest.mark.parametrize("recipe", sorted(TORCHAO_RECIPES))
def test_as_good_as_torchao(recipe: str) -> None:
    """Against the package, run eagerly on the same tensors. torchao rounds rowwise scales to powers of two."""
    model, x = linear(), normal(768, 512)
    theirs, exact = torchao_step(model, x, recipe), exact_step(model, x)
    ours = step(compile_fp8(model, recipe=TORCHAO_RECIPES[recipe]), model, x)
    assert_as_good(ours, theirs, exact)


def test_operands_of_the_named_recipes_are_those_that_the_bounds_assume() -> None:
    """E5M2 for tensorwise gradients, E4M3 for everything else."""
    for name, recipe in RECIPES.items():
        for role, operands in OPERANDS.items():
            gemm = recipe.gemm(role)
            for operand, cast in zip(operands, (gemm.first, gemm.second) if gemm else (), strict=bool(gemm)):
                wide = name == "tensorwise" and operand == "grad_output"
                assert cast.dtype == (E5M2 if wide else E4M3)
