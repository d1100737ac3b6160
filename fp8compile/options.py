"""Every option of ``torch.compile(..., backend="fp8", options=...)``: what it is, its default, and its check."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8compile.hardware import CHIPS, Chip, get_chip
from fp8compile.policy import Policy
from fp8compile.recipe import DEFAULT_RECIPE, RECIPES, Recipe, get_recipe

ENGINES = ("inductor", "eager")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


READ_BY_DYNAMO = ("freezing",)
"""Inductor's options that decide how a graph is captured: too late for a backend to set."""


class OptionError(ValueError):
    """An option that does not exist, or a value that it does not take."""


def _policy(value: Any) -> Policy:
    named: dict[str, Callable[[], Policy]] = {"default": Policy.default, "all": Policy.all, "none": Policy.none}
    if isinstance(value, str) and value in named:
        return named[value]()
    if not isinstance(value, Policy):
        raise TypeError("takes a fp8compile.Policy or one of 'default', 'all', 'none'")
    return value


def _target(value: Any) -> Chip:
    if isinstance(value, Chip):
        return value
    if value is not None and not isinstance(value, str):
        raise TypeError(f"takes the name of a chip ({', '.join(CHIPS)}) or a fp8compile.hardware.Chip")
    return get_chip(value)


def _one_of(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"takes one of {', '.join(map(repr, choices))}")
        return str(value)

    return check


def _folder(value: Any) -> Path | None:
    if value is not None and not isinstance(value, (str, Path)):
        raise TypeError("takes a folder's path")
    return Path(value) if value else None


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("takes True or False")
    return value


@dataclass(frozen=True)
class Option:
    """One option: default, check (returns the value as it is used, raises if it is wrong), and what it is for."""

    default: Any
    check: Callable[[Any], Any]
    help: str


OPTIONS: dict[str, Option] = {
    "recipe": Option(DEFAULT_RECIPE, get_recipe, f"how matmuls are quantized: {', '.join(RECIPES)}, or a Recipe"),
    "policy": Option("default", _policy, "which matmuls run in FP8: 'default', 'all', 'none', or a Policy"),
    "target": Option(None, _target, f"the chip to decide for: {', '.join(CHIPS)}; default: the GPU present, else h100"),
    "engine": Option("inductor", _one_of(*ENGINES), "'inductor', or 'eager' to run the rewritten graph op by op"),
    "mode": Option("default", _one_of(*MODES), "as torch.compile's mode=, which it refuses beside options="),
    "debug": Option(None, _folder, "folder to write graphs and decisions to"),
    "reuse_weight_casts": Option(
        False, _flag, "quantize weights only when they have changed: once a step, whatever the micro-batches"
    ),
    "verify": Option(False, _flag, "check the graph after every pass"),
}


@dataclass(frozen=True)
class Options:
    """Checked options, and Inductor's own keys as they came."""

    recipe: Recipe
    policy: Policy
    target: Chip
    engine: str
    mode: str
    debug: Path | None
    reuse_weight_casts: bool
    verify: bool
    inductor: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Check ``options``.

        Raises:
            OptionError: names the option, says what it takes or what there is, and guesses what was meant.
        """
        given = dict(options or {})
        if mode is not None:
            given.setdefault("mode", mode)
        checked: dict[str, Any] = {}
        for name, option in OPTIONS.items():
            value = given.pop(name, option.default)
            try:
                checked[name] = option.check(value)
            except (TypeError, ValueError) as error:
                raise OptionError(f"backend 'fp8': option {name!r} got {value!r}: {error}") from error
        for name, value in given.items():
            _check_inductor_option(name, value)
        inductor = {name.replace("-", "_"): value for name, value in given.items()}
        return cls(**checked, inductor=tuple(inductor.items()))

    def config_patches(self) -> dict[str, Any]:
        """Inductor's configuration for ``mode`` and for the keys passed through."""
        from torch._inductor import list_mode_options

        patches = dict(list_mode_options(self.mode)) if self.mode != "default" else {}
        return {**patches, **dict(self.inductor)}

    def fingerprint(self) -> str | None:
        """What distinguishes the graphs these options make; None if the policy cannot say."""
        policy = self.policy.fingerprint()
        if policy is None:
            return None
        return repr(dataclasses.replace(self, debug=None, policy=Policy())) + policy


def _check_inductor_option(name: str, value: Any) -> None:
    from torch._inductor import config

    known = config.get_config_copy()
    key = name.replace("-", "_")
    if key not in known:
        guesses = difflib.get_close_matches(name, [*OPTIONS, *known], n=1)
        guess = f"; did you mean {guesses[0]!r}?" if guesses else ""
        ours = "\n".join(f"  {option}: {entry.help}" for option, entry in OPTIONS.items())
        raise OptionError(
            f"backend 'fp8': there is no option {name!r}{guess}\n"
            f"Options are those of torch._inductor.config and\n{ours}"
        )
    if key in READ_BY_DYNAMO and value != known[key]:
        raise OptionError(
            f"backend 'fp8': option {name!r} has no effect here, since Dynamo reads it before a backend is called; "
            f"set torch._inductor.config.{key} = {value!r} before compiling"
        )
    default = known[key]
    comparable = isinstance(default, (bool, int, float, str)) and value is not None
    if comparable and not isinstance(value, (int, float) if type(default) is float else type(default)):
        raise OptionError(
            f"backend 'fp8': Inductor's option {name!r} takes {type(default).__name__}, "
            f"not {type(value).__name__} {value!r}"
        )
