"""Corrections of Triton's interpreter: float casts, bfloat16 arithmetic, reductions with any combine function.

They apply to the process that calls :func:`correct_float_casts` or :func:`correct_interpreter`, to every kernel that
runs under ``TRITON_INTERPRET=1`` from then on. Both may be called more than once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
"""Triton's names of the FP8 types that Hopper converts to and from, and torch's."""
LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
SUPPORTED = (*FP8, "fp16", "bf16", "fp32", "fp64")


# --- Casts ------------------------------------------------------------------------------------------------------------


def decode(data: np.ndarray, name: str) -> np.ndarray:
    """The values that the raw ``data`` of a float type hold: float64 for fp64, else float32. Exact.

    ``name`` is Triton's name of the type, one of :data:`SUPPORTED`. ``data`` has an item size of that type; its NumPy
    dtype does not matter.
    """
    data = np.asarray(data)
    if name in FP8:
        every = torch.arange(256, dtype=torch.uint8).view(FP8[name]).to(torch.float32).numpy()
        return every[data.view(np.uint8)]
    if name == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if name == "fp16":
        return data.view(np.float16).astype(np.float32)
    return data.view(np.float32 if name == "fp32" else np.float64)


def encode(values: np.ndarray, name: str) -> np.ndarray:
    """The raw data of ``values`` (float32 or float64) in a float type, rounded once to nearest even.

    What Hopper's ``cvt`` does: FP8 saturates, infinities too (``cvt.rn.satfinite``); other types overflow to infinity;
    NaN stays NaN. FP8 comes as uint8, bf16 as uint16, the others in their NumPy dtype.
    """
    values = np.asarray(values)
    with np.errstate(all="ignore"):
        if name in ("fp64", "fp32", "fp16"):
            return values.astype({"fp64": np.float64, "fp32": np.float32, "fp16": np.float16}[name])
        if values.dtype == np.float64:
            values = _round_to_odd(values)
        if name == "bf16":
            bits = values.view(np.uint32)
            nearest_even = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
            return np.where(np.isnan(values), 0x7FFF, nearest_even).astype(np.uint16)
    finite = np.clip(values, np.float32(-LARGEST[name]), np.float32(LARGEST[name]))
    rounded = torch.from_numpy(np.array(finite, dtype=np.float32)).to(FP8[name]).view(torch.uint8).numpy()
    return np.where(np.isnan(values), np.uint8(0x7F), rounded)


def _round_to_odd(values: np.ndarray) -> np.ndarray:
    """float64 to float32 so that rounding the result once more, to a narrower type, is rounding once."""
    nearest = values.astype(np.float32)
    exact = nearest.astype(np.float64)
    inexact = np.isfinite(nearest) & (exact != values)
    overflow = np.isinf(nearest) & np.isfinite(values)
    zero = np.zeros_like(nearest)
    truncated = np.where(np.abs(exact) > np.abs(values), np.nextafter(nearest, zero), nearest)
    odd = np.where(inexact, truncated.view(np.uint32) | np.uint32(1), nearest.view(np.uint32)).view(np.float32)
    # A value that rounded to zero keeps its sign.
    odd = np.where(inexact, np.copysign(np.abs(odd), values.astype(np.float32)), odd)
    return np.where(overflow, np.copysign(np.float32(np.finfo(np.float32).max), nearest), odd).astype(np.float32)


def convert(data: Any, source: Any, target: Any, rounding: Any = None) -> np.ndarray:
    """Raw ``data`` of one Triton float type as raw data of another; stands in for the interpreter's ``_convert_float``.

    Raises NotImplementedError for types outside :data:`SUPPORTED` and for rounding other than to nearest even.
    """
    from triton._C.libtriton import ir

    for dtype in (source, target):
        if dtype.name not in SUPPORTED:
            raise NotImplementedError(f"casts of {dtype.name} are not emulated, only {', '.join(SUPPORTED)}")
    if rounding not in (None, ir.ROUNDING_MODE.RTNE):
        raise NotImplementedError(f"casts with rounding {rounding} are not emulated, only to nearest even")
    return encode(decode(data, source.name), target.name)


def correct_float_casts() -> None:
    """Make casts in Triton's interpreter round as Hopper does; call it before a kernel runs.

    The interpreter's own float8 casts round ties wrongly, lose carries, wrap instead of saturating and drop NaN; its
    float32 to bfloat16 cast truncates; float64 and integers to bfloat16, bfloat16 arithmetic and ``tl.dot`` take the
    raw bits for integers, and it has no bfloat16 atomics. Arithmetic on float8, which the interpreter would do on the
    raw bits, becomes an error that says to cast first.
    """
    import triton.language as tl
    from triton._C.libtriton.ir import ATOMIC_OP
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    if interpreter._convert_float is convert:
        return
    interpreter._convert_float = convert

    def numpy_dtype(dtype: Any) -> Any:
        return interpreter._get_np_dtype(dtype)

    def packed(dtype: Any) -> bool:
        """Whether NumPy holds the type as integers of its bits."""
        return dtype == tl.bfloat16 or dtype.name in FP8

    def values(x: Any) -> np.ndarray:
        dtype = x.dtype.scalar
        return decode(x.data, dtype.name) if packed(dtype) else x.data

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        data = encode(np.asarray(values(src), dtype=np.float64), target.name) if packed(target) else None
        if data is None:
            with np.errstate(all="ignore"):
                data = values(src).astype(numpy_dtype(target))
        return handle(data, target)

    def elementwise(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            *operands, op = args
            dtype = operands[-1].dtype.scalar
            if not packed(dtype) or op is np.where:
                return original(self, *args)
            if dtype != tl.bfloat16:
                raise TypeError(f"arithmetic on {dtype.name}: cast to float32 first")
            result = op(*(values(x) for x in operands))
            return handle(result if result.dtype == bool else encode(result, "bf16"), dtype)

        run.__name__ = name
        return run

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        wide = [np.asarray(values(operand), dtype=np.float64) for operand in (x, y, z)]
        return handle(encode(wide[0] * wide[1] + wide[2], dtype.name), dtype)

    original_dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        """Products of 16-bit and 8-bit floats are exact in float32, sums are float32's."""
        if not a.dtype.scalar.is_floating() or a.dtype.scalar == tl.float64:
            return original_dot(self, a, b, d, *precision)
        a_values, b_values = (decode(x.data, x.dtype.scalar.name) for x in (a, b))
        total = np.matmul(a_values, b_values, dtype=np.float32) + values(d)
        return handle(encode(total, d.dtype.scalar.name), d.dtype.scalar)

    original_atomic = builder.create_atomic_rmw

    def create_atomic_rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *ordering: Any) -> Any:
        """Adds to bfloat16 in memory, each address once at a time; the interpreter has no atomics of that type."""
        if val.dtype.scalar != tl.bfloat16 or operation != ATOMIC_OP.FADD:
            return original_atomic(self, operation, ptr, val, mask, *ordering)
        memory = interpreter._interpreter
        addresses, addends = ptr.data.reshape(-1), decode(val.data, "bf16").reshape(-1)
        before = np.zeros(addresses.shape, dtype=np.uint16)
        left = np.flatnonzero(mask.data)
        while left.size:
            _, first = np.unique(addresses[left], return_index=True)
            now, left = left[first], np.delete(left, first)
            every = np.ones(now.shape, dtype=bool)
            before[now] = memory.load(addresses[now], every, np.zeros(now.shape, np.uint16), np.dtype(np.uint16))
            memory.store(addresses[now], encode(decode(before[now], "bf16") + addends[now], "bf16"), every)
        return handle(before.reshape(ptr.data.shape), tl.bfloat16)

    builder.cast_impl = cast_impl
    builder.create_atomic_rmw = create_atomic_rmw
    builder.create_fma = create_fma
    builder.create_dot = create_dot
    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(builder, name, elementwise(name, getattr(builder, name)))
    # Triton 3.6 propagates NaN where the hardware's max.f32 returns the other operand.
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)


# --- The rest of the interpreter --------------------------------------------------------------------------------------


def correct_interpreter() -> None:
    """:func:`correct_float_casts`, and what else a generated kernel needs to run, and to run in tolerable time."""
    from triton.runtime import interpreter

    correct_float_casts()
    if interpreter.ReduceOps.generic_reduce is _reduce:
        return
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter.ScanOps.generic_scan = _scan
    np.seterr(all="ignore")  # 0/0 in a masked lane is as silent as on a GPU
    # By default it checks integer arithmetic for overflow, as debug builds of kernels do; that triples its time.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    _accept_tensors_as_loop_bounds(interpreter)
    _patch_the_language_once(interpreter)


def _combine(operation: Any, left: Sequence[np.ndarray], right: Sequence[np.ndarray], dtypes: Sequence[Any]) -> Any:
    """The combine function on whole arrays; it is elementwise, so one call does what one call per element would."""
    import triton.language as tl

    operands = [
        operation.to_tensor(np.ascontiguousarray(x), t)
        for x, t in zip((*left, *right), (*dtypes, *dtypes), strict=True)
    ]
    result = operation.combine_fn.fn(*operands)
    results = result if isinstance(result, (tuple, list)) else (result,)
    arrays = [x.handle.data if isinstance(x, tl.core.tensor) else np.asarray(x) for x in results]
    return [np.broadcast_to(x, y.shape).astype(y.dtype) for x, y in zip(arrays, left, strict=True)]


def _reduce(operation: Any, inputs: Any) -> Any:
    """``tl.reduce`` with any combine function, neighbours first: log2(n) calls where the interpreter makes n - 1."""
    axis = operation.axis
    dtypes = [x.dtype for x in inputs]
    data = [x.handle.data if axis is not None else x.handle.data.reshape(-1) for x in inputs]
    data = [np.moveaxis(x, axis or 0, 0) for x in data]
    while len(data[0]) > 1:  # a power of two, as all sides of Triton's blocks
        data = _combine(operation, [x[0::2] for x in data], [x[1::2] for x in data], dtypes)
    reduced = [x[0] for x in data]
    if operation.keep_dims:
        rank = len(inputs[0].handle.data.shape)
        reduced = [x.reshape((1,) * rank) if axis is None else np.expand_dims(x, axis) for x in reduced]
    return [operation.to_tensor(x, t) for x, t in zip(reduced, dtypes, strict=True)]


def _scan(operation: Any, inputs: Any) -> Any:
    """``tl.associative_scan``: after the step with distance d, an element holds its last 2 d elements combined."""
    dtypes = [x.dtype for x in inputs]
    data = [np.moveaxis(x.handle.data, operation.axis, 0) for x in inputs]
    distance = 1
    while distance < len(data[0]):
        # Blocks keep their size, a power of two: what comes around from the end is computed and dropped.
        combined = _combine(operation, [np.roll(x, distance, axis=0) for x in data], data, dtypes)
        data = [np.concatenate([x[:distance], y[distance:]]) for x, y in zip(data, combined, strict=True)]
        distance *= 2
    return [operation.to_tensor(np.moveaxis(x, 0, operation.axis), t) for x, t in zip(data, dtypes, strict=True)]


def _accept_tensors_as_loop_bounds(interpreter: Any) -> None:
    """Triton 3.6 converts its scalars, arrays of shape (1,), with ``int(array)``, which NumPy refuses since 2.4."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _patch_the_language_once(interpreter: Any) -> None:
    """The interpreter replaces all of ``triton.language`` at every launch and every call of a function in a kernel,
    which is most of a small kernel's time. A process that only interprets may leave it replaced."""
    import triton.language as tl

    original, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope()
    everything = type("Everything", (), {"__globals__": {"tl": tl, "core": tl.core}})
    done: list[Any] = []

    def patch(function: Any) -> Any:
        if not done:
            done.append(original(everything))
        return nothing_to_restore

    interpreter._patch_lang = patch
