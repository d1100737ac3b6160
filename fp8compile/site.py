"""Sites: the places in a graph that could run in FP8, as policies and reports see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fp8compile.recipe import Gemm, Operand, Recipe, Role, get_recipe

Kind = Literal[
    "linear",
    "product",
    "constant",
    "attention",
    "convolution",
    "vector",
    "integer",
    "scaled",
    "ragged",
    "fused",
    "opaque",
]
"""What a matmul is: a parameter times data (``linear``), two computed tensors (``product``), parameters or constants
alone (``constant``), an attention operator, a convolution, a matrix-vector product, integers, operands that are already
scaled FP8, a grouped matmul that contracts over groups (``ragged``), a recurrent layer in one operator (``fused``), or
something inside a control-flow region (``opaque``)."""


@dataclass(frozen=True)
class MatmulSite:
    """One matmul of a graph.

    Attributes:
        name: the node's name in the joint graph.
        op: the operator, for example ``"addmm"``.
        kind: see :data:`Kind`.
        role: which of a layer's three GEMMs it is.
        module: name of the module it came from, as in ``model.named_modules()``; ``""`` for the root.
        module_class: that module's class name.
        weight: name of the parameter it multiplies or whose gradient it computes, if there is one.
        operands: what the two operands are.
        batch, m, n, k: ``[batch, m, k] @ [batch, k, n]``, elements; a dynamic dimension is represented by the value it
            had while tracing.
        dynamic: which of ``"batch" "m" "n" "k"`` are dynamic.
        dtypes: of the operands.
        out_dtype: of the result.
        traits: what is known about its place in the model: ``"logits"``, ``"router"``, ``"tied_embedding"``.
    """

    name: str
    op: str
    kind: Kind
    role: Role
    module: str
    module_class: str
    weight: str | None
    operands: tuple[Operand, Operand]
    batch: int
    m: int
    n: int
    k: int
    dynamic: frozenset[str]
    dtypes: tuple[torch.dtype, torch.dtype]
    out_dtype: torch.dtype
    traits: frozenset[str] = frozenset()

    @property
    def flops(self) -> int:
        """Floating-point operations: 2·batch·m·n·k."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def shape(self) -> str:
        """``M×N×K`` for people, with a batch in front where there is one and ``~`` before dynamic sizes."""
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        text = "×".join(f"{'~' if key in self.dynamic else ''}{value}" for key, value in sizes.items())
        return text if self.batch == 1 else f"{'~' if 'batch' in self.dynamic else ''}{self.batch}·{text}"


@dataclass(frozen=True)
class CollectiveSite:
    """One collective of a graph.

    Attributes:
        name: the node's name. op: the functional collective, for example ``"all_gather_into_tensor"``.
        module: name of the module it came from. shape, dtype: of the tensor that is sent. group: process group's name.
    """

    name: str
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: str


Site = MatmulSite | CollectiveSite


@dataclass(frozen=True)
class Decision:
    """What becomes of a site, and why. Made by :func:`use` and :func:`keep`.

    Attributes:
        fp8: whether it runs in FP8.
        reason: shown in the report; never empty.
        recipe: how it is quantized; None stands for ``options["recipe"]``.
        if_faster: leave the last word to the cost model of the target.
    """

    fp8: bool
    reason: str
    recipe: Recipe | None = None
    if_faster: bool = False

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("Decision: a reason is required")

    def gemm(self, role: Role) -> Gemm | None:
        """The FP8 GEMM for ``role``, or None if the site is kept."""
        return self.recipe.gemm(role) if self.fp8 and self.recipe else None


def use(recipe: str | Recipe | None = None, reason: str = "policy", *, if_faster: bool = False) -> Decision:
    """Run the site in FP8, with ``recipe`` or else with that of the options."""
    return Decision(True, reason, None if recipe is None else get_recipe(recipe), if_faster)


def keep(reason: str) -> Decision:
    """Keep the site in high precision."""
    return Decision(False, reason)
