"""Whether FP8 learns as bf16 does: the demo's GPT, several seeds, bf16 against FP8 from the same start.

    python benchmarks/convergence.py

Prints the final validation losses and the mean over the seeds of their relative difference, which must be within 0.5 %.
Exits with status 1 if it is not. Runs are compared at the same seed: seeds differ by more than precisions do.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import platform
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import fp8compile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from train_gpt import load_text, train  # noqa: E402

LARGEST_DIFFERENCE = 0.005
DEMO = {name: parameter.default for name, parameter in inspect.signature(train).parameters.items()}


@dataclass(frozen=True)
class Pair:
    """Final validation losses of two runs from one seed, in nats per byte, and what went to FP8."""

    seed: int
    bf16: float
    fp8: float
    matmuls_in_fp8: int
    matmuls: int
    seconds: float

    @property
    def difference(self) -> float:
        """Of FP8 relative to bf16; positive is worse."""
        return self.fp8 / self.bf16 - 1


def compare(seed: int, arguments: argparse.Namespace, bar: tqdm) -> Pair:
    """Train in bf16 and in FP8 from one seed."""
    text = load_text(arguments.text)
    sizes = {"seed": seed, "steps": arguments.steps, "width": arguments.width, "depth": arguments.depth, "text": text}
    bar.set_postfix_str(f"seed {seed}, bf16")
    bf16 = train("inductor", **sizes)
    bar.update()
    bar.set_postfix_str(f"seed {seed}, {arguments.recipe}")
    fp8 = train("fp8", options={"policy": "all", "recipe": arguments.recipe}, **sizes)
    bar.update()
    return Pair(
        seed,
        bf16.validation_loss,
        fp8.validation_loss,
        fp8.report.in_fp8,
        len(fp8.report.rows),
        bf16.seconds + fp8.seconds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 (default 3)")
    parser.add_argument("--steps", type=int, default=DEMO["steps"], help="of training (default: the demo's)")
    parser.add_argument("--width", type=int, default=DEMO["width"], help="of the model (default: the demo's)")
    parser.add_argument("--depth", type=int, default=DEMO["depth"], help="layers (default: the demo's)")
    parser.add_argument(
        "--recipe", default="rowwise", help=f"the demo's by default; one of {', '.join(fp8compile.RECIPES)}"
    )
    parser.add_argument("--text", type=Path, help="a text file of your own (default: the topics of pydoc_data)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the numbers")
    arguments = parser.parse_args()
    if arguments.recipe not in fp8compile.RECIPES:
        parser.error(f"--recipe {arguments.recipe!r} is unknown; there are {', '.join(fp8compile.RECIPES)}")

    pairs = []
    with tqdm(total=2 * arguments.seeds, desc="convergence", unit="run", file=sys.stderr) as bar:
        for seed in range(arguments.seeds):
            pairs.append(compare(seed, arguments, bar))

    print(f"{'seed':>4} {'bf16':>8} {'fp8':>8} {'difference':>11}  matmuls in FP8")
    for pair in pairs:
        in_fp8 = f"{pair.matmuls_in_fp8} of {pair.matmuls}"
        print(f"{pair.seed:4} {pair.bf16:8.4f} {pair.fp8:8.4f} {pair.difference:+11.3%}  {in_fp8}")
    mean = statistics.fmean(pair.difference for pair in pairs)
    held = abs(mean) <= LARGEST_DIFFERENCE and all(pair.matmuls_in_fp8 for pair in pairs)
    print(f"mean {mean:+.3%}, at most ±{LARGEST_DIFFERENCE:.1%}: {'ok' if held else 'BROKEN'}")
    results = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fp8compile": fp8compile.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
        "recipe": arguments.recipe,
        "steps": arguments.steps,
        "width": arguments.width,
        "depth": arguments.depth,
        "mean_difference": round(mean, 6),
        "seeds": [
            {
                "seed": pair.seed,
                "bf16": round(pair.bf16, 5),
                "fp8": round(pair.fp8, 5),
                "difference": round(pair.difference, 6),
                "matmuls_in_fp8": pair.matmuls_in_fp8,
                "matmuls": pair.matmuls,
                "seconds": round(pair.seconds),
            }
            for pair in pairs
        ],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"convergence_{arguments.recipe}.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
