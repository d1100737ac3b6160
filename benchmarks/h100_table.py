"""What one transformer block costs on an H100 that is not here: bf16, ours, and torchao where it is installed.

    python benchmarks/h100_table.py

Forward and backward with gradients of input and parameters, every Linear's GEMMs in FP8, scales current, weight casts
counted, attention left out of both sides; and the Llama block in inference, its weights cast before. Bytes are what
kernels other than GEMMs read and write, each buffer once a kernel; launches are all but GEMMs. Predicted by the
roofline of ``fp8compile.hardware``. Exits with 1 if a bound that the table states is broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blocks import SHAPES, Shape, build
from torch import nn
from tqdm import tqdm

import fp8compile
from fp8compile.options import Options
from fp8compile.preview.result import Program, lower_program

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Bound:
    """What a block's FP8 step must reach."""

    speedup: float
    gigabytes: float | None = None
    launches: int | None = None

    def broken_by(self, program: Program, speedup: float) -> list[str]:
        broken = []
        if speedup < self.speedup:
            broken.append(f"{speedup:.2f}x is below {self.speedup:.2f}x")
        if self.gigabytes is not None and program.moved > self.gigabytes * 1e9:
            broken.append(f"{program.moved / 1e9:.2f} GB are more than {self.gigabytes} GB")
        if self.launches is not None and program.launches > self.launches:
            broken.append(f"{program.launches} launches are more than {self.launches}")
        return broken


BOUNDS = {
    "llama-3-8b": Bound(1.62, 6.6, 45),
    "gpt-7b": Bound(1.58),
    "llama-70b/tp8": Bound(1.48),
    "small": Bound(1.0),
}


INFERENCE = {16: 1.64, 8192: 1.76}
"""Tokens of the Llama block in inference, and the speedup of torchao 0.18 with frozen weights."""


def lowered(model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> Program:
    program, _ = lower_program(model, inputs, {}, Options.parse({"target": "h100", **options}))
    return program


def torchao_model(model: nn.Module, recipe: str) -> nn.Module | None:
    """The block with torchao's Linears, or None without torchao."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError:
        return None
    converted: nn.Module = convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    return converted


def row(name: str, program: Program, high: Program) -> dict[str, Any]:
    return {
        "name": name,
        "gigabytes": round(program.moved / 1e9, 3),
        "launches": program.launches,
        "saved_gigabytes": round(program.saved / 1e9, 3),
        "milliseconds": round(program.seconds(attention=False) * 1e3, 3),
        "speedup": round(high.seconds(attention=False) / program.seconds(attention=False), 3),
        "gemms_in_fp8": sum(kernel.dtype.startswith("float8") for kernel in program.of_kind("gemm")),
        "gemms": len(program.of_kind("gemm")),
    }


def inference(shape: Shape, policy: str) -> list[dict[str, Any]]:
    """bf16, and ours with weights that were cast before."""
    model, inputs = build(shape)
    with torch.no_grad():
        high = lowered(model, inputs, policy="none")
        ours = lowered(model, inputs, policy=policy, reuse_weight_casts=True)
    return [row("bf16", high, high), row("ours, weights cast before", ours, high)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="default: all")
    parser.add_argument(
        "--recipes", nargs="+", choices=list(fp8compile.RECIPES), default=[fp8compile.recipe.DEFAULT_RECIPE]
    )
    parser.add_argument("--policy", choices=["default", "all"], default="default")
    parser.add_argument("--no-torchao", action="store_true", help="leave torchao out")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the numbers")
    chosen = parser.parse_args()

    peers = [] if chosen.no_torchao else ["tensorwise", "rowwise"]
    tables: dict[str, list[dict[str, Any]]] = {}
    broken: list[str] = []
    steps = len(chosen.blocks) * (1 + len(chosen.recipes) + len(peers))
    steps += len(INFERENCE) * ("llama-3-8b" in chosen.blocks)
    with tqdm(total=steps, unit="step", file=sys.stderr) as bar:
        for name in chosen.blocks:
            model, inputs = build(SHAPES[name])
            high = lowered(model, inputs, policy="none")
            bar.update()
            tables[name] = [row("bf16", high, high)]
            for recipe in chosen.recipes:
                ours = lowered(model, inputs, policy=chosen.policy, recipe=recipe)
                bar.update()
                tables[name].append(row(f"ours, {recipe}", ours, high))
                if recipe == fp8compile.recipe.DEFAULT_RECIPE:
                    speedup = tables[name][-1]["speedup"]
                    broken += [f"{name}: {complaint}" for complaint in BOUNDS[name].broken_by(ours, speedup)]
            for recipe in peers:
                theirs = torchao_model(build(SHAPES[name])[0], recipe)
                if theirs is not None:
                    tables[name].append(row(f"torchao, {recipe}", lowered(theirs, inputs, policy="none"), high))
                bar.update()

        if "llama-3-8b" in chosen.blocks:
            for tokens, theirs in INFERENCE.items():
                shape = dataclasses.replace(SHAPES["llama-3-8b"], tokens=tokens)
                rows = inference(shape, chosen.policy)
                tables[f"llama-3-8b, inference, {tokens} tokens"] = rows
                # as printed: two decimals is what the other was measured to
                if round(rows[-1]["speedup"], 2) < theirs:
                    broken.append(f"inference of {tokens} tokens: {rows[-1]['speedup']:.2f}x is below {theirs:.2f}x")
                bar.update()

    for name, rows in tables.items():
        print(f"\n{name}" + (f": {SHAPES[name]}" if name in SHAPES else ""))
        print(f"  {'':<27}{'GB':>8}{'launches':>10}{'GB saved':>10}{'ms':>9}{'speedup':>9}  GEMMs in FP8")
        for r in rows:
            print(
                f"  {r['name']:<27}{r['gigabytes']:>8.2f}{r['launches']:>10}{r['saved_gigabytes']:>10.2f}"
                f"{r['milliseconds']:>9.2f}{r['speedup']:>8.2f}x  {r['gemms_in_fp8']} of {r['gemms']}"
            )
    print("\n" + ("BROKEN: " + "; ".join(broken) if broken else "every bound of the default recipe holds"))
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "h100_table.json").write_text(
        json.dumps(
            {
                "date": datetime.date.today().isoformat(),
                "torch": torch.__version__,
                "fp8compile": fp8compile.__version__,
                "policy": chosen.policy,
                "blocks": tables,
            },
            indent=1,
        )
        + "\n"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
