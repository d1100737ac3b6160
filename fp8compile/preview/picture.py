"""The picture of a preview: two timelines on one scale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8compile.preview.result import Preview, Program

COLORS = {
    "GEMM, high precision": "tab:blue",
    "GEMM, FP8": "tab:orange",
    "attention": "tab:green",
    "other kernels": "tab:gray",
}


def save_timeline(preview: Preview, path: Path) -> None:
    """Write every kernel of both programs as a bar, as long as it is predicted to take, in the order of launch."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots()
    for row, (name, program) in enumerate((("high\nprecision", preview.high), ("FP8", preview.fp8))):
        end = 0.0
        phase = None
        for start, width, color, of_phase in _bars(program):
            axes.broken_barh([(start, width)], (0.6 - row, 0.8), facecolors=color, edgecolor="white", linewidth=0.3)
            if of_phase != phase:
                axes.text(start, 1.45 - row, of_phase, fontsize=8, va="bottom")
                phase = of_phase
            end = start + width
        axes.text(end, 1.0 - row, f"  {end:.2f} ms", va="center")
        axes.text(0, 1.0 - row, f"{name}  ", ha="right", va="center")
    axes.set_ylim(-0.6, 1.8)
    axes.set_xlim(0, max(program.seconds() for program in (preview.high, preview.fp8)) * 1.1e3)
    axes.set_yticks([])
    axes.set_xlabel(f"ms on {preview.chip.name}, predicted")
    axes.set_title(f"One step, {preview.speedup:.2f}x", loc="left")
    axes.legend(handles=[Patch(color=c, label=n) for n, c in COLORS.items()], loc="upper right", ncols=4, fontsize=8)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _bars(program: Program) -> list[tuple[float, float, str, str]]:
    """Start and length in ms, color and phase of each kernel."""
    bars: list[tuple[float, float, str, str]] = []
    now = 0.0
    for kernel in program.kernels:
        kind = {"attention": "attention", "memory": "other kernels"}.get(kernel.kind)
        kind = kind or ("GEMM, FP8" if kernel.dtype.startswith("float8") else "GEMM, high precision")
        bars.append((now, kernel.seconds * 1e3, COLORS[kind], kernel.phase))
        now += kernel.seconds * 1e3
    return bars
