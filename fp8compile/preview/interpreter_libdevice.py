"""libdevice for Triton's interpreter: what ``libdevice.*`` computes on a GPU, by symbol of NVIDIA's bitcode library.

Triton's own ``libdevice`` functions stay in use; they choose the symbol by the arguments' types and refuse what the
real library lacks. Only the symbol's call is replaced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import special

Function = Callable[..., torch.Tensor]

SAME_NAME = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmod hypot "
    "lgamma log log10 log1p log2 nextafter pow rsqrt sin sinh sqrt tan tanh trunc"
)
"""Functions that torch has under libdevice's name."""

FAST = "sin cos tan log log2 log10 exp tanh pow"
"""Functions with an inexact variant, ``fast_sinf`` and so on; the stand-in is exact."""

OTHERS: dict[str, Function] = {
    "cbrt": lambda x: torch.copysign(x.double().abs() ** (1 / 3), x.double()),
    "cyl_bessel_i0": special.i0,
    "cyl_bessel_i1": special.i1,
    "erfcx": special.erfcx,
    "exp10": lambda x: torch.pow(10.0, x.double()),
    "fabs": torch.abs,
    "fdim": lambda x, y: torch.where(x > y, x - y, (x + y) * 0),
    "fma": lambda x, y, z: x.double() * y.double() + z.double(),
    "ilogb": lambda x: torch.frexp(x).exponent - 1,
    "j0": special.bessel_j0,
    "j1": special.bessel_j1,
    "ldexp": lambda x, n: torch.ldexp(x.double(), n),
    "llrint": torch.round,
    "llround": lambda x: torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x)),
    "nearbyint": torch.round,
    "normcdf": special.ndtr,
    "normcdfinv": special.ndtri,
    "powi": lambda x, n: torch.pow(x.double(), n),
    "rcbrt": lambda x: 1 / torch.copysign(x.double().abs() ** (1 / 3), x.double()),
    "rint": torch.round,
    "round": lambda x: torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x)),
    "tgamma": lambda x: torch.exp(torch.lgamma(x.double())),
    "y0": special.bessel_y0,
    "y1": special.bessel_y1,
}
"""The others, by the name of the float64 symbol without ``__nv_``; the float32 symbol has an ``f`` behind it."""

ONE_SYMBOL: dict[str, Function] = {
    "abs": torch.abs,
    "llabs": torch.abs,
    "finitef": torch.isfinite,
    "isfinited": torch.isfinite,
    "isinff": torch.isinf,
    "isinfd": torch.isinf,
    "isnanf": torch.isnan,
    "isnand": torch.isnan,
    "signbitf": torch.signbit,
    "signbitd": torch.signbit,
    "saturatef": lambda x: torch.nan_to_num(x, nan=0.0).clamp(0.0, 1.0),
    "fast_fdividef": torch.div,
    **{f"fast_{name}f": getattr(torch, name) for name in FAST.split()},
    "fast_exp10f": lambda x: torch.pow(10.0, x.double()),
    "frsqrt_rn": lambda x: 1 / torch.sqrt(x.double()),
    "fma_rn": OTHERS["fma"],
    "fmaf_rn": OTHERS["fma"],
    "float2int_rn": torch.round,
    "float2int_rz": torch.trunc,
    "float2int_rd": torch.floor,
    "float2int_ru": torch.ceil,
    **{f"{width}add_rn": torch.add for width in "fd"},
    **{f"{width}sub_rn": torch.sub for width in "fd"},
    **{f"{width}mul_rn": torch.mul for width in "fd"},
    **{f"{width}div_rn": torch.div for width in "fd"},
    **{f"{width}rcp_rn": torch.reciprocal for width in "fd"},
    **{f"{width}sqrt_rn": torch.sqrt for width in "fd"},
}
"""Functions whose symbols follow no rule, without ``__nv_``."""

ASSEMBLY: dict[str, Function | None] = {
    "fma.rn.f32 $0, $1, $2, $3;": OTHERS["fma"],
    "rcp.approx.ftz.f32 $0, $1;": torch.reciprocal,
    "griddepcontrol.wait; // dummy $0": None,
    "griddepcontrol.launch_dependents; // dummy $0": None,
}
"""Inline assembly of Inductor's kernels and of Triton; None where there is nothing to do one program at a time."""


@functools.cache
def symbols() -> dict[str, Function]:
    """What each symbol computes, on tensors. The result is converted to the symbol's type by the caller."""
    two = {**{name: getattr(torch, name) for name in SAME_NAME.split()}, **OTHERS}
    both = {f"__nv_{name}{suffix}": function for name, function in two.items() for suffix in ("", "f")}
    return {**both, **{f"__nv_{name}": function for name, function in ONE_SYMBOL.items()}}


def provide_libdevice() -> None:
    """Make ``libdevice`` functions, under all the names that kernels import them by, run in Triton's interpreter.

    Call it before a module with kernels is imported. A function without a stand-in raises NotImplementedError with its
    symbol when a kernel reaches it.
    """
    from triton.language.extra import libdevice as dispatching
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if builder.create_extern_elementwise is _call_symbol:
        return
    builder.create_extern_elementwise = _call_symbol
    builder.create_inline_asm = _run_assembly
    cuda = sys.modules["triton.language.extra.cuda.libdevice"]
    make_builtins_callable(cuda)
    make_builtins_callable(sys.modules["triton.language.extra.cuda"])
    for name in vars(dispatching):
        if not name.startswith("_") and callable(getattr(cuda, name, None)):
            setattr(dispatching, name, getattr(cuda, name))


def make_builtins_callable(module: Any) -> None:
    """Let kernels call the module's builtins: the interpreter itself sees to those of ``triton.language`` only."""
    import triton.language as tl
    from triton.runtime import interpreter

    for name, function in list(vars(module).items()):
        if tl.core.is_builtin(function):
            setattr(module, name, _outside_of_the_compiler(function, interpreter))


def _outside_of_the_compiler(function: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, "_semantic": interpreter.interpreter_semantic})

    return run


def _on_tensors(function: Function, operands: list[Any], dtype: Any) -> Any:
    from triton.runtime import interpreter

    tensors = [torch.from_numpy(np.array(x.data)) for x in operands]
    result = function(*tensors).numpy()
    with np.errstate(all="ignore"):
        data = result.astype(interpreter._get_np_dtype(dtype.scalar))
    return interpreter.TensorHandle(data, dtype.scalar)


def _call_symbol(
    builder: Any, library: str, path: str, symbol: str, operands: list[Any], dtype: Any, is_pure: bool
) -> Any:
    if symbol not in symbols():
        raise NotImplementedError(f"libdevice function {symbol} has no stand-in in fp8compile.preview")
    return _on_tensors(symbols()[symbol], operands, dtype)


class _Results:
    """What the compiler returns for inline assembly: an operation with results."""

    def __init__(self, handles: list[Any]) -> None:
        self.get_result = handles.__getitem__


def _run_assembly(
    builder: Any, assembly: str, constraints: str, operands: list[Any], dtypes: list[Any], is_pure: bool, pack: int
) -> _Results:
    from triton.runtime import interpreter

    if assembly not in ASSEMBLY:
        raise NotImplementedError(f"inline assembly has no stand-in in fp8compile.preview: {assembly}")
    function = ASSEMBLY[assembly]
    if function is None:
        return _Results([interpreter.TensorHandle(np.zeros(1, dtype=np.int32), dtypes[0].scalar)])
    return _Results([_on_tensors(function, operands, dtypes[0])])
