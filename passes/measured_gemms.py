"""FP8 GEMMs timed on the GPU that is present, and what was measured, remembered on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils._python_dispatch import _disable_current_modes

import fp8compile

aten = torch.ops.aten

Kind = Literal["mm", "bmm", "grouped"]
Scales = Literal["tensorwise", "rowwise", "mixed"]


@dataclass(frozen=True)
class Problem:
    """One FP8 GEMM, ``a [m, k] @ b [n, k]ᵀ``.

    Attributes:
        kind: one product, ``count`` of them (operands with three dimensions), or ``m`` rows in ``count`` groups with
            one ``b`` each.
        m, n, k, count: sizes; of a dynamic one, what it was while tracing.
        dtypes: of ``a`` and of ``b``.
        scales: one for each operand, one for each row of ``a`` and of ``b``, or neither.
        out, bias: dtype of the result; of the bias, or None. fast: sums may stay in the tensor cores' accumulator.
    """

    kind: Kind
    m: int
    n: int
    k: int
    count: int
    dtypes: tuple[torch.dtype, torch.dtype]
    scales: Scales
    out: torch.dtype
    bias: torch.dtype | None
    fast: bool

    def __str__(self) -> str:
        count = "" if self.kind == "mm" else f"{self.count} groups, " if self.kind == "grouped" else f"{self.count}x"
        bias = "" if self.bias is None else f" + {_name(self.bias)}"
        return f"{count}{self.m}x{self.n}x{self.k} {self.scales}{bias} to {_name(self.out)}"

    @property
    def bias_fits(self) -> bool:
        """Whether the library adds the bias in its GEMM: it has the dtype of the result, which is not float32."""
        return self.bias == self.out != torch.float32


Measure = Callable[[Problem, str], float]
"""Seconds that a problem takes: by ``"library"`` or ``"ours"``. Raises RuntimeError where it cannot run."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure_on_gpu(problem: Problem, candidate: str) -> float:
    """Median seconds of a problem on random data on the current GPU."""
    from triton.testing import do_bench

    with _disable_current_modes(), torch.no_grad():
        operands = _operands(problem)
        milliseconds = do_bench(lambda: RUN[problem.kind == "grouped", candidate](problem, *operands), quantiles=[0.5])
    return float(milliseconds) / 1e3


def _operands(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor | None, ...]:
    """a, b, their scales, and the bias, or where each group ends; random, without touching torch's own generator."""
    generator = torch.Generator(device).manual_seed(0)
    first = () if problem.kind != "bmm" else (problem.count,)
    second = () if problem.kind == "mm" else (problem.count,)
    shapes = (*first, problem.m, problem.k), (*second, problem.n, problem.k)
    data = [
        torch.randn(shape, generator=generator, device=device).to(dtype)
        for shape, dtype in zip(shapes, problem.dtypes, strict=True)
    ]
    rows = (problem.scales != "tensorwise", problem.scales == "rowwise")
    scales = [
        torch.ones(shape[:-1] if by_row else [1] * (len(shape) - 1), device=device).unsqueeze(-1)
        for shape, by_row in zip(shapes, rows, strict=True)
    ]
    if problem.kind == "grouped":
        ends = [problem.m * (group + 1) // problem.count for group in range(problem.count)]
        return *data, *scales, torch.tensor(ends, dtype=torch.int32, device=device)
    return *data, *scales, None if problem.bias is None else torch.ones(problem.n, dtype=problem.bias, device=device)


def _library_mm(problem: Problem, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> torch.Tensor:
    inside = bias if problem.bias_fits else None
    out = aten._scaled_mm.default(a, b.t(), scale_a, scale_b.t(), inside, None, problem.out, problem.fast)
    return out if bias is None or problem.bias_fits else out.add_(bias)


def _our_mm(problem: Problem, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> torch.Tensor:
    from fp8compile.kernels.scaled_mm import launch_scaled_mm

    return launch_scaled_mm(a, b, scale_a, scale_b, bias, problem.out, problem.fast)[0]


def _library_grouped(problem: Problem, a: Any, b: Any, scale_a: Any, scale_b: Any, ends: Any) -> torch.Tensor:
    scales = scale_a.squeeze(-1), scale_b.squeeze(-1)
    return aten._scaled_grouped_mm.default(a, b.mT, *scales, ends, None, None, problem.out, problem.fast)


def _our_grouped(problem: Problem, a: Any, b: Any, scale_a: Any, scale_b: Any, ends: Any) -> torch.Tensor:
    from fp8compile.kernels.grouped_mm import launch_scaled_grouped_mm

    return launch_scaled_grouped_mm(a, b, scale_a, scale_b, ends, problem.out, problem.fast)


RUN: dict[tuple[bool, str], Callable[..., torch.Tensor]] = {
    (False, "library"): _library_mm,
    (False, "ours"): _our_mm,
    (True, "library"): _library_grouped,
    (True, "ours"): _our_grouped,
}
"""What is timed, by whether the problem is grouped and by candidate."""


class Remembered:
    """``measure``, but what was measured before, by any process, is read from disk.

    A file for each problem, so that processes do not wait for each other or overwrite each other's answers; written
    beside its place and moved there, so that none is ever seen half written.

    Args:
        measure: what to ask where nothing is known. folder: default: in Inductor's cache directory.
        device: name of the GPU; default: that of the current one.
    """

    def __init__(
        self, measure: Measure = measure_on_gpu, folder: Path | None = None, device: str | None = None
    ) -> None:
        self.measure = measure
        self.folder = folder or Path(cache_dir()) / "fp8compile_gemms"
        self.device = device or torch.cuda.get_device_name()

    def __call__(self, problem: Problem, candidate: str) -> float:
        key = {"device": self.device, **_versions(), "candidate": candidate}
        key |= {name: str(value) for name, value in asdict(problem).items()}
        file = self.folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
        seconds = _read(file, key)
        if seconds is None:
            seconds = self.measure(problem, candidate)
            _write(file, {"key": key, "seconds": seconds})
        return seconds


def _read(file: Path, key: dict[str, str]) -> float | None:
    """What the file says of ``key``; None if it is missing, damaged, or says something else."""
    try:
        entry = json.loads(file.read_text())
        return float(entry["seconds"]) if entry["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, entry: dict[str, Any]) -> None:
    """A cache directory that cannot be written costs a measurement next time, no more."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as temporary:
            json.dump(entry, temporary)
        os.replace(name, file)


@functools.cache
def _versions() -> dict[str, str]:
    """What a time depends on besides the problem and the GPU; our kernels by their source."""
    digest = hashlib.sha256()
    for path in sorted((Path(fp8compile.__path__[0]) / "kernels").glob("*.py")):
        digest.update(path.read_bytes())
    versions = {"torch": torch.__version__, "fp8compile": fp8compile.__version__, "kernels": digest.hexdigest()[:16]}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["triton"] = importlib.metadata.version("triton")
    return versions
