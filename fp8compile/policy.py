"""Policies: which matmuls and collectives run in FP8, and why not."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from fp8compile.recipe import ROLES, Recipe, Role, get_recipe
from fp8compile.site import CollectiveSite, Decision, Kind, MatmulSite, Site, keep, use

Base = Literal["default", "all", "none"]


@dataclass(frozen=True)
class Rule:
    """For the sites that match, an answer. ``recipe`` is None in a rule that keeps.

    ``"*"`` in a pattern stands for any characters within one component of a module name, ``"**"`` for any number of
    components; a pattern also matches everything inside the module it names.
    """

    patterns: tuple[str, ...]
    roles: tuple[Role, ...]
    min_size: int
    recipe: Recipe | None
    reason: str

    def matches(self, site: MatmulSite) -> bool:
        if self.recipe is None and site.role not in self.roles:
            return False
        if min(site.m, site.n, site.k) < self.min_size:
            return False
        names = [site.module] + ([site.weight] if site.weight else [])
        return any(_glob(pattern)(name) for pattern in self.patterns for name in names)

    def decide(self, site: MatmulSite) -> Decision:
        if self.recipe is None:
            return keep(self.reason)
        if site.role not in self.roles:
            return keep(f"{self.reason}, {site.role} not among its roles")
        return use(self.recipe, self.reason)


SENSITIVE_KINDS: dict[Kind, str] = {
    "product": "sensitive: product of two activations",
    "constant": "product of parameters or constants, no data",
    "attention": "sensitive: attention's inner products",
    "convolution": "sensitive: convolution",
    "vector": "matrix-vector product: no tensor-core work to gain",
    "integer": "integer matmul",
    "scaled": "operands are already scaled FP8",
    "ragged": "contracts over groups of rows, whose sizes FP8 tensor cores need to be multiples of 16",
    "fused": "inside a fused recurrent layer",
    "opaque": "inside a control-flow region, which is not rewritten",
}
"""Kinds that are kept: products unless a rule names their module, the others always."""

WITHOUT_FP8_FORM: frozenset[Kind] = frozenset(SENSITIVE_KINDS) - {"product"}

SENSITIVE_TRAITS: dict[str, str] = {
    "logits": "sensitive: its output is the logits",
    "router": "sensitive: its output decides routing",
    "tied_embedding": "sensitive: its weight is the embedding",
}

SENSITIVE_NAMES: dict[str, str] = {
    "**.lm_head": "sensitive: output head",
    "**.output_head": "sensitive: output head",
    "**.embed_out": "sensitive: output head",
    "**.classifier": "sensitive: output head",
    "**.router": "sensitive: decides routing",
    "**.gate": "sensitive: decides routing",
}
"""Usual names of layers that the default policy keeps. ``gate`` is a mixture of experts' router in Mixtral and
DeepSeek; gated MLPs call theirs ``gate_proj``; a wide ``gate`` is therefore not taken for a router."""

WIDEST_ROUTER = 1024


@dataclass(frozen=True)
class Policy:
    """Answers FP8 or not for every site.

    Start from :meth:`default`, :meth:`all` or :meth:`none` and add rules; the last rule that matches wins::

        policy = (
            fp8compile.Policy.default()
            .keep("lm_head", "**.router", reason="decides routing")
            .use("rowwise", "layers.*.mlp", roles=("fprop", "dgrad"))
        )

    For anything else override :meth:`decide` in a subclass, and :meth:`fingerprint` if compiled graphs may be cached.
    """

    base: Base = "default"
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if self.base not in get_args(Base):
            raise ValueError(f"Policy: base {self.base!r} is unknown; use one of {', '.join(get_args(Base))}")

    @classmethod
    def default(cls) -> Policy:
        """FP8 where it is faster on the target, except what is known to be sensitive: output heads and logits, routers,
        tied embeddings, attention's inner products, convolutions."""
        return cls("default")

    @classmethod
    def all(cls) -> Policy:
        """FP8 for every matmul with a weight that the target can run, whatever its size."""
        return cls("all")

    @classmethod
    def none(cls) -> Policy:
        """Nothing in FP8; the result equals ``backend="inductor"`` bit for bit."""
        return cls("none")

    def keep(
        self, *patterns: str, reason: str = "kept by a rule", roles: tuple[Role, ...] = ROLES, min_size: int = 0
    ) -> Policy:
        """Keep the modules that match ``patterns`` in high precision.

        Args:
            patterns: globs over module (or parameter) names; none means every module.
            reason: shown in the report.
            roles: keep only these GEMMs.
            min_size: only GEMMs whose M, N and K are all at least this.
        """
        return self._with(Rule(_checked(patterns), _checked_roles(roles), min_size, None, reason))

    def use(
        self, recipe: str | Recipe, *patterns: str, roles: tuple[Role, ...] = ROLES, min_size: int = 0, reason: str = ""
    ) -> Policy:
        """Run the modules that match ``patterns`` in FP8 with ``recipe``, whether or not the cost model expects a gain.

        Args:
            recipe: a name from :data:`fp8compile.RECIPES` or a :class:`Recipe`.
            patterns: globs over module (or parameter) names; none means every module.
            roles: the GEMMs to run in FP8; the other GEMMs of these modules are kept.
            min_size: only GEMMs whose M, N and K are all at least this.
            reason: shown in the report.
        """
        chosen = get_recipe(recipe)
        reason = reason or f"rule: use {chosen.name} for {', '.join(patterns) or 'everything'}"
        return self._with(Rule(_checked(patterns), _checked_roles(roles), min_size, chosen, reason))

    def decide(self, site: Site) -> Decision:
        """The decision for ``site``. The only method that a subclass needs; it may ask ``super().decide(site)``."""
        if isinstance(site, CollectiveSite):
            return keep("collectives keep the model's dtype")
        rule = next((rule for rule in reversed(self.rules) if rule.matches(site)), None)
        decision = rule.decide(site) if rule else None
        if site.kind in WITHOUT_FP8_FORM and (decision is None or decision.fp8):
            return keep(SENSITIVE_KINDS[site.kind])
        if decision is not None:
            return decision
        if self.base == "none":
            return keep("policy: none")
        if site.kind in SENSITIVE_KINDS:
            return keep(SENSITIVE_KINDS[site.kind])
        if self.base == "all":
            return use(reason="policy: all")
        for trait in sorted(site.traits):
            if trait in SENSITIVE_TRAITS:
                return keep(SENSITIVE_TRAITS[trait])
        for pattern, reason in SENSITIVE_NAMES.items():
            if _glob(pattern)(site.module) and not (pattern == "**.gate" and _width(site) > WIDEST_ROUTER):
                return keep(reason)
        return use(reason="policy: default", if_faster=True)

    def fingerprint(self) -> str | None:
        """What distinguishes this policy from others in a cache key; None turns caching of compiled graphs off.

        A subclass is never guessed at: it gets None unless it overrides this.
        """
        if type(self) is not Policy:
            return None
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def _with(self, rule: Rule) -> Policy:
        return dataclasses.replace(self, rules=(*self.rules, rule))


def _width(site: MatmulSite) -> int:
    """Output features of the layer that ``site`` belongs to."""
    return {"fprop": site.n, "dgrad": site.k, "wgrad": site.m}[site.role]


def _checked(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"policy: {pattern!r} is not a module name pattern, such as 'layers.*.mlp'")
    return patterns or ("**",)


def _checked_roles(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    roles = (roles,) if isinstance(roles, str) else tuple(roles)
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"policy: role {role!r} is unknown; use some of {', '.join(ROLES)}")
    return roles


@functools.cache
def _glob(pattern: str) -> Callable[[str], bool]:
    """A matcher of dotted names, whole components at a time."""
    parts = []
    for component in pattern.split("."):
        if component == "**":
            parts.append(r"(?:[^.]+\.)*")
        else:
            tokens = re.findall(r"\[!?[^\]]+\]|.", component)
            parts.append("".join(_GLOB_TOKENS.get(token) or _glob_literal(token) for token in tokens) + r"\.")
    regex = re.compile("".join(parts) + r"(?:[^.]+\.)*")
    return lambda name: regex.fullmatch(name + "." if name else "") is not None


_GLOB_TOKENS = {"*": "[^.]*", "?": "[^.]"}


def _glob_literal(token: str) -> str:
    if len(token) == 1:
        return re.escape(token)
    return token.replace("[!", "[^", 1)
