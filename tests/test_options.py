"""Options: what each takes, what errors say, what reaches Inductor, and what a cache key is made of."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from models import compile_fp8, mlp, normal
from torch import nn
from torch._inductor import list_mode_options

import fp8compile as fp8
from fp8compile import RECIPES, Policy, Recipe
from fp8compile.hardware import CHIPS
from fp8compile.options import ENGINES, MODES, OPTIONS, OptionError, Options


def test_defaults() -> None:
    options = Options.parse(None)
    assert options.recipe == RECIPES["rowwise_once"]
    assert options.policy == Policy.default()
    assert (options.engine, options.mode, options.debug, options.verify) == ("inductor", "default", None, False)
    assert options.inductor == ()
    assert options == Options.parse({})


def test_every_option_has_a_help_and_a_default_that_it_takes() -> None:
    assert {field.name for field in dataclasses.fields(Options)} == {*OPTIONS, "inductor"}
    for option in OPTIONS.values():
        assert option.help
        option.check(option.default)


def test_target_without_a_gpu_is_an_h100() -> None:
    if not torch.cuda.is_available():
        assert Options.parse({}).target == CHIPS["h100"]


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("recipe", "rowwise", RECIPES["rowwise"]),
        ("recipe", Recipe("mine"), Recipe("mine")),
        ("policy", "all", Policy.all()),
        ("policy", "none", Policy.none()),
        ("policy", Policy.all().keep("a"), Policy.all().keep("a")),
        ("target", "H200", CHIPS["h200"]),
        ("target", CHIPS["b200"], CHIPS["b200"]),
        ("engine", "eager", "eager"),
        ("mode", "max-autotune", "max-autotune"),
        ("debug", "folder", Path("folder")),
        ("debug", Path("folder"), Path("folder")),
        ("debug", None, None),
        ("debug", "", None),
        ("verify", True, True),
    ],
)
def test_values_that_an_option_takes(name: str, value, parsed) -> None:
    assert getattr(Options.parse({name: value}), name) == parsed


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("recipe", "rowise", "tensorwise, rowwise, rowwise_hp_wgrad"),
        ("recipe", 3, "name or a Recipe, not int"),
        ("recipe", None, "name or a Recipe, not NoneType"),
        ("policy", "everything", "'default', 'all', 'none'"),
        ("policy", Policy, "'default', 'all', 'none'"),
        ("policy", None, "'default', 'all', 'none'"),
        ("target", "h1000", "a100, h100, h200, b200"),
        ("target", 90, "a100, h100, h200, b200"),
        ("engine", "triton", "'inductor', 'eager'"),
        ("engine", ["eager"], "'inductor', 'eager'"),
        ("mode", "fast", "'default', 'reduce-overhead'"),
        ("debug", 3, "folder"),
        ("verify", 1, "True or False"),
        ("verify", "yes", "True or False"),
    ],
)
def test_wrong_value_is_an_error_that_names_option_and_value_and_says_what_it_takes(name, value, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({name: value})
    message = str(caught.value)
    assert f"option {name!r}" in message
    assert repr(value) in message
    assert expected in message


@pytest.mark.parametrize(
    ("name", "guess"),
    [("recpie", "recipe"), ("max_autotun", "max_autotune"), ("polici", "policy"), ("Verify", "verify")],
)
def test_unknown_option_is_named_and_guessed(name: str, guess: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"there is no option {name!r}; did you mean {guess!r}?")):
        Options.parse({name: 1})


def test_unknown_option_without_a_likeness_lists_what_there_is() -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({"zzzzqqqq": 1})
    message = str(caught.value)
    assert "did you mean" not in message
    for name, option in OPTIONS.items():
        assert f"{name}: {option.help}" in message
    assert "torch._inductor.config" in message


# --- Inductor's own keys ----------------------------------------------------------------------------------------------


def test_inductors_own_keys_pass_through_beside_ours() -> None:
    options = Options.parse(
        {"recipe": "rowwise", "max_autotune": True, "triton.cudagraphs": False, "epilogue-fusion": True}
    )
    patches = options.config_patches()
    assert patches == {"max_autotune": True, "triton.cudagraphs": False, "epilogue_fusion": True}


@pytest.mark.parametrize("mode", MODES)
def test_mode_is_what_inductor_makes_of_it(mode: str) -> None:
    expected = {} if mode == "default" else dict(list_mode_options(mode))
    assert Options.parse({"mode": mode}).config_patches() == expected
    assert Options.parse({}, mode).config_patches() == expected


def test_key_of_ones_own_beats_the_mode() -> None:
    patches = Options.parse({"mode": "max-autotune", "coordinate_descent_tuning": False}).config_patches()
    assert patches["coordinate_descent_tuning"] is False
    assert patches["max_autotune"] is True


@pytest.mark.parametrize(
    ("key", "value", "takes"),
    [("max_autotune", "yes", "bool"), ("epilogue_fusion", 1, "bool"), ("cpp.threads", "4", "int")],
)
def test_wrong_type_of_inductors_option_names_it(key: str, value, takes: str) -> None:
    with pytest.raises(OptionError, match=rf"'{re.escape(key)}' takes {takes}, not {type(value).__name__}"):
        Options.parse({key: value})


def test_inductors_keys_reach_inductor() -> None:
    """Seen from inside: the value is in force while Inductor compiles the graph, and gone afterwards."""
    from torch._inductor import config

    seen = []
    before = config.epilogue_fusion
    with fp8.collect_reports(lambda *_: seen.append(config.epilogue_fusion)):
        compile_fp8(mlp(), epilogue_fusion=not before)(normal(32, 64))
    assert seen == [not before]
    assert config.epilogue_fusion == before


# --- Through torch.compile --------------------------------------------------------------------------------------------


def through_torch_compile(**kwargs) -> None:
    torch.compile(nn.Linear(32, 32), backend="fp8", **kwargs)(torch.randn(32, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recpie": "rowwise"}, "there is no option 'recpie'; did you mean 'recipe'?"),
        ({"recipe": "rowise"}, "option 'recipe' got 'rowise'"),
        ({"verify": "yes"}, "option 'verify' got 'yes'"),
        ({"max_autotune": "yes"}, "Inductor's option 'max_autotune' takes bool"),
    ],
)
def test_message_survives_torch_compile(options: dict, message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        through_torch_compile(options=options)


def test_mode_argument_of_torch_compile_reaches_inductor() -> None:
    """Through the entry point, as with Inductor; 'max-autotune-no-cudagraphs' needs no GPU."""
    from torch._inductor import config

    seen = []
    with fp8.collect_reports(lambda *_: seen.append(config.max_autotune)):
        through_torch_compile(mode="max-autotune-no-cudagraphs")
    assert seen == [True]


def test_mode_inside_options_reaches_inductor() -> None:
    from torch._inductor import config

    seen = []
    with fp8.collect_reports(lambda *_: seen.append(config.max_autotune)):
        compile_fp8(mlp(), mode="max-autotune-no-cudagraphs")(normal(32, 64))
    assert seen == [True]


def test_unknown_mode_is_an_error_that_names_it() -> None:
    with pytest.raises(Exception, match="fastest"):
        through_torch_compile(mode="fastest")


@pytest.mark.parametrize("engine", ENGINES)
def test_backend_as_an_object_takes_the_same_options(engine: str) -> None:
    """``backend=fp8compile.fp8`` is the same backend; both engines give the model's result."""
    model, x = nn.Linear(32, 32), torch.randn(32, 32)
    with fp8.collect_reports() as report, torch.no_grad():
        out = torch.compile(model, backend=fp8.fp8, options={"policy": "all", "engine": engine, "verify": True})(x)
    assert report.in_fp8 == 1
    assert (out - model(x)).norm() < 0.1 * model(x).norm()


# --- The cache key ----------------------------------------------------------------------------------------------------


def test_fingerprint_differs_for_everything_that_changes_the_graph() -> None:
    different = [
        {},
        {"recipe": "rowwise"},
        {"recipe": Recipe.uniform("tensorwise", power_of_two=True)},
        {"policy": "all"},
        {"policy": Policy.all().keep("a")},
        {"target": "b200"},
        {"target": dataclasses.replace(CHIPS["h100"], alignment=32)},
        {"max_autotune": True},
    ]
    prints = [Options.parse(options).fingerprint() for options in different]
    assert None not in prints
    assert len(set(prints)) == len(different)


def test_fingerprint_is_the_same_for_what_does_not_change_the_graph(tmp_path: Path) -> None:
    assert Options.parse({"debug": str(tmp_path)}).fingerprint() == Options.parse({}).fingerprint()
    assert (
        Options.parse({"policy": "default"}).fingerprint() == Options.parse({"policy": Policy.default()}).fingerprint()
    )


def test_fingerprint_is_none_if_the_policy_has_none() -> None:
    class Mine(Policy):
        pass

    assert Options.parse({"policy": Mine()}).fingerprint() is None


def test_freezing_as_an_option_is_an_error_and_not_ignored() -> None:
    """Dynamo reads it while it captures; as an option it would do nothing in silence. Inductor's own setting works."""
    with pytest.raises(OptionError, match=r"'freezing' has no effect.*torch\._inductor\.config\.freezing = True"):
        Options.parse({"freezing": True})
    with torch._inductor.config.patch(freezing=True):
        Options.parse({"freezing": True})
