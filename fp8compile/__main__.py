"""The command line: ``python -m fp8compile preview package.module:function``."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp8compile.hardware import CHIPS
from fp8compile.options import OPTIONS, OptionError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fp8compile", description="FP8 for PyTorch, as a compiler.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    preview = commands.add_parser(
        "preview",
        help="what a GPU that is not here would run, and how long it would take",
        description="Compile a step for a GPU that is not here: its kernels, their bytes, and a predicted time.",
    )
    preview.add_argument(
        "build",
        metavar="module:function",
        help="returns the model and a tuple of its inputs; they may be on the meta device, and are only looked at",
    )
    preview.add_argument("--target", choices=list(CHIPS), help="the chip (default: the GPU present, else h100)")
    preview.add_argument(
        "--option",
        "-o",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"as in torch.compile(options=...): {', '.join(OPTIONS)}, or Inductor's; may be repeated",
    )
    preview.add_argument("--summary", action="store_true", help="print totals, not every kernel")
    preview.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    preview.add_argument("--picture", type=Path, metavar="FILE", help="write a timeline; .png, .svg or .pdf")
    chosen = parser.parse_args(arguments)
    return run_preview(preview, chosen)


def run_preview(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    sys.path.insert(0, "")
    build = load(parser, chosen.build)
    built = build()
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], tuple)):
        parser.error(f"{chosen.build} must return (model, tuple of inputs), not {type(built).__name__}")
    options = dict(parse_option(parser, text) for text in chosen.option)

    from fp8compile.preview.result import preview

    model, inputs = built
    try:
        result = preview(model, *inputs, target=chosen.target, options=options)
    except OptionError as error:
        parser.error(str(error))
    print(f"{result.summary()}\n\n{result.assumptions}" if chosen.summary else result)
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(result.to_json() + "\n")
    if chosen.picture:
        result.save_picture(chosen.picture)
    return 0


def load(parser: argparse.ArgumentParser, path: str) -> Callable[[], Any]:
    module_name, _, name = path.partition(":")
    if not name:
        parser.error(f"{path!r} is not of the form module:function")
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        parser.error(f"{path}: {error}")
    except AttributeError:
        parser.error(f"{path}: module {module_name} has no {name!r}")
    return found


def parse_option(parser: argparse.ArgumentParser, text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        parser.error(f"--option {text!r} is not of the form KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


if __name__ == "__main__":
    sys.exit(main())
