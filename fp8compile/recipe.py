"""Recipes: how the operands of a matmul are quantized, for each of a layer's three GEMMs.

A recipe is data. The passes read what they need from it and never ask for its name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

Role = Literal["fprop", "dgrad", "wgrad"]
Operand = Literal["input", "weight", "grad_output"]
Granularity = Literal["tensorwise", "rowwise", "rowwise_once", "block"]
Accumulation = Literal["fast", "accurate"]

ROLES: tuple[Role, ...] = get_args(Role)
OPERANDS: dict[Role, tuple[Operand, Operand]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST: dict[torch.dtype, float] = {E4M3: 448.0, E5M2: 57344.0}
"""The FP8 dtypes we quantize to, with the largest finite value of each."""

BLOCK = 128
"""Elements of a row that share a scale, and rows of a weight, where scales are for blocks."""


@dataclass(frozen=True)
class Cast:
    """How one operand becomes FP8.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        granularity: what shares a scale: ``"tensorwise"``, the whole operand, or ``"rowwise"``, all elements that
            are summed into the same output element (a row along the contraction), or ``"rowwise_once"``: one cast per
            tensor, with a scale per row of its last dimension. A GEMM that sums over the rows, as wgrad does, reads
            the same values transposed and brought to the largest of those scales. Scales are powers of two, so that
            this changes no mantissa; what a far smaller scale held may become subnormal. Or ``"block"``: 128 elements
            that are summed into the same output element; of a weight, 128 by 128.
        power_of_two: round scales up to powers of two, so that scaling never changes a mantissa.

    Scales are dynamic and float32: ``scale = max(amax / largest(dtype), 2**-126)``.
    """

    dtype: torch.dtype = E4M3
    granularity: Granularity = "tensorwise"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in LARGEST:
            raise ValueError(f"Cast: dtype {self.dtype} is not an FP8 dtype; use one of {', '.join(map(str, LARGEST))}")
        if self.granularity not in get_args(Granularity):
            raise ValueError(
                f"Cast: granularity {self.granularity!r} is unknown; use one of {', '.join(get_args(Granularity))}"
            )
        if self.granularity == "rowwise_once" and not self.power_of_two:
            raise ValueError("Cast: granularity 'rowwise_once' needs power_of_two=True: other scales would round twice")

    def __str__(self) -> str:
        return f"{'E4M3' if self.dtype == E4M3 else 'E5M2'} {self.granularity}{' 2^n' if self.power_of_two else ''}"


@dataclass(frozen=True)
class Gemm:
    """One of a layer's GEMMs in FP8: a cast per operand, in the order of :data:`OPERANDS`, and how it accumulates.

    ``"accurate"`` promotes partial sums to float32 often enough for the error of the sum to be float32's;
    ``"fast"`` leaves them in the tensor core's accumulator (about 14 bits on Hopper).
    """

    first: Cast
    second: Cast
    accumulation: Accumulation = "accurate"

    def __post_init__(self) -> None:
        if self.accumulation not in get_args(Accumulation):
            raise ValueError(
                f"Gemm: accumulation {self.accumulation!r} is unknown; use one of {', '.join(get_args(Accumulation))}"
            )
        if self.first.granularity != self.second.granularity:
            raise ValueError(
                f"Gemm: granularities {self.first.granularity} and {self.second.granularity} differ; "
                "both operands of a GEMM share one"
            )
        if self.first.granularity == "block" and self.accumulation == "fast":
            raise ValueError(
                "Gemm: accumulation 'fast' is not for granularity 'block', whose scales are applied to sums in float32 "
                "every 128 products; use 'accurate'"
            )


@dataclass(frozen=True)
class Recipe:
    """How a layer's GEMMs run: FP8 for each role that has a :class:`Gemm`, high precision where it is ``None``.

    Example::

        mine = Recipe.uniform("mine", granularity="rowwise", grad_dtype=torch.float8_e5m2, keep=("wgrad",))
        torch.compile(model, backend="fp8", options={"recipe": mine})
    """

    name: str
    fprop: Gemm | None = None
    dgrad: Gemm | None = None
    wgrad: Gemm | None = None

    @classmethod
    def uniform(
        cls,
        name: str,
        *,
        granularity: Granularity = "tensorwise",
        dtype: torch.dtype = E4M3,
        grad_dtype: torch.dtype | None = None,
        power_of_two: bool = False,
        accumulation: Accumulation | tuple[Accumulation, Accumulation, Accumulation] | None = None,
        keep: tuple[Role, ...] = (),
    ) -> Recipe:
        """A recipe with the same granularity everywhere.

        Args:
            name: shown in reports.
            granularity: see :class:`Cast`.
            dtype: of inputs and weights.
            grad_dtype: of output gradients; ``dtype`` if not given.
            power_of_two: round scales up to powers of two; ``"rowwise_once"`` always does.
            accumulation: one value, or one each for fprop, dgrad and wgrad. Default: fast, accurate and accurate; with
                blocks accurate.
            keep: roles that stay in high precision.
        """
        for role in keep:
            if role not in ROLES:
                raise ValueError(f"Recipe {name!r}: role {role!r} is unknown; use one of {', '.join(ROLES)}")
        power_of_two = power_of_two or granularity == "rowwise_once"
        plain = Cast(dtype, granularity, power_of_two)
        grad = Cast(grad_dtype or dtype, granularity, power_of_two)
        default: tuple[Accumulation, ...] = ("accurate" if granularity == "block" else "fast", "accurate", "accurate")
        modes = (accumulation,) * 3 if isinstance(accumulation, str) else accumulation or default
        if len(modes) != len(ROLES):
            raise ValueError(
                f"Recipe {name!r}: accumulation {accumulation!r} must be one value or one each for {', '.join(ROLES)}"
            )
        gemms = {
            role: Gemm(grad if OPERANDS[role][0] == "grad_output" else plain, plain, mode)
            for role, mode in zip(ROLES, modes, strict=True)
            if role not in keep
        }
        return cls(name, **gemms)

    def gemm(self, role: Role) -> Gemm | None:
        """The GEMM of ``role``, or None where this recipe keeps that role in high precision."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}[role]

    def only(self, roles: tuple[Role, ...]) -> Recipe:
        """This recipe with every role but ``roles`` kept in high precision."""
        dropped: dict[str, Any] = {role: None for role in ROLES if role not in roles}
        return dataclasses.replace(self, **dropped)

    def __str__(self) -> str:
        return self.name


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe.uniform("tensorwise", grad_dtype=E5M2),
        Recipe.uniform("rowwise", granularity="rowwise"),
        Recipe.uniform("rowwise_hp_wgrad", granularity="rowwise", keep=("wgrad",)),
        Recipe.uniform("rowwise_once", granularity="rowwise_once"),
        Recipe.uniform("block", granularity="block"),
    )
}
"""The named recipes; ``options={"recipe": name}`` and ``Policy.use(name)`` look here."""

DEFAULT_RECIPE = "rowwise_once"


def get_recipe(recipe: str | Recipe) -> Recipe:
    """Look up a recipe by name; a :class:`Recipe` is returned as it is.

    Raises:
        ValueError: for an unknown name; says what there is.
        TypeError: for anything that is neither a name nor a recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a name or a Recipe, not {type(recipe).__name__}")
    if recipe not in RECIPES:
        raise ValueError(f"recipe {recipe!r} is unknown; there are {', '.join(RECIPES)}, or pass a fp8compile.Recipe")
    return RECIPES[recipe]
