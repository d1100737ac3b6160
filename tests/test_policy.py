"""Policies: patterns, precedence, roles, sizes, what the default keeps, and subclasses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8compile import RECIPES, CollectiveSite, Decision, MatmulSite, Policy, Recipe, keep, use
from fp8compile.policy import SENSITIVE_KINDS, SENSITIVE_TRAITS, WITHOUT_FP8_FORM
from fp8compile.recipe import OPERANDS, ROLES


def site(module: str = "layers.0.mlp.up", role: str = "fprop", size: int = 4096, **changes) -> MatmulSite:
    """A square GEMM of a Linear layer called ``module``."""
    plain = MatmulSite(
        name="mm",
        op="mm",
        kind="linear",
        role=role,
        module=module,
        module_class="Linear",
        weight=f"{module}.weight" if module else "weight",
        operands=OPERANDS[role],
        batch=1,
        m=size,
        n=size,
        k=size,
        dynamic=frozenset(),
        dtypes=(torch.bfloat16, torch.bfloat16),
        out_dtype=torch.bfloat16,
    )
    return replace(plain, **changes)


def kept(policy: Policy, *modules: str) -> list[str]:
    return [name for name in modules if not policy.decide(site(name)).fp8]


# --- Patterns ---------------------------------------------------------------------------------------------------------

NAMES = ["layer1", "layer10", "layer1.fc", "layers.0.mlp.up", "layers.0.mlp.up_proj", "layers.0.1.mlp", "a.b.router"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("layer1", ["layer1", "layer1.fc"]),
        ("layer1*", ["layer1", "layer10", "layer1.fc"]),
        ("laye?1", ["layer1", "layer1.fc"]),
        ("layer1?", ["layer10"]),
        ("layers.*.mlp", ["layers.0.mlp.up", "layers.0.mlp.up_proj"]),
        ("layers.*.mlp.up", ["layers.0.mlp.up"]),
        ("layers.*.mlp.*", ["layers.0.mlp.up", "layers.0.mlp.up_proj"]),
        ("layers.[0-3].mlp", ["layers.0.mlp.up", "layers.0.mlp.up_proj"]),
        ("layers.[!0].mlp", []),
        ("**.mlp", ["layers.0.mlp.up", "layers.0.mlp.up_proj", "layers.0.1.mlp"]),
        ("layers.**.mlp", ["layers.0.mlp.up", "layers.0.mlp.up_proj", "layers.0.1.mlp"]),
        ("*.router", []),
        ("**.router", ["a.b.router"]),
        ("router", []),
        ("mlp", []),
        ("layers.0.mlp.up.weight", ["layers.0.mlp.up"]),
        ("**", NAMES),
    ],
)
def test_patterns_match_whole_components(pattern: str, matched: list[str]) -> None:
    """``*`` stays within a component, ``**`` spans components, a module's name covers what is inside of it."""
    assert kept(Policy.all().keep(pattern), *NAMES) == matched


components = st.text("ab1_", min_size=1, max_size=3)
names = st.lists(components, min_size=1, max_size=4).map(".".join)


@given(names, names)
@settings(max_examples=200, deadline=None)
def test_literal_pattern_matches_the_module_and_its_descendants_only(pattern: str, name: str) -> None:
    expected = name.split(".")[: len(pattern.split("."))] == pattern.split(".")
    assert (kept(Policy.all().keep(pattern), name) == [name]) == expected


def test_characters_that_mean_something_to_regular_expressions_are_literal() -> None:
    """A dot separates components; parentheses and pluses stand for themselves."""
    assert kept(Policy.all().keep("a+(b)"), "a+(b)", "aab") == ["a+(b)"]
    assert kept(Policy.all().keep("a.b"), "a.b", "axb") == ["a.b"]


def test_rule_without_patterns_is_for_every_module() -> None:
    assert kept(Policy.all().keep(reason="debugging"), *NAMES, "") == [*NAMES, ""]


def test_parameter_of_the_root_is_matched_by_its_name() -> None:
    """A matmul on a plain parameter has no module of its own but the root; its weight's name serves."""
    root = site("", weight="w")
    assert not Policy.all().keep("w").decide(root).fp8
    assert Policy.all().keep("w2").decide(root).fp8


# --- Precedence, roles, sizes -----------------------------------------------------------------------------------------


def test_last_rule_wins() -> None:
    policy = Policy.all().keep("layers").use("rowwise", "layers.0").keep("layers.0.mlp.up", reason="last")
    assert policy.decide(site("layers.1.mlp.up")).reason == "kept by a rule"
    assert policy.decide(site("layers.0.mlp.down")).recipe == RECIPES["rowwise"]
    assert policy.decide(site("layers.0.mlp.up")) == keep("last")
    assert Policy.all().keep("a", reason="1").keep("a", reason="2").decide(site("a")).reason == "2"


def test_roles_of_use_run_in_fp8_and_the_layers_other_roles_are_kept_with_a_reason() -> None:
    policy = Policy.all().use("rowwise", "layers.*.mlp", roles=("fprop", "dgrad"))
    decisions = {role: policy.decide(site(role=role)) for role in ROLES}
    assert [role for role in ROLES if decisions[role].fp8] == ["fprop", "dgrad"]
    assert "wgrad not among its roles" in decisions["wgrad"].reason


def test_roles_of_keep_leave_the_other_roles_to_earlier_rules() -> None:
    policy = Policy.all().keep("layers", roles=("wgrad",), reason="wgrad in bf16")
    assert [role for role in ROLES if policy.decide(site(role=role)).fp8] == ["fprop", "dgrad"]
    assert policy.decide(site(role="wgrad")).reason == "wgrad in bf16"


def test_min_size_looks_at_the_smallest_of_m_n_k() -> None:
    policy = Policy.none().use("rowwise", min_size=1024)
    assert policy.decide(site(size=1024)).fp8
    for dimension in ("m", "n", "k"):
        assert policy.decide(site(size=4096, **{dimension: 1023})).reason == "policy: none"


def test_rules_do_not_change_the_policy_they_are_added_to() -> None:
    base = Policy.all()
    base.keep("layers")
    assert base == Policy.all()
    assert base.decide(site()).fp8


def test_recipe_of_a_rule_beats_the_default_recipe() -> None:
    mine = Recipe.uniform("mine", granularity="rowwise")
    policy = Policy.all().use(mine, "layers.0")
    assert policy.decide(site("layers.0.fc")).recipe is mine
    assert policy.decide(site("layers.1.fc")) == use(reason="policy: all")  # leaves the recipe to the options


# --- What the bases do ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(SENSITIVE_KINDS))
@pytest.mark.parametrize("base", ["default", "all"])
def test_sensitive_kinds_are_kept_with_their_reason(base: str, kind: str) -> None:
    assert Policy(base).decide(site(kind=kind)) == keep(SENSITIVE_KINDS[kind])


@pytest.mark.parametrize("kind", sorted(set(SENSITIVE_KINDS)))
def test_rule_that_names_a_module_turns_on_what_has_an_fp8_form(kind: str) -> None:
    """Products of two activations run in FP8 once asked for; what has no FP8 form stays, with its reason."""
    decision = Policy.all().use("rowwise", "layers.0").decide(site("layers.0.attention", kind=kind))
    assert decision.fp8 == (kind not in WITHOUT_FP8_FORM)
    assert decision.fp8 or decision.reason == SENSITIVE_KINDS[kind]


@pytest.mark.parametrize("trait", sorted(SENSITIVE_TRAITS))
def test_default_keeps_sensitive_traits_and_all_does_not(trait: str) -> None:
    sensitive = site(traits=frozenset({trait}))
    assert Policy.default().decide(sensitive) == keep(SENSITIVE_TRAITS[trait])
    assert Policy.all().decide(sensitive).fp8


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["lm_head", "model.lm_head", "model.layers.3.router", "embed_out", "lm_head.inner"])
def test_default_keeps_heads_and_routers_in_every_role(name: str, role: str) -> None:
    decision = Policy.default().decide(site(name, role))
    assert not decision.fp8
    assert "sensitive" in decision.reason


@pytest.mark.parametrize("name", ["lm_header", "my_lm_head", "router_norm", "layers.0.mlp.up"])
def test_default_leaves_other_names_to_the_cost_model(name: str) -> None:
    decision = Policy.default().decide(site(name))
    assert decision.fp8
    assert decision.if_faster


@pytest.mark.parametrize(("role", "dimension"), [("fprop", "n"), ("dgrad", "k"), ("wgrad", "m")])
def test_gate_is_a_router_only_if_it_is_narrow(role: str, dimension: str) -> None:
    """Mixtral's router and a gated MLP's projection are both called ``gate``; experts are fewer than features. Output
    features are N of fprop, K of dgrad, M of wgrad."""
    router = site("layers.0.moe.gate", role, size=4096, **{dimension: 64})
    assert not Policy.default().decide(router).fp8
    assert Policy.default().decide(site("layers.0.mlp.gate", role, size=4096)).fp8


def test_all_and_rules_do_not_ask_the_cost_model() -> None:
    assert not Policy.all().decide(site(size=32)).if_faster
    assert not Policy.default().use("rowwise", "layers").decide(site(size=32)).if_faster


def test_none_keeps_everything_with_a_reason() -> None:
    for role in ROLES:
        for kind in ("linear", "product"):
            assert Policy.none().decide(site(role=role, kind=kind)) == keep("policy: none")


def test_collectives_are_kept_with_a_reason() -> None:
    collective = CollectiveSite("gather", "all_gather_into_tensor", "", (16,), torch.bfloat16, "0")
    for policy in (Policy.all(), Policy.default(), Policy.none()):
        decision = policy.decide(collective)
        assert not decision.fp8
        assert decision.reason


# --- Subclasses and fingerprints --------------------------------------------------------------------------------------


class OnlyEvenLayers(Policy):
    def decide(self, site: MatmulSite) -> Decision:
        if int(site.module.split(".")[1]) % 2:
            return keep("odd layer")
        return use(RECIPES["rowwise"], "even layer")


def test_subclass_decides() -> None:
    assert kept(OnlyEvenLayers(), "layers.0.fc", "layers.1.fc", "layers.2.fc") == ["layers.1.fc"]


def test_subclass_keeps_its_class_when_rules_are_added() -> None:
    assert isinstance(OnlyEvenLayers().keep("layers.0"), OnlyEvenLayers)


def test_fingerprint_of_a_subclass_is_none_unless_it_says() -> None:
    """What a subclass decides is code that we cannot read."""

    class Named(OnlyEvenLayers):
        def fingerprint(self) -> str:
            return "even layers, version 1"

    assert OnlyEvenLayers().fingerprint() is None
    assert Named().fingerprint() == "even layers, version 1"


def test_fingerprints_differ_exactly_if_policies_do() -> None:
    policies = [
        Policy.default(),
        Policy.all(),
        Policy.none(),
        Policy.all().keep("a"),
        Policy.all().keep("b"),
        Policy.all().keep("a", "b"),
        Policy.all().keep("a").keep("b"),
        Policy.all().keep("b").keep("a"),
        Policy.all().keep("a", roles=("fprop",)),
        Policy.all().keep("a", min_size=5),
        Policy.all().keep("a", reason="another"),
        Policy.all().use("rowwise", "a"),
        Policy.all().use("tensorwise", "a"),
        Policy.all().use(Recipe.uniform("rowwise", granularity="rowwise", power_of_two=True), "a"),
    ]
    prints = [policy.fingerprint() for policy in policies]
    assert len(set(prints)) == len(policies)
    assert None not in prints
    assert Policy.all().keep("a").fingerprint() == Policy.all().keep("a").fingerprint()


# --- Errors name the thing --------------------------------------------------------------------------------------------


def test_unknown_role_is_named_and_the_roles_are_listed() -> None:
    with pytest.raises(ValueError, match=r"'forward'.*fprop, dgrad, wgrad"):
        Policy.all().keep("a", roles=("forward",))


def test_single_role_may_be_a_string() -> None:
    assert Policy.all().keep("a", roles="wgrad") == Policy.all().keep("a", roles=("wgrad",))


@pytest.mark.parametrize("pattern", ["", None, 3, ("a",)])
def test_pattern_that_is_no_name_is_named(pattern) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(pattern))):
        Policy.all().keep(pattern)


def test_unknown_recipe_is_named_and_the_recipes_are_listed() -> None:
    with pytest.raises(ValueError, match=r"'rowise'.*tensorwise, rowwise, rowwise_hp_wgrad"):
        Policy.all().use("rowise", "a")


@pytest.mark.parametrize("make", [lambda: keep(""), lambda: use(RECIPES["rowwise"], "")])
def test_decision_without_a_reason_is_refused(make) -> None:
    with pytest.raises(ValueError, match="reason"):
        make()


def test_unknown_base_is_refused() -> None:
    """A misspelt base must not act as another one."""
    with pytest.raises(ValueError, match="'al'"):
        Policy("al")
