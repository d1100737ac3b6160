"""``fp8compile.preview``: what a chip that is not here would run, and how long it would take."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from fp8compile.backend import collect_reports
from fp8compile.hardware import Chip
from fp8compile.options import OptionError, Options
from fp8compile.preview.capture import autocast_as_on_gpu, compiled, lower_step
from fp8compile.preview.interpreter import InterpreterProcess
from fp8compile.preview.kernel_specs import kernel_specs
from fp8compile.preview.lowering import Lowered, LoweredGraph
from fp8compile.preview.machine_code import MachineCode, compile_kernels
from fp8compile.preview.program import Kernel, Kind
from fp8compile.report import Report


@dataclass(frozen=True)
class Program:
    """The kernels of one step, in order, and the bytes that it keeps for backward (parameters not counted).

    ``weight_casts`` are the kernels that run only when weights have changed (``reuse_weight_casts``); no total counts
    them.
    """

    kernels: tuple[Kernel, ...]
    saved: int
    weight_casts: tuple[Kernel, ...] = ()
    graphs: tuple[LoweredGraph, ...] = dataclasses.field(default=(), repr=False)

    def of_kind(self, *kinds: Kind) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.kind in kinds]

    @property
    def launches(self) -> int:
        """Kernels other than GEMMs and attention."""
        return len(self.of_kind("memory"))

    @property
    def moved(self) -> int:
        """Bytes that they read and write, each buffer once a kernel."""
        return sum(kernel.moved for kernel in self.of_kind("memory"))

    def seconds(self, *, attention: bool = True) -> float:
        """Predicted time of the step."""
        return sum(kernel.seconds for kernel in self.kernels if attention or kernel.kind != "attention")


@dataclass(frozen=True)
class _Step:
    """What was previewed, and the interpreter that executes it, started when it is first needed."""

    model: Callable[..., Any]
    options: Options
    interpreter: InterpreterProcess = dataclasses.field(default_factory=InterpreterProcess)

    def execute(self, chip: Chip, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        named = [(f"input {i}", tensor) for i, tensor in enumerate(tensors)]
        if isinstance(self.model, torch.nn.Module):
            named += [*self.model.named_parameters(), *self.model.named_buffers()]
        for name, tensor in named:
            if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
                where = "fake" if isinstance(tensor, FakeTensor) else f"on {tensor.device}"
                raise ValueError(f"execute: runs on CPU tensors with values, but {name} is {where}")

        def runner(graph: LoweredGraph) -> Callable[[list[Any]], Any]:
            return self.interpreter.load(graph.source, mutated=graph.mutated, constants=graph.constants)

        with autocast_as_on_gpu():
            return compiled(self.model, chip, self.options, Lowered(), runner)(*args, **kwargs)


@dataclass(frozen=True)
class Preview:
    """A step as ``chip`` would run it: with FP8, and in high precision (the same options, policy ``none``).

    Attributes:
        chip: the target. fp8, high: the two programs.
        report: every matmul and collective, FP8 or not, and why.
    """

    chip: Chip
    fp8: Program
    high: Program
    report: Report
    _step: _Step = dataclasses.field(repr=False)

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the FP8 program that was compiled for the chip on CPU tensors, its kernels under Triton's interpreter.

        For shapes as small as a test's: a kernel takes seconds where a GPU takes microseconds. The interpreter runs in
        a process of its own. Shapes may differ from those of the preview; the step is then lowered again.

        Args:
            *args, **kwargs: the model's inputs, on the CPU, as are its weights.

        Returns:
            What the model returns. Its ``backward()`` runs the backward program.

        Raises:
            ValueError: if the model or an input has no values, or is not on the CPU.
        """
        return self._step.execute(self.chip, args, kwargs)

    def machine_code(self, *, processes: int = 1) -> list[MachineCode]:
        """Compile every distinct Triton kernel of the FP8 program, Inductor's and ours, and read its machine code:
        registers, spills, shared memory, tensor core and TMA instructions. Each in the first configuration that
        Inductor would try.

        Args:
            processes: how many compilers run at a time.

        Raises:
            ValueError: for a chip that is not a Hopper.
            CompileError: for the first kernel that does not compile.
        """
        if self.chip.capability != (9, 0):
            raise ValueError(f"machine_code: compiles for Hopper (h100, h200), not for {self.chip.name}")
        with tempfile.TemporaryDirectory() as folder:
            specs = [
                spec
                for number, graph in enumerate(self.fp8.graphs)
                for spec in kernel_specs(graph.source, self.chip, Path(folder) / str(number))
            ]
            return compile_kernels(specs, processes=processes)

    @property
    def speedup(self) -> float:
        """Predicted time without FP8 over predicted time with it."""
        return self.high.seconds() / self.fp8.seconds()

    @property
    def assumptions(self) -> str:
        """What the prediction rests on."""
        chip = self.chip
        fp8 = (
            f", FP8 GEMMs {chip.fp8_efficiency:.0%} of {chip.fp8_flops / 1e12:.0f} TFLOP/s "
            f"({chip.block_efficiency:.0%} with block scales)"
        )
        return (
            f"Assumed for {chip.name}: bf16 GEMMs and attention reach {chip.high_efficiency:.0%} of "
            f"{chip.high_flops / 1e12:.0f} TFLOP/s{fp8 if chip.has_fp8 else ''}, memory "
            f"{chip.memory_efficiency:.0%} of {chip.bandwidth / 1e12:.2f} TB/s; {chip.launch * 1e6:.0f} µs a launch; "
            "no kernels overlap; Inductor does not autotune; nothing was measured."
        )

    def summary(self) -> str:
        """Launches, bytes and predicted time, FP8 beside high precision."""
        rows = [("", "high", "fp8", "")]
        for name, count in (
            ("GEMMs", lambda p: len(p.of_kind("gemm"))),
            ("  of them in FP8", lambda p: sum(k.dtype.startswith("float8") for k in p.of_kind("gemm"))),
            ("attention", lambda p: len(p.of_kind("attention"))),
            ("other launches", lambda p: p.launches),
        ):
            rows.append((name, str(count(self.high)), str(count(self.fp8)), ""))
        for name, amount in (
            ("bytes of other launches", lambda p: p.moved),
            ("bytes kept for backward", lambda p: p.saved),
        ):
            high, fp8 = amount(self.high), amount(self.fp8)
            rows.append((name, f"{high / 1e9:.3f} GB", f"{fp8 / 1e9:.3f} GB", f"{fp8 / high - 1:+.0%}" if high else ""))
        for kind in ("gemm", "attention", "memory"):
            high, fp8 = (sum(k.seconds for k in p.of_kind(kind)) for p in (self.high, self.fp8))
            rows.append((f"ms {kind}", f"{high * 1e3:.3f}", f"{fp8 * 1e3:.3f}", f"{high / fp8:.2f}x" if fp8 else ""))
        high, fp8 = self.high.seconds(), self.fp8.seconds()
        rows.append(("ms in all, predicted", f"{high * 1e3:.3f}", f"{fp8 * 1e3:.3f}", f"{self.speedup:.2f}x"))
        if self.fp8.weight_casts:
            once = f"{sum(k.seconds for k in self.fp8.weight_casts) * 1e3:.3f}"
            rows.append(("ms when weights change", "", once, f"{len(self.fp8.weight_casts)} launches"))
        return "\n".join(f"{name:<26}{high:>12}{fp8:>12}  {note}".rstrip() for name, high, fp8, note in rows)

    def table(self) -> str:
        """The kernels of the FP8 step, in order; equal neighbours are one line."""
        head = ("phase", "kernel", "whose", "MB", "GFLOP", "µs", "dtype", "computes")
        cells = [
            (
                k.phase,
                k.name if count == 1 else f"{count}x {k.name}",
                k.maker,
                f"{k.moved / 1e6:.2f}",
                f"{k.flops / 1e9:.1f}" if k.flops else "",
                f"{k.seconds * 1e6:.1f}",
                k.dtype,
                k.computes,
            )
            for k, count in _runs((*self.fp8.weight_casts, *self.fp8.kernels))
        ]
        widths = [max(len(line[i]) for line in (head, *cells)) for i in range(len(head))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, tuple("-" * width for width in widths), *cells)
        )

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.summary()}\n\n{self.assumptions}"

    def to_json(self) -> str:
        """Both programs, kernel by kernel, and their totals."""
        programs = {
            name: {
                "launches": program.launches,
                "bytes": program.moved,
                "saved": program.saved,
                "seconds": program.seconds(),
                "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
                "weight_casts": [dataclasses.asdict(kernel) for kernel in program.weight_casts],
            }
            for name, program in (("high", self.high), ("fp8", self.fp8))
        }
        return json.dumps(
            {"target": self.chip.name, "speedup": self.speedup, "assumptions": self.assumptions, **programs}, indent=1
        )

    def save_picture(self, path: str | Path) -> None:
        """Write a timeline, high precision above FP8; the suffix of ``path`` chooses the format.

        Raises:
            ModuleNotFoundError: without matplotlib (``pip install 'fp8compile[demo]'``).
        """
        from fp8compile.preview.picture import save_timeline

        save_timeline(self, Path(path))


def preview(
    model: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Preview:
    """Lower one step of ``model`` for a chip, without having it, and predict how long it takes there.

    Forward, and backward where gradients are enabled and something requires one. The model does not run: weights and
    inputs may be on any device, ``meta`` too, and only their shapes count.

    Args:
        model: a module, or a function of tensors. *args, **kwargs: its inputs.
        target: a chip of :data:`fp8compile.hardware.CHIPS`; default: that of the options, else the GPU present, else
            an H100.
        options: as for ``torch.compile(backend="fp8")``.

    Raises:
        OptionError: for an option that does not exist, or a target that contradicts ``options``.
        ModuleNotFoundError: if Triton is not installed.
    """
    given = dict(options or {})
    if target is not None and given.setdefault("target", target) != target:
        raise OptionError(f"preview: target={target!r}, but options say {given['target']!r}")
    chosen = Options.parse(given)
    if chosen.engine != "inductor":
        raise OptionError("preview: option 'engine' must be 'inductor': what Inductor makes is what is previewed")
    fp8, report = lower_program(model, args, kwargs, chosen)
    high, _ = lower_program(model, args, kwargs, Options.parse({**given, "policy": "none", "debug": None}))
    return Preview(chosen.target, fp8, high, report, _Step(model, chosen))


def lower_program(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> tuple[Program, Report]:
    """The program of one step for ``options.target``, and what was decided in it."""
    with collect_reports() as report:
        lowered = lower_step(model, args, kwargs, options.target, options)
    kernels = [kernel for graph in lowered.graphs for kernel in graph.kernels]
    step, casts = (tuple(k for k in kernels if (k.phase == "weights") is of_weights) for of_weights in (False, True))
    return Program(step, lowered.saved, casts, tuple(lowered.graphs)), report


def _runs(kernels: tuple[Kernel, ...]) -> list[tuple[Kernel, int]]:
    """Equal neighbours together."""
    runs: list[tuple[Kernel, int]] = []
    for kernel in kernels:
        if runs and runs[-1][0] == kernel:
            runs[-1] = (kernel, runs[-1][1] + 1)
        else:
            runs.append((kernel, 1))
    return runs
