"""Triton kernels and whole programs for a GPU, executed on the CPU: casts against ml_dtypes, arithmetic and libdevice
against torch, programs against the graph they were lowered from, the child process against what can go wrong with it.

Functions that a test runs in the child are in this module too; the child imports it by its name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402

from fp8compile.hardware import get_chip  # noqa: E402
from fp8compile.preview.interpreter import InterpreterFailure, InterpreterProcess, run_interpreted  # noqa: E402
from fp8compile.preview.interpreter_arithmetic import LARGEST, convert, decode, encode  # noqa: E402
from fp8compile.preview.interpreter_libdevice import OTHERS, SAME_NAME, symbols  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = {"fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}
NUMPY = {**FP8, "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
TORCH = {
    "fp8e4nv": E4M3,
    "fp8e5": E5M2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[InterpreterProcess]:
    """One child for all tests: starting it takes seconds."""
    with InterpreterProcess() as process:
        yield process


def here(function: Callable[..., Any]) -> str:
    return f"{__name__}:{function.__name__}"


# --- Casts ------------------------------------------------------------------------------------------------------------


def float32_sample() -> np.ndarray:
    """Every bfloat16, random bits, and for each FP8, bfloat16 and float16 border its neighbours: ties, both sides."""
    rng = np.random.default_rng(0)
    every_bfloat16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    random_bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    borders = []
    with np.errstate(all="ignore"):
        for name in ("fp8e4nv", "fp8e5", "bf16", "fp16"):
            size = np.dtype(NUMPY[name]).itemsize
            every = np.arange(1 << (8 * size), dtype=np.uint32).astype(BITS[size]).view(NUMPY[name])
            values = np.unique(every.astype(np.float64))
            values = values[np.isfinite(values)]
            middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
            borders += [values.astype(np.float32), middle, np.nextafter(middle, np.float32(0)), middle * 1.0000002]
        beyond = np.float32([448, 449, 463.99997, 464, 465, 479, 480, 512, 57344, 61440, 65504, 65520, 1e38, np.inf])
        return np.concatenate([every_bfloat16, random_bits, *borders, beyond, -beyond, [np.nan, -0.0]]).astype(
            np.float32
        )


SAMPLE = float32_sample()


def expected_cast(values: np.ndarray, name: str) -> np.ndarray:
    """ml_dtypes rounds to nearest even; saturation is added, for FP8 only."""
    with np.errstate(all="ignore"):
        if name in FP8:
            values = np.clip(values, -LARGEST[name], LARGEST[name])
        return values.astype(NUMPY[name])


def assert_same_bits(data: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit, but any NaN is as good as another."""
    bits = BITS[expected.itemsize]
    nan = np.isnan(expected.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(data.view(expected.dtype).astype(np.float64)), nan)
    np.testing.assert_array_equal(np.where(nan, 0, data.view(bits)), np.where(nan, 0, expected.view(bits)))


@pytest.mark.parametrize("name", ["fp8e4nv", "fp8e5", "bf16", "fp16"])
def test_float32_rounds_to_nearest_even_and_fp8_saturates(name: str) -> None:
    assert_same_bits(encode(SAMPLE, name), expected_cast(SAMPLE, name))


@pytest.mark.parametrize("name", ["fp8e4nv", "fp8e5"])
def test_infinities_become_the_largest_fp8_and_nan_stays(name: str) -> None:
    """``cvt.rn.satfinite``."""
    got = decode(encode(np.float32([np.inf, -np.inf, np.nan, 1e30, -1e30]), name), name)
    largest = LARGEST[name]
    np.testing.assert_array_equal(got, [largest, -largest, np.nan, largest, -largest])


@pytest.mark.parametrize("name", ["fp8e4nv", "fp8e5", "bf16", "fp16", "fp32"])
def test_float64_is_rounded_once(name: str) -> None:
    """Just beside a tie, where rounding to float32 first would land on the tie."""
    ties = SAMPLE.astype(np.float64)
    values = np.concatenate([ties * (1 + 1e-12), ties * (1 - 1e-12), [1e-300, -1e-300, 1e300, -1e300]])
    assert_same_bits(encode(values, name), expected_cast(values, name))


@pytest.mark.parametrize("name", list(NUMPY))
def test_decoding_is_exact(name: str) -> None:
    size = np.dtype(NUMPY[name]).itemsize
    raw = (
        np.arange(1 << (8 * size)).astype(BITS[size])
        if size < 4
        else np.random.default_rng(1).integers(0, 1 << 63, 10_000).astype(BITS[size])
    )
    with np.errstate(invalid="ignore"):  # NaNs that signal
        expected = raw.view(NUMPY[name]).astype(np.float64)
        np.testing.assert_array_equal(decode(raw, name).astype(np.float64), expected)
        assert_same_bits(encode(decode(raw, name), name), expected_cast(raw.view(NUMPY[name]), name))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3)])
def test_casts_keep_shapes_and_take_numpy_scalars(shape: tuple[int, ...]) -> None:
    data = np.full(shape, 1.3, dtype=np.float32)
    out = convert(data if shape else data[()], tl.float32, tl.float8e4nv)
    assert out.shape == shape
    assert out.dtype.itemsize == 1
    assert (decode(out, "fp8e4nv") == 1.25).all()


def test_casts_of_strided_data() -> None:
    data = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3].T
    np.testing.assert_array_equal(decode(encode(data, "bf16"), "bf16"), data)
    np.testing.assert_array_equal(decode(encode(data, "fp8e4nv"), "fp8e4nv"), data)


def test_types_and_roundings_that_are_not_emulated_are_refused() -> None:
    from triton._C.libtriton import ir

    with pytest.raises(NotImplementedError, match="fp8e4b15"):
        convert(np.zeros(1, np.uint8), tl.float8e4b15, tl.float32)
    with pytest.raises(NotImplementedError, match="rounding"):
        convert(np.zeros(1, np.float32), tl.float32, tl.bfloat16, ir.ROUNDING_MODE.RTZ)


@triton.jit
def cast_kernel(x, y, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(y + index, tl.load(x + index).to(y.dtype.element_ty))


def cast_all(values: torch.Tensor) -> dict[tuple[str, str], torch.Tensor]:
    out = {}
    for source, from_dtype in TORCH.items():
        for target, to_dtype in TORCH.items():
            x = values.to(from_dtype)
            out[source, target] = torch.empty(x.shape, dtype=to_dtype)
            cast_kernel[(1,)](x, out[source, target], x.numel())
    integers = torch.arange(-512, 512) * 2049
    for target in ("bf16", "fp16", "fp32", "fp64"):
        to_dtype = TORCH[target]
        out["int64", target] = torch.empty(integers.shape, dtype=to_dtype)
        cast_kernel[(1,)](integers, out["int64", target], integers.numel())
    return out


def test_casts_in_kernels_between_all_types(interpreter: InterpreterProcess) -> None:
    """What reaches memory, for every pair, and from integers, which Triton does not cast to FP8."""
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * 300
    values[:4] = torch.tensor([float("nan"), 1e30, -0.0, 3e-6])
    results = interpreter.call(here(cast_all), values)
    assert len(results) == len(TORCH) ** 2 + 4
    for (source, target), got in results.items():
        if source == "int64":
            start = (torch.arange(-512, 512) * 2049).numpy().astype(np.float64)
        else:
            start = decode(_bits(values.to(TORCH[source])), source).astype(np.float64)
        expected = expected_cast(start, target) if source != target else start.astype(NUMPY[target])
        assert_same_bits(_bits(got), expected)


def _bits(x: torch.Tensor) -> np.ndarray:
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return x.view(integer).numpy().view(BITS[x.dtype.itemsize])


# --- Arithmetic and control flow in kernels ---------------------------------------------------------------------------


@triton.jit
def bfloat16_kernel(x, y, out, size: tl.constexpr):
    index = tl.arange(0, size)
    a, b = tl.load(x + index), tl.load(y + index)
    tl.store(out + index, a + b)
    tl.store(out + size + index, a * b)
    tl.store(out + 2 * size + index, tl.maximum(a, b))
    tl.store(out + 3 * size + index, tl.where(a > b, a, b))
    tl.store(out + 4 * size + index, -a)


@triton.jit
def dot_kernel(a, b, out, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr):
    rows, columns, inner = tl.arange(0, m)[:, None], tl.arange(0, n)[None, :], tl.arange(0, k)
    product = tl.dot(tl.load(a + rows * k + inner[None, :]), tl.load(b + inner[:, None] * n + columns))
    tl.store(out + rows * n + columns, product)


@triton.jit
def loop_kernel(x, out, size, block: tl.constexpr):
    index = tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, size, block):
        total += tl.load(x + start + index, start + index < size, other=0.0)
    tl.store(out + index, total)


@triton.jit
def atomic_kernel(x, index, out, size: tl.constexpr):
    lane = tl.arange(0, size)
    tl.atomic_add(out + tl.load(index + lane), tl.load(x + lane), lane < size - 1)


@triton.jit
def larger_first(value, index, other_value, other_index):
    first = (value > other_value) | ((value == other_value) & (index < other_index))
    return tl.where(first, value, other_value), tl.where(first, index, other_index)


@triton.jit
def multiply_add(scale, shift, other_scale, other_shift):
    return scale * other_scale, shift * other_scale + other_shift


@triton.jit
def reduce_kernel(x, values, indices, scans, m: tl.constexpr, n: tl.constexpr):
    rows, columns = tl.arange(0, m)[:, None], tl.arange(0, n)[None, :]
    block = tl.load(x + rows * n + columns)
    value, index = tl.reduce((block, tl.broadcast_to(columns, (m, n))), 1, larger_first)
    tl.store(values + tl.arange(0, m), value)
    tl.store(indices + tl.arange(0, m), index)
    _, shifted = tl.associative_scan((block, block), 1, multiply_add)
    tl.store(scans + rows * n + columns, shifted)


@triton.jit
def fp8_arithmetic_kernel(x, out, size: tl.constexpr):
    index = tl.arange(0, size)
    value = tl.load(x + index)
    tl.store(out + index, value + value)


def run_bfloat16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(5, a.numel(), dtype=a.dtype)
    bfloat16_kernel[(1,)](a, b, out, a.numel())
    return out


def run_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(a.shape[0], b.shape[1])
    dot_kernel[(1,)](a, b, out, *out.shape, a.shape[1])
    return out


def run_loop(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(16)
    loop_kernel[(1,)](x, out, x.numel(), 16)
    return out


def run_atomic(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    atomic_kernel[(1,)](x, index, out, x.numel())
    return out


def run_reductions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    m, n = x.shape
    out = torch.empty(m), torch.empty(m, dtype=torch.int32), torch.empty(m, n)
    reduce_kernel[(1,)](x, *out, m, n)
    return out


def run_fp8_arithmetic() -> None:
    x = torch.ones(16).to(E4M3)
    fp8_arithmetic_kernel[(1,)](x, torch.empty_like(x), 16)


def test_bfloat16_arithmetic(interpreter: InterpreterProcess) -> None:
    a, b = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got = interpreter.call(here(run_bfloat16), a, b)
    largest = torch.maximum(a, b)
    torch.testing.assert_close(got, torch.stack([a + b, a * b, largest, largest, -a]), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3, E5M2, torch.float32])
def test_dot_multiplies_exactly_and_adds_in_float32(interpreter: InterpreterProcess, dtype: torch.dtype) -> None:
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(2))
    got = interpreter.call(here(run_dot), a, b)
    torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_loops_whose_bound_is_an_argument(interpreter: InterpreterProcess) -> None:
    """Triton 3.6 breaks them under NumPy 2.4."""
    x = torch.arange(37.0)
    torch.testing.assert_close(interpreter.call(here(run_loop), x), F.pad(x, (0, 11)).view(3, 16).sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_atomic_adds_to_one_address_all_count(interpreter: InterpreterProcess, dtype: torch.dtype) -> None:
    index = torch.tensor([0, 1, 1, 1, 0, 3, 1, 3])
    got = interpreter.call(here(run_atomic), torch.full((8,), 0.5, dtype=dtype), index, torch.ones(4, dtype=dtype))
    assert got.tolist() == [2.0, 3.0, 1.0, 1.5]


def test_reductions_and_scans_with_any_combine_function(interpreter: InterpreterProcess) -> None:
    """Not commutative ones, so the order of the operands is checked too."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    value, index, scan = interpreter.call(here(run_reductions), x)
    np.testing.assert_array_equal(value, x.amax(1))
    np.testing.assert_array_equal(index, np.argmax(x.numpy(), axis=1))
    expected = [x[:, 0].double()]
    for column in x.double().unbind(1)[1:]:
        expected.append(expected[-1] * column + column)
    torch.testing.assert_close(scan.double(), torch.stack(expected, 1), rtol=1e-5, atol=1e-5)


def test_arithmetic_on_fp8_is_refused(interpreter: InterpreterProcess) -> None:
    with pytest.raises(InterpreterFailure, match="fp8e4nv: cast to float32 first"):
        interpreter.call(here(run_fp8_arithmetic))


# --- libdevice --------------------------------------------------------------------------------------------------------


@triton.jit
def unary_kernel(x, out, size: tl.constexpr, function: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, function(tl.load(x + index)).to(out.dtype.element_ty))


@triton.jit
def binary_kernel(x, y, out, size: tl.constexpr, function: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, function(tl.load(x + index), tl.load(y + index)).to(out.dtype.element_ty))


@triton.jit
def fma_kernel(x, y, out, size: tl.constexpr, function: tl.constexpr):
    index = tl.arange(0, size)
    a, b = tl.load(x + index), tl.load(y + index)
    tl.store(out + index, function(a, b, a).to(out.dtype.element_ty))


def positive(x: torch.Tensor) -> torch.Tensor:
    return x.abs() + 0.125


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 0.99


def half_away_from_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.floor(x.abs() + 0.5) * x.sign()


def same(x: torch.Tensor) -> torch.Tensor:
    return x


DOMAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(["log", "log2", "log10", "log1p", "sqrt", "rsqrt", "lgamma", "tgamma", "y0", "y1"], positive),
    **dict.fromkeys(["acos", "asin", "atanh", "erfinv"], unit),
    "acosh": lambda x: positive(x) + 1,
    "normcdfinv": lambda x: torch.sigmoid(x),
}
"""Where a function is defined, if not everywhere."""

TORCH_HAS = (
    "acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor isinf isnan lgamma log log10 "
    "log1p log2 rsqrt signbit sin sinh sqrt tan tanh trunc abs"
)
UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in TORCH_HAS.split()},
    "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3),
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erfcx": torch.special.erfcx,
    "exp10": lambda x: 10**x,
    "ilogb": lambda x: torch.floor(torch.log2(x.abs())),
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "llrint": torch.round,
    "llround": half_away_from_zero,
    "nearbyint": torch.round,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "rcbrt": lambda x: 1 / (x.sign() * x.abs() ** (1 / 3)),
    "rint": torch.round,
    "round": half_away_from_zero,
    "tgamma": lambda x: torch.exp(torch.lgamma(x)),
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
    "finitef": torch.isfinite,
    "saturatef": lambda x: x.clamp(0, 1),
    "fast_expf": torch.exp,
    "rsqrt_rn": torch.rsqrt,
    "rcp_rn": torch.reciprocal,
    "sqrt_rn": lambda x: torch.sqrt(x),
    "float2int_rn": torch.round,
    "float2int_rz": torch.trunc,
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ["atan2", "copysign", "fmod", "hypot"]},
    "pow": torch.pow,
    "fdim": lambda x, y: (x - y).clamp_min(0),
    "nextafter": torch.nextafter,
    "div_rn": torch.div,
    "mul_rn": torch.mul,
    "add_rn": torch.add,
    "sub_rn": torch.sub,
}
BASE_POSITIVE = {"pow"}
TERNARY: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "fma": lambda x, y, z: x * y + z,
    "fma_rn": lambda x, y, z: x * y + z,
}
WITH_INTEGER = {"ldexp": torch.ldexp, "powi": lambda x, n: torch.pow(x, n)}


def libdevice_input(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all kinds, halves among them, in the domain of the function."""
    x = torch.cat([torch.randn(96, generator=torch.Generator().manual_seed(0)) * 3, torch.arange(-8, 8) + 0.5])
    x = torch.cat([x, torch.tensor([1.0, -1.0, 2.0, -2.0, 0.25, 4.0, 5.0, -7.0] * 2)]).to(dtype)
    if name in ("sqrt_rn", "rsqrt_rn"):
        return positive(x)
    return DOMAIN.get(name, same)(x)


def apply_libdevice(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The results of every function of the tables that has a variant for ``dtype``."""
    out = {}
    second = libdevice_input("", dtype).flip(0).contiguous()
    integers = (torch.arange(128) % 7 - 3).to(torch.int32)
    for kernel, names in ((unary_kernel, UNARY), (binary_kernel, BINARY), (fma_kernel, TERNARY)):
        for name in names:
            x = libdevice_input(name, dtype)
            x = positive(x) if name in BASE_POSITIVE else x
            result = torch.empty(x.shape, dtype=dtype)
            inputs = (x,) if kernel is unary_kernel else (x, second)
            try:
                kernel[(1,)](*inputs, result, x.numel(), getattr(libdevice, name))
            except triton.runtime.errors.InterpreterError as error:
                if "KeyError" not in str(error):  # libdevice's own table has no such type
                    raise
                continue
            out[name] = result
    for name in WITH_INTEGER:
        function = getattr(libdevice, "pow" if name == "powi" else name)
        out[name] = torch.empty(128, dtype=dtype)
        binary_kernel[(1,)](libdevice_input(name, dtype), integers, out[name], 128, function)
    return out


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-11)])
def test_libdevice_computes_what_torch_does_in_float64(
    interpreter: InterpreterProcess, dtype: torch.dtype, bound: float
) -> None:
    results = interpreter.call(here(apply_libdevice), dtype)
    second = libdevice_input("", dtype).flip(0)
    integers = (torch.arange(128) % 7 - 3).to(torch.int32)
    assert len(results) > 60
    for name, got in results.items():
        x = libdevice_input(name, dtype)
        x = positive(x) if name in BASE_POSITIVE else x
        if name == "nextafter":
            expected = torch.nextafter(x, second).double()
        elif name in UNARY:
            expected = UNARY[name](x.double()).double()
        elif name in BINARY:
            expected = BINARY[name](x.double(), second.double())
        elif name in TERNARY:
            expected = TERNARY[name](x.double(), second.double(), x.double())
        else:
            expected = WITH_INTEGER[name](x.double(), integers)
        torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def test_every_stand_in_by_rule_is_tested() -> None:
    assert {*SAME_NAME.split(), *OTHERS} - {"fabs"} <= {*UNARY, *BINARY, *TERNARY, *WITH_INTEGER}


def symbols_of(name: str) -> set[str]:
    from triton.language.extra.cuda import libdevice as cuda

    function = getattr(cuda, name, None)
    return set(re.findall(r'"(__nv_\w+)"', inspect.getsource(function))) if function is not None else set()


def test_what_inductor_emits_has_stand_ins() -> None:
    """Every ``libdevice.name`` in Inductor's code generators and helpers, in all its variants for floats."""
    import torch._inductor

    folder = Path(torch._inductor.__file__).parent
    sources = [folder / "codegen" / "triton.py", folder / "runtime" / "triton_helpers.py"]
    emitted = {name for path in sources for name in re.findall(r"libdevice\.(\w+)", path.read_text())}
    assert {"rsqrt", "tanh", "isnan"} <= emitted
    needed = {symbol for name in emitted for symbol in symbols_of(name)}
    rounded_otherwise = {symbol for symbol in needed if re.search(r"_r[zdu]$", symbol)}
    assert needed - rounded_otherwise <= set(symbols())


def test_function_without_a_stand_in_is_named(interpreter: InterpreterProcess) -> None:
    with pytest.raises(InterpreterFailure, match="__nv_sinpif has no stand-in"):
        interpreter.call(here(apply_sinpi))


def apply_sinpi() -> None:
    x = torch.ones(16)
    unary_kernel[(1,)](x, x, 16, libdevice.sinpi)


@triton.jit
def random_kernel(out, seed, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, tl.rand(seed, index))


def draw(seed: int) -> torch.Tensor:
    out = torch.empty(1024)
    random_kernel[(1,)](out, seed, 1024)
    return out


def test_random_numbers_are_uniform_and_follow_the_seed(interpreter: InterpreterProcess) -> None:
    first, again, other = (interpreter.call(here(draw), seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0 <= first.min() < 0.02 < 0.98 < first.max() < 1
    assert abs(first.mean() - 0.5) < 0.05


# --- Programs ---------------------------------------------------------------------------------------------------------


def lowered(function: Callable[..., Any], *inputs: torch.Tensor, **settings: Any) -> tuple[str, list[int], Any]:
    """The wrapper that Inductor generates for an H100, the inputs it mutates, and the graph, a function on the CPU."""
    from torch._dynamo.utils import detect_fake_mode
    from torch._functorch.aot_autograd import aot_export_module
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    from fp8compile.preview.lowering import move_factories, move_metadata
    from fp8compile.preview.stand_in import pretend

    class Model(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            out = function(*args)
            return out if isinstance(out, tuple) else (out,)

    with torch.no_grad(), pretend(get_chip("h100")):
        gm, signature = aot_export_module(Model(), inputs, trace_joint=False, decompositions=select_decomp_table())
    _write_inputs_in_place(gm.graph, signature.user_inputs_to_mutate)
    reference = torch.fx.GraphModule(gm, torch.fx.Graph())
    reference.graph.output(reference.graph.graph_copy(gm.graph, {}))
    reference.recompile()
    device = torch.device("cuda", 0)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode([node.meta["val"] for node in placeholders])
    with V.set_fake_mode(mode):
        replace_random_passes(gm)
    move_metadata(gm.graph, device)
    move_factories(gm.graph, device)
    examples = [node.meta["val"] for node in placeholders]
    with (
        config.patch({"compile_threads": 1, "fx_graph_cache": False, **settings}),
        pretend(get_chip("h100")),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        V.set_real_inputs(examples),
    ):
        view_to_reshape(gm)
        post_grad_passes(gm, False)
        graph = GraphLowering(gm, example_inputs=examples, shape_env=None, is_inference=True)
        with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
            graph.run(*examples)
            source, _ = graph.codegen()
    mutated = [i for i, name in enumerate(graph.graph_input_names) if name in graph.mutated_inputs]
    return str(getattr(source, "value", source)), mutated, reference


def _write_inputs_in_place(graph: torch.fx.Graph, mutated: dict[str, str]) -> None:
    """Exported graphs return what they would write; Inductor is given graphs that end by writing it."""
    nodes = {node.name: node for node in graph.nodes}
    (returned,) = graph.output_node().args
    with graph.inserting_before(graph.output_node()):
        for value, target in mutated.items():
            graph.call_function(torch.ops.aten.copy_.default, (nodes[target], nodes[value])).meta.update(
                nodes[value].meta
            )
    graph.output_node().args = (tuple(node for node in returned if node.name not in mutated),)


def draw_normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


BF16 = torch.bfloat16


def mlp(x, w1, b1, w2, gain):
    hidden = F.gelu(F.rms_norm(x, x.shape[-1:], gain) @ w1 + b1)
    return torch.softmax((F.layer_norm(hidden, hidden.shape[-1:]) @ w2).float(), -1)


def loss_and_gradients(x, weight, target):
    def loss(x, weight):
        return F.cross_entropy((F.rms_norm(x, x.shape[-1:]) @ weight).float(), target)

    value, pullback = torch.func.vjp(loss, x, weight)
    return (value, *pullback(torch.ones_like(value)))


def norm_and_gradients(x, weight, bias, tangent):
    def norm(x, weight, bias):
        return F.silu(F.layer_norm(x, x.shape[-1:], weight, bias))

    y, pullback = torch.func.vjp(norm, x, weight, bias)
    return (y, *pullback(tangent))


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2


def reductions(x, y):
    return x.sum(), x.std(), x.argmax(-1), y.cumsum(-1), y.amax(0), y.prod(-1), torch.sort(y, -1)[0], (y > 0).any(0)


PLAIN = "tanh erf exp expm1 sin cos atan floor ceil trunc round sign sigmoid isnan signbit asinh"


def elementwise(x):
    p = x.abs() + 0.1
    plain = [getattr(torch, name)(x) for name in PLAIN.split()]
    return *plain, p.log(), p.rsqrt(), p**x, torch.fmod(x, p), F.softplus(x), torch.maximum(x, p), x.nan_to_num()


def integers(i, j):
    return i // j, i % j, i << 1, i & j, ~i, i.to(BF16), (i.double() / 3).to(BF16), i.to(torch.int8)


def gather_and_scatter(x, index, y):
    return x[index], x.index_put((index,), y, accumulate=True), F.embedding(index, x), F.pad(x, (1, 2)), x.flip(-1)


def quantize(x):
    scale = x.abs().amax(-1, keepdim=True).float().div(512)  # exact
    data = (x.float() / scale).clamp_min(-448).clamp_max(448).to(E4M3)
    return data, scale, data.t().contiguous(), (x.float() * 3).clamp_min(-57344).clamp_max(57344).to(E5M2)


def products(x, weight, bias, images, filters):
    batched = torch.bmm(x[None].expand(2, -1, -1), weight.t()[None].expand(2, -1, -1))
    return F.linear(x, weight, bias), batched, F.conv2d(images, filters, padding=1).relu()


INDEX = torch.tensor([3, 0, 3, 7, 1])
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], dict[str, Any], float]] = {
    "mlp": (
        mlp,
        (
            draw_normal(24, 64, dtype=BF16),
            draw_normal(64, 96, dtype=BF16, scale=0.1),
            draw_normal(96, dtype=BF16),
            draw_normal(96, 40, dtype=BF16, scale=0.1),
            draw_normal(64, dtype=BF16),
        ),
        {},
        1e-2,
    ),
    "loss_and_gradients": (
        loss_and_gradients,
        (draw_normal(16, 64), draw_normal(64, 300, scale=0.1), torch.arange(16) * 17),
        {},
        1e-5,
    ),
    "norm_and_gradients": (
        norm_and_gradients,
        (draw_normal(256, 64), draw_normal(64), draw_normal(64), draw_normal(256, 64)),
        {},
        1e-5,
    ),
    "mix_order_reduction": (
        norm_and_gradients,
        (draw_normal(64, 512), draw_normal(512), draw_normal(512), draw_normal(64, 512)),
        {"triton.mix_order_reduction_non_strict_mode": True, "triton.mix_order_reduction_split_size": 8},
        1e-5,
    ),
    "attention": (attention, tuple(draw_normal(1, 2, 32, 16, dtype=BF16, scale=s) for s in (1, 2, 3)), {}, 1e-2),
    "reductions": (reductions, (draw_normal(100, 700), draw_normal(9, 37)), {}, 1e-5),
    "elementwise": (elementwise, (draw_normal(6, 50),), {}, 1e-6),
    "integers": (integers, (torch.arange(-60, 60), torch.arange(120) % 7 + 1), {}, 0),
    "gather_and_scatter": (
        gather_and_scatter,
        (draw_normal(8, 6, dtype=BF16), INDEX, draw_normal(5, 6, dtype=BF16)),
        {},
        1e-2,
    ),
    "quantize": (quantize, (draw_normal(20, 48, dtype=BF16, scale=100),), {}, 0),
    "products": (
        products,
        (
            draw_normal(16, 32),
            draw_normal(24, 32),
            draw_normal(24),
            draw_normal(2, 4, 6, 6),
            draw_normal(8, 4, 3, 3),
        ),
        {},
        1e-5,
    ),
    "combo_kernels": (
        lambda x, y: (x + 1, y.relu(), x.sum(-1)),
        (draw_normal(20, 30), draw_normal(7)),
        {"combo_kernels": True},
        1e-6,
    ),
    "tensor_descriptors": (
        lambda x, y: (x + y, (x * y).sum(-1)),
        (draw_normal(64, 128), draw_normal(64, 128)),
        {"triton.use_tensor_descriptor": True, "assume_aligned_inputs": True},
        1e-6,
    ),
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_program_computes_what_its_graph_does(interpreter: InterpreterProcess, name: str) -> None:
    """Bound: relative to the norm of each output; 0 means bit for bit. bfloat16 graphs round between operators."""
    function, inputs, settings, bound = PROGRAMS[name]
    source, mutated, reference = lowered(function, *inputs, **settings)
    assert mutated == []
    outputs = interpreter.load(source)(inputs)
    expected = reference(*inputs)
    assert len(outputs) == len(expected)
    for got, want in zip(outputs, expected, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
        assert_close(got, want, bound)


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    got, want = got.double(), want.double()
    finite = want.isfinite()
    torch.testing.assert_close(torch.where(finite, 0.0, got), torch.where(finite, 0.0, want), equal_nan=True)
    assert (got - want)[finite].norm() <= bound * want[finite].norm()


@triton.jit
def doubled(value, factor: tl.constexpr):
    return value * factor


@triton.jit
def described_kernel(x, out, m, n, block_m: tl.constexpr, block_n: tl.constexpr):
    source = tl.make_tensor_descriptor(x, shape=[m, n], strides=[n, 1], block_shape=[block_m, block_n])
    target = tl.make_tensor_descriptor(out, shape=[m, n], strides=[n, 1], block_shape=[block_m, block_n])
    row, column = tl.program_id(0) * block_m, tl.program_id(1) * block_n
    target.store([row, column], doubled(source.load([row, column]), 2.0))


@triton.autotune(configs=[triton.Config({"block": 64}), triton.Config({"block": 32})], key=["size"])
@triton.jit
def tuned_kernel(x, out, size, scale, block: tl.constexpr):
    index = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + index, tl.load(x + index, index < size) * scale, index < size)


@triton_op("test_interpreter::described", mutates_args={})
def described(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    m, n = x.shape
    wrap_triton(described_kernel)[(triton.cdiv(m, 16), triton.cdiv(n, 32))](x, out, m, n, 16, 32)
    return out


@triton_op("test_interpreter::tuned", mutates_args={})
def tuned(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    size = x.numel()
    wrap_triton(tuned_kernel)[lambda meta: (triton.cdiv(size, meta["block"]),)](x, out, size, 0.25)
    return out


def test_users_own_kernels(interpreter: InterpreterProcess) -> None:
    """A grid that is given and one by configuration, a function the kernel calls, descriptors made in the kernel."""
    x = draw_normal(40, 64)
    source, _, _ = lowered(lambda x: described(x + 1) + tuned(x), x)
    assert "described_kernel" in source
    assert "tuned_kernel" in source
    (got,) = interpreter.load(source)([x])
    torch.testing.assert_close(got, (x + 1) * 2 + x * 0.25)


def test_descriptors_made_by_the_wrapper(interpreter: InterpreterProcess) -> None:
    """As Inductor writes them for kernels that take ``TensorDescriptor`` arguments."""
    x = draw_normal(40, 64)
    source, _, _ = lowered(described, x)
    source, made = re.subn(
        r"( +)described_kernel_0.run\((\w+), (\w+), 40, 64, ",
        r"\1from_tensor = triton.tools.tensor_descriptor.TensorDescriptor.from_tensor\n"
        r"\1described_kernel_0.run(from_tensor(\2, [16, 32]), from_tensor(\3, [16, 32]), 40, 64, ",
        source,
    )
    source, read = re.subn(r"tl\.make_tensor_descriptor\((\w+),.*\)", r"\1", source)
    assert (made, read) == (1, 2)
    (got,) = interpreter.load(source)([x])
    torch.testing.assert_close(got, 2 * x)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_scaled_mm(interpreter: InterpreterProcess, rowwise: bool, out_dtype: torch.dtype) -> None:
    a, b = draw_normal(32, 64).to(E4M3), draw_normal(48, 64).to(E5M2 if rowwise else E4M3)
    scale_a, scale_b = torch.rand(32 if rowwise else 1, 1) + 0.5, torch.rand(1, 48 if rowwise else 1) + 0.5

    def product(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=True)

    source, _, _ = lowered(product, a, b, scale_a, scale_b)
    (got,) = interpreter.load(source)([a, b, scale_a, scale_b])
    expected = (a.double() @ b.double().t()) * scale_a * scale_b
    assert got.dtype == out_dtype
    assert_close(got, expected, 4e-3 if out_dtype == torch.bfloat16 else 1e-6)


def test_scaled_grouped_mm(interpreter: InterpreterProcess) -> None:
    a, b = draw_normal(64, 64).to(E4M3), draw_normal(3, 32, 64).to(E4M3)
    scale_a, scale_b = torch.rand(64) + 0.5, torch.rand(3, 32) + 0.5
    ends = torch.tensor([16, 16, 48], dtype=torch.int32)

    def product(a, b, scale_a, scale_b, ends):
        return torch._scaled_grouped_mm(a, b.transpose(1, 2), scale_a, scale_b, ends, out_dtype=torch.bfloat16)

    source, _, _ = lowered(product, a, b, scale_a, scale_b, ends)
    (got,) = interpreter.load(source)([a, b, scale_a, scale_b, ends])
    groups = [(0, 16, 0), (16, 48, 2)]
    expected = [(a[i:j].double() @ b[g].double().t()) * scale_a[i:j, None] * scale_b[g] for i, j, g in groups]
    assert_close(got[:48], torch.cat(expected), 4e-3)
    assert not got[48:].any()


def test_programs_of_our_operators(interpreter: InterpreterProcess) -> None:
    """A wrapper may call ``torch.ops.fp8compile``: the CPU reference answers."""
    from fp8compile.ops import COMPUTE_SCALE

    def scale(x: torch.Tensor) -> torch.Tensor:
        return COMPUTE_SCALE(x + 1, [1], E4M3, False) * 2

    x = draw_normal(8, 16)
    source, _, _ = lowered(scale, x)
    assert "torch.ops.fp8compile.compute_scale" in source
    (got,) = interpreter.load(source)([x])
    torch.testing.assert_close(got, COMPUTE_SCALE(x + 1, [1], E4M3, False) * 2)


def test_random_numbers_in_programs(interpreter: InterpreterProcess) -> None:
    x = torch.ones(64, 64)
    source, _, _ = lowered(lambda x: F.dropout(x, 0.25, True), x)
    (got,) = interpreter.load(source)([x])
    torch.testing.assert_close(got.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert 0.7 < (got != 0).float().mean() < 0.8


def test_programs_that_write_their_inputs(interpreter: InterpreterProcess) -> None:
    """Running state, through strides: a slice of a larger buffer; what lies beside it stays."""

    def step(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        amax.copy_(torch.maximum(amax * 0.5, x.abs().amax()))
        return x / amax

    buffer = torch.tensor([[7.0, 9.0, 7.0]] * 2)
    x, amax = draw_normal(8, 4), buffer[:, 1]
    source, mutated, reference = lowered(lambda x, amax: step(x[:, :2], amax), x, amax)
    assert mutated == [1]
    expected_amax = amax.clone()
    (expected,) = reference(x, expected_amax)
    (got,) = interpreter.load(source, mutated)([x, amax])
    torch.testing.assert_close(got, expected)
    assert buffer.tolist() == [[7.0, 4.5, 7.0]] * 2
    assert torch.equal(amax, expected_amax)


def test_cooperative_reductions_are_refused(interpreter: InterpreterProcess) -> None:
    """Their programs wait for each other."""
    source, _, _ = lowered(lambda x: x.sum(), draw_normal(100, 700), **{"triton.force_cooperative_reductions": True})
    with pytest.raises(InterpreterFailure, match=r"kernel triton_\w+: a cooperative reduction"):
        interpreter.load(source)


# --- The child process ------------------------------------------------------------------------------------------------


def wrapper(body: str) -> str:
    """A wrapper of a few lines; generated ones differ in having kernels."""
    return "import torch\n\ndef call(args):\n" + "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(40.0)[3:].as_strided((3, 4), (9, 2), 5),
        torch.arange(4.0).expand(3, 4),
        torch.arange(12.0).to(E4M3).view(3, 4)[:, ::2],
        torch.tensor(3),
        torch.empty(0, 5),
        torch.ones(2, 2, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(3)),
    ],
)
def test_inputs_keep_strides_offset_and_values(interpreter: InterpreterProcess, x: torch.Tensor) -> None:
    run = interpreter.load(wrapper("x, = args\nreturn x.stride(), x.storage_offset(), x.float() * 1"))
    stride, offset, values = run([x])
    assert stride == x.stride()
    assert offset == x.storage_offset()
    assert torch.equal(values, x.detach().float())


def test_arguments_that_are_not_tensors(interpreter: InterpreterProcess) -> None:
    run = interpreter.load(wrapper("size, x, nothing = args\nreturn size + 1, x * size, nothing"))
    number, tensor, nothing = run([3, torch.ones(2), None])
    assert (number, nothing) == (4, None)
    assert tensor.tolist() == [3.0, 3.0]


def test_mutations_reach_the_callers_tensors(interpreter: InterpreterProcess) -> None:
    """Those declared, in place, through strides; what lies beside them stays; others are as before."""
    run = interpreter.load(wrapper("x, y, z = args\nx.add_(1)\ny.mul_(2)\nz.zero_()\nreturn ()"), mutated=[0, 1])
    buffer = torch.full((3, 4), 7.0)
    y, z = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    assert run([buffer[:, 1], y, z]) == []
    assert buffer.tolist() == [[7.0, 8.0, 7.0, 7.0]] * 3
    assert (y.tolist(), z.tolist()) == ([2.0, 2.0], [1.0, 1.0])


def test_outputs_that_are_inputs_are_the_callers_own(interpreter: InterpreterProcess) -> None:
    x, y = torch.ones(2), torch.ones(3)
    run = interpreter.load(wrapper("x, y = args\nx.add_(1)\nreturn y, x, x + 1"), mutated=[0])
    first, second, third = run([x, y])
    assert first is y
    assert second is x
    assert (x.tolist(), third.tolist()) == ([2.0, 2.0], [3.0, 3.0])


def test_inputs_that_share_memory_share_it_in_the_child(interpreter: InterpreterProcess) -> None:
    buffer = torch.zeros(4)
    run = interpreter.load(wrapper("x, y = args\nx.add_(1)\nreturn y.clone(),"), mutated=[0])
    (seen,) = run([buffer[:2], buffer[1:3]])
    assert seen.tolist() == [1.0, 0.0]
    assert buffer.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_constants_of_the_graph(interpreter: InterpreterProcess) -> None:
    run = interpreter.load(
        wrapper("return args[0] + _tensor_constant0,"), constants={"_tensor_constant0": torch.ones(2)}
    )
    assert run([torch.ones(2)])[0].tolist() == [2.0, 2.0]


def test_tensors_elsewhere_are_refused(interpreter: InterpreterProcess) -> None:
    run = interpreter.load(wrapper("return args"))
    with pytest.raises(ValueError, match="tensor 1 is on meta"):
        run([torch.ones(1), torch.empty(1, device="meta")])


def test_printing_does_not_disturb_answers(interpreter: InterpreterProcess) -> None:
    run = interpreter.load(wrapper("import os\nprint('x' * 1000)\nos.write(1, b'y' * 1000)\nreturn args[0] * 2,"))
    assert run([torch.ones(1)])[0].tolist() == [2.0]


def test_exceptions_tell_the_line_and_leave_the_child_alive(interpreter: InterpreterProcess) -> None:
    run = interpreter.load(wrapper("buf0 = some_unknown_allocator(3)\nreturn buf0,"))
    with pytest.raises(InterpreterFailure, match=r"(?s)buf0 = some_unknown_allocator\(3\).*NameError"):
        run([])
    assert interpreter.load(wrapper("return 1,"))([]) == [1]


def test_failing_kernel_is_named(interpreter: InterpreterProcess) -> None:
    """Broken on purpose: one argument less than its kernel takes."""
    x = draw_normal(8, 16)
    source, _, _ = lowered(lambda x: torch.exp(x), x)
    broken, number = re.subn(r"\.run\(\w+, ", ".run(", source)
    assert number == 1
    with pytest.raises(InterpreterFailure, match=r"kernel triton_poi_\w+: no value for xnumel"):
        interpreter.load(broken)([x])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def call(args:", "SyntaxError"),
        ("x = 1", "defines no 'call'"),
        ("async_compile = __import__('torch._inductor.async_compile').nope", "has no attribute 'nope'"),
        (
            "from torch._inductor.async_compile import AsyncCompile\nAsyncCompile().cpp_pybinding([], '')",
            "without a stand-in: async_compile.cpp_pybinding",
        ),
        (
            "from torch._inductor.async_compile import AsyncCompile\nAsyncCompile().triton('broken', 'import nope')",
            "kernel broken: No module named 'nope'",
        ),
    ],
)
def test_sources_that_do_not_load(interpreter: InterpreterProcess, source: str, message: str) -> None:
    with pytest.raises(InterpreterFailure, match=re.escape(message)):
        interpreter.load(source)


def test_a_dead_child_is_reported_and_replaced() -> None:
    with InterpreterProcess() as process:
        run = process.load(wrapper("return args"))
        process.call("os:write", 2, b"first words\n" * 100 + b"last words")
        with pytest.raises(InterpreterFailure, match=r"(?s)exited with status 3.*last words") as failure:
            process.call("os:_exit", 3)
        assert str(failure.value).count("first words") < 50
        assert process.call("builtins:len", "abc") == 3
        with pytest.raises(InterpreterFailure, match="load it again"):
            run([])


def test_functions_that_do_not_exist(interpreter: InterpreterProcess) -> None:
    with pytest.raises(InterpreterFailure, match="no_such_function"):
        interpreter.call(f"{__name__}:no_such_function")
    with pytest.raises(InterpreterFailure, match="no_such_module"):
        interpreter.call("no_such_module:f")


def test_run_interpreted_interprets_and_this_process_does_not() -> None:
    import os

    assert run_interpreted("os:getenv", "TRITON_INTERPRET") == "1"
    assert os.environ.get("TRITON_INTERPRET") is None


def test_nothing_is_left_behind() -> None:
    """Kernel sources lie in a folder that goes with the child."""
    source, _, _ = lowered(lambda x: x.exp(), torch.ones(4))
    with InterpreterProcess() as process:
        process.load(source)
        path = Path(process.call("tempfile:gettempdir"))
        assert [file for file in path.iterdir() if file.name.startswith("triton_poi")]
    assert not path.exists()


def test_no_process_starts_before_the_first_request() -> None:
    process = InterpreterProcess()
    assert process._child is None
    process.close()
