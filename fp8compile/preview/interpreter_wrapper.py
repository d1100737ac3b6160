"""A wrapper that Inductor generated for CUDA, made callable on CPU tensors.

The source is executed unchanged, among stand-ins: a name that it imports or looks up and that means CUDA means the CPU
here. What has no stand-in fails as Python fails, with the wrapper's own line in the traceback.

Runs in a process in which Triton interprets, see :mod:`fp8compile.preview.interpreter`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import itertools
import linecache
import math
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8compile.preview.interpreter_gemms import ExternKernels, fp8_operators
from fp8compile.preview.interpreter_libdevice import make_builtins_callable

Call = Callable[[list[Any]], Sequence[Any]]

ELEMENTS_PER_PROGRAM = 2**14

_numbers = itertools.count()


# --- Kernels ----------------------------------------------------------------------------------------------------------


class InterpretedKernel:
    """Stands in for Inductor's ``CachingAutotuner``: a kernel in its first configuration, run program by program.

    But for :func:`_widened`. Raises NotImplementedError for what one program after the other cannot do.
    """

    def __init__(
        self,
        fn: Any,
        triton_meta: dict[str, Any],
        configs: Sequence[Any],
        inductor_meta: dict[str, Any],
        size_hints: dict[str, int] | None = None,
        **of_the_autotuner: Any,
    ) -> None:
        from triton.runtime.interpreter import GridExecutor

        if inductor_meta.get("grid_type") == "CooperativeReductionGrid":
            raise NotImplementedError("a cooperative reduction's programs wait for each other")
        if inductor_meta.get("host_tma_descriptor_args"):
            raise NotImplementedError("descriptors that the launcher makes (host_tma_descriptor_args)")
        self.fn = fn
        self.config = _widened(configs[0], size_hints or {}, inductor_meta)
        self.inductor_meta = inductor_meta
        self.constants: dict[str, Any] = {
            **triton_meta.get("constants", {}),
            **self.config.kwargs,
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
        }
        executor = GridExecutor(fn.fn, fn.arg_names, grid=())
        constexprs = {*executor.constexprs, "num_warps", "num_stages"}
        passed = [name for name in fn.arg_names if name not in constexprs or name not in self.constants]
        self.launcher_arguments = [*passed, *inductor_meta.get("extra_launcher_args", ())]

    def grid(self, arguments: dict[str, Any]) -> tuple[int, ...]:
        """Programs in x, y, z: Inductor's own expressions, evaluated."""
        heuristics: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
        expressions = heuristics.GridExpr.from_meta(self.inductor_meta, self.config)
        scope = {"math": math, "torch": torch, **self.constants, **arguments, "grid_meta": self.config.kwargs}
        for line in expressions.prefix:
            exec(line, scope)
        sizes = (expressions.x_grid, expressions.y_grid, expressions.z_grid)
        return tuple(int(eval(str(size), scope)) for size in sizes)

    def run(self, *arguments: Any, stream: Any = None, **named: Any) -> None:
        """One launch, with the arguments the wrapper passes. Raises RuntimeError with the kernel's name."""
        try:
            if len(arguments) > len(self.launcher_arguments):
                raise TypeError(f"takes {self.launcher_arguments}, got {len(arguments)} arguments")
            bound = {**dict(zip(self.launcher_arguments, arguments, strict=False)), **named}
            absent = {name: None for name, value in self.constants.items() if value is None}  # passed as -1
            values = {**self.constants, **bound, **absent}
            missing = [name for name in self.launcher_arguments if name not in values]
            if missing:
                raise TypeError(f"no value for {', '.join(missing)}")
            self.fn[self.grid(bound)](*(values[name] for name in self.fn.arg_names))
        except Exception as error:
            raise RuntimeError(f"kernel {self.fn.__name__}: {error}") from error


def _widened(config: Any, size_hints: dict[str, int], inductor_meta: dict[str, Any]) -> Any:
    """The configuration with as many columns or rows a program as an array operation handles well.

    Interpreting costs per operation, hardly per element, and which elements of x share a program changes no result.
    Inductor leaves out masks on the promise that no block is larger than its ``TRITON_MAX_BLOCK``.
    """
    from torch._inductor.runtime.hints import TRITON_MAX_BLOCK

    if "XBLOCK" not in config.kwargs or "x" not in size_hints or inductor_meta["grid_type"] != "Grid1D":
        return config
    reduced = math.prod(
        config.kwargs.get(f"{name.upper()}BLOCK", size) for name, size in size_hints.items() if name.startswith("r")
    )
    xblock = min(size_hints["x"], ELEMENTS_PER_PROGRAM // reduced, TRITON_MAX_BLOCK["X"])
    wide = copy.copy(config)
    wide.kwargs = {**config.kwargs, "XBLOCK": max(config.kwargs["XBLOCK"], xblock)}
    return wide


class Compiler:
    """Stands in for ``AsyncCompile``: kernel sources become interpreted kernels at once."""

    def triton(self, kernel_name: str, source_code: str, device_str: str = "cuda") -> InterpretedKernel:
        heuristics: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
        helpers = importlib.import_module("torch._inductor.runtime.triton_helpers")
        make_builtins_callable(helpers)

        # The interpreter reads a kernel's source from its file. The parent removes the folder.
        path = Path(tempfile.gettempdir()) / f"{kernel_name[:80]}_{next(_numbers)}.py"
        path.write_text(source_code)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        interpreted = functools.partial(heuristics.cached_autotune, caching_autotuner_cls=InterpretedKernel)
        try:
            with (
                _replaced(heuristics, cached_autotune=interpreted, check_autotune_cache=_first_configuration),
                _replaced(helpers, set_driver_to_gpu=lambda: None),
            ):
                spec.loader.exec_module(module)
        except Exception as error:
            raise RuntimeError(f"kernel {kernel_name}: {error}") from error
        return getattr(module, kernel_name)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"the wrapper has a kernel of a kind without a stand-in: async_compile.{name}")

    def wait(self, scope: dict[str, Any]) -> None:
        """Nothing is under way."""


def _first_configuration(configurations: Sequence[Any], *_: Any, **__: Any) -> tuple[Sequence[Any], None, dict]:
    """Stands in for a look into the cache of what was fastest: no choice was made, nothing is to be saved."""
    return configurations, None, {}


# --- The wrapper ------------------------------------------------------------------------------------------------------


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    return module


_MISSING = object()


@contextlib.contextmanager
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Attributes of a module or object with other values, then as they were."""
    before = {name: getattr(owner, name, _MISSING) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def _importable(stand_ins: dict[str, types.ModuleType]) -> Iterator[None]:
    """Modules found by their names in place of the real ones; other modules imported meanwhile stay imported."""
    real = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in real.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def load_wrapper(source: str, constants: Mapping[str, torch.Tensor]) -> Call:
    """The ``call`` of a wrapper: a list of CPU tensors, which it empties, to a sequence of outputs.

    ``constants`` are the graph's, which the wrapper expects among its globals. Raises what the source raises, and
    RuntimeError with the kernel's name for a kernel that cannot be loaded or run.
    """
    guards: Any = torch._C._dynamo.guards
    empty_strided_cpu = guards._empty_strided_cpu

    filename = f"<wrapper {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # for tracebacks
    scope: dict[str, Any] = {"__name__": "generated_for_cuda", "__file__": filename, **constants}
    stand_ins = {
        "torch._inductor.async_compile": _module("torch._inductor.async_compile", AsyncCompile=Compiler),
        "torch._inductor.select_algorithm": _module("torch._inductor.select_algorithm", extern_kernels=ExternKernels()),
    }
    with (
        _importable(stand_ins),
        _replaced(guards, _empty_strided_cuda=empty_strided_cpu),
        _replaced(torch._C, _cuda_getCurrentRawStream=lambda device: 0),
    ):
        exec(compile(source, filename, "exec"), scope)
    if "call" not in scope:
        raise ValueError("the source defines no 'call'; is it what GraphLowering.codegen() returned?")
    scope["device"] = lambda *_, **__: torch.device("cpu")

    def call(arguments: list[Any]) -> Sequence[Any]:
        with (
            _replaced(torch.cuda, _DeviceGuard=contextlib.nullcontext, set_device=lambda device: None),
            fp8_operators(),
            torch.no_grad(),
        ):
            return scope["call"](arguments)

    return call
