"""What our passes cost while compiling: a share of Inductor's time, and linear in the size of the graph.

    python benchmarks/compile_time.py

Two bounds: on a 12-layer GPT the passes take at most 10 % of what ``backend="inductor"`` takes to compile it (measured
with an empty cache, forward and backward), and at 48 layers they take per graph node at most 1.3 times what they take
at 6. Exits with status 1 if one is broken. Times are wall-clock: on a busy machine raise --repeats.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor.utils import fresh_cache
from tqdm import tqdm

import fp8compile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from train_gpt import GPT  # noqa: E402

LARGEST_SHARE = 0.10
LARGEST_GROWTH = 1.3
SMALL, MIDDLE, LARGE = 6, 12, 48
CONTEXT = 64


@dataclass(frozen=True)
class PassTimes:
    """Our passes on one training graph: milliseconds by pass, and the nodes of the joint graph they started from."""

    layers: int
    nodes: int
    milliseconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.milliseconds.values())

    @property
    def per_node(self) -> float:
        """Microseconds."""
        return 1e3 * self.total / self.nodes


def step(layers: int, width: int, backend: str, options: dict[str, Any] | None) -> None:
    """Compile a GPT and run one training step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(width, layers, 4, CONTEXT)
    tokens = torch.randint(0, 256, (2, CONTEXT))
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.compile(model, backend=backend, options=options)(tokens, tokens)
    loss.backward()


def time_passes(layers: int, width: int) -> PassTimes:
    """One compilation whose graph is rewritten and not compiled further."""
    nodes: list[int] = []
    with fp8compile.collect_reports(lambda report, before, after, context: nodes.append(len(before.nodes))) as report:
        step(layers, width, "fp8", {"policy": "all", "engine": "eager"})
    milliseconds: dict[str, float] = {}
    for graph in report.graphs:
        for entry in graph.passes:
            milliseconds[entry["pass"]] = milliseconds.get(entry["pass"], 0.0) + entry["milliseconds"]
    assert report.in_fp8 > 0
    return PassTimes(layers, sum(nodes), milliseconds)


def quicker(one: PassTimes | None, other: PassTimes) -> PassTimes:
    """Pass by pass the quicker of two measurements: whatever else the machine does only adds."""
    if one is None:
        return other
    both = {name: min(one.milliseconds[name], other.milliseconds[name]) for name in other.milliseconds}
    return PassTimes(other.layers, other.nodes, both)


def time_inductor(layers: int, width: int) -> float:
    """Seconds that ``backend="inductor"`` takes for the first training step, everything compiled anew."""
    with fresh_cache():
        start = time.perf_counter()
        step(layers, width, "inductor", None)
        return time.perf_counter() - start


def time_passes_in_full(layers: int, width: int) -> float:
    """Seconds of all our passes, lowering included, when generated code is what comes out."""
    with fresh_cache(), fp8compile.collect_reports() as report:
        step(layers, width, "fp8", {"policy": "all"})
    return sum(entry["milliseconds"] for graph in report.graphs for entry in graph.passes) / 1e3


@contextmanager
def announced(bar: Any, what: str) -> Iterator[None]:
    bar.set_postfix_str(what)
    yield
    bar.update()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64, help="of the GPT; graphs do not depend on it (default 64)")
    parser.add_argument("--repeats", type=int, default=3, help="rewrites per depth, the quickest counts (default 3)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the numbers")
    arguments = parser.parse_args()

    depths = (SMALL, MIDDLE, LARGE)
    quickest: dict[int, PassTimes | None] = dict.fromkeys(depths)
    with tqdm(total=3 + len(depths) * arguments.repeats, desc="compile time", unit="run", file=sys.stderr) as bar:
        with announced(bar, "warm-up"):
            time_passes(1, arguments.width)
        for _ in range(arguments.repeats):
            for layers in depths:
                with announced(bar, f"passes, {layers} layers"):
                    quickest[layers] = quicker(quickest[layers], time_passes(layers, arguments.width))
        with announced(bar, f"inductor, {MIDDLE} layers"):
            inductor = time_inductor(MIDDLE, arguments.width)
        with announced(bar, f"fp8, {MIDDLE} layers"):
            ours = time_passes_in_full(MIDDLE, arguments.width)
    rewrites = [times for times in quickest.values() if times is not None]

    names = list(rewrites[-1].milliseconds)
    print(f"{'layers':>6} {'nodes':>6} {'ms':>8} {'µs/node':>8}  " + "  ".join(names))
    for r in rewrites:
        each = "  ".join(f"{r.milliseconds[name]:{len(name)}.1f}" for name in names)
        print(f"{r.layers:6} {r.nodes:6} {r.total:8.1f} {r.per_node:8.1f}  {each}")
    growth, share = rewrites[-1].per_node / rewrites[0].per_node, ours / inductor
    bounds = {
        f"passes / inductor at {MIDDLE} layers ({ours:.2f} s of {inductor:.1f} s)": (share, LARGEST_SHARE),
        f"per node, {LARGE} layers / {SMALL} layers": (growth, LARGEST_GROWTH),
    }
    print()
    for name, (value, bound) in bounds.items():
        print(f"{name}: {value:.3f}, at most {bound}: {'ok' if value <= bound else 'BROKEN'}")
    results = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fp8compile": fp8compile.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
        "inductor_seconds": round(inductor, 2),
        "passes_seconds": round(ours, 3),
        "share": round(share, 4),
        "growth_per_node": round(growth, 3),
        "rewrites": [
            {"layers": r.layers, "nodes": r.nodes, "milliseconds": {k: round(v, 2) for k, v in r.milliseconds.items()}}
            for r in rewrites
        ],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "compile_time.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(value <= bound for value, bound in bounds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
