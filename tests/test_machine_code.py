"""Machine code for Hopper without a GPU: what is read from a compiled kernel, how failures are told, and what the code
of our GEMMs must look like: FP8 tensor cores fed by TMA, nothing spilled, every block of K promoted when accurate; and
that of what moves memory: 128 bits at a time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

import fp8compile
from fp8compile.hardware import CHIPS
from fp8compile.kernels.block_scaled_mm import launch_block_scaled_mm
from fp8compile.kernels.configs import RULES, SQUARE, TOKENS_16, TOKENS_64, WIDE, TileConfig
from fp8compile.kernels.grouped_mm import launch_scaled_grouped_mm
from fp8compile.kernels.quantize_block import launch_quantize_block
from fp8compile.kernels.quantize_transposed import launch_quantize_transposed
from fp8compile.kernels.scaled_mm import launch_scaled_mm
from fp8compile.preview.machine_code import (
    CompileError,
    KernelSpec,
    MachineCode,
    compile_kernel,
    compile_kernels,
)
from fp8compile.recipe import E4M3, E5M2

TRITON_TYPE = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    E4M3: "fp8e4nv",
    E5M2: "fp8e5",
}


# --- Reading machine code ---------------------------------------------------------------------------------------------

COPY = """
import triton
import triton.language as tl

@triton.jit
def copy(source, target, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < size), mask=index < size)

@triton.jit
def dot(a, b, out, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    at = rows[:, None] * SIZE + rows[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))

@triton.jit
def many(source, target, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    x = tl.load(source + index)
    largest = tl.max(x, axis=0)
    tl.store(target + index, x / largest)
"""

POINTWISE = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import AutotuneHint, DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.pointwise(
    size_hints={'x': 4096},
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*bf16', 'out_ptr0': '*fp8e4nv', 'xnumel': 'i32', 'XBLOCK': 'constexpr'},
                 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9,
                                            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
                                            warp_size=32),
                 'constants': {}, 'configs': [{}]},
    inductor_meta={'kernel_name': 'triton_poi_fused_0', 'mutated_arg_names': [], 'autotune_hints': set()},
    min_elem_per_thread=0
)
@triton.jit
def triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    tl.store(out_ptr0 + xindex, tl.load(in_ptr0 + xindex, xmask).to(tl.float32).to(tl.float8e4nv), xmask)
"""


def copy_spec(
    folder: Path, *, divisible: tuple[str, ...] = ("source", "target", "size"), block: int = 1024
) -> KernelSpec:
    file = folder / "kernels_under_test.py"
    file.write_text(COPY)
    signature = {"source": "*fp32", "target": "*fp32", "size": "i32"}
    return KernelSpec(str(file), "copy", signature, {"BLOCK": block}, divisible, {"num_warps": 4})


def dot_spec(folder: Path, dtype: str) -> KernelSpec:
    pointers = {"a": f"*{dtype}", "b": f"*{dtype}", "out": "*fp32"}
    return KernelSpec(copy_spec(folder).source, "dot", pointers, {"SIZE": 64}, tuple(pointers), {"num_warps": 4})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MachineCode]:
    """A few kernels of known nature."""
    folder = tmp_path_factory.mktemp("kernels")
    generated = folder / "generated.py"
    generated.write_text(POINTWISE)
    specs = {
        "aligned": copy_spec(folder),
        "unaligned": copy_spec(folder, divisible=()),
        "fp8 in registers": dataclasses.replace(dot_spec(folder, "fp8e4nv"), options={"num_warps": 2}),
        "bf16": dot_spec(folder, "bf16"),
        "spilling": KernelSpec(
            copy_spec(folder).source, "many", {"source": "*fp32", "target": "*fp32"}, {"SIZE": 16384}, (),
            {"num_warps": 1},
        ),
        "of Inductor": KernelSpec(
            str(generated), "triton_poi_fused_0", {"in_ptr0": "*bf16", "out_ptr0": "*fp8e4nv", "xnumel": "i32"},
            {"XBLOCK": 1024}, ("in_ptr0", "out_ptr0", "xnumel"), {"num_warps": 4},
        ),
    }  # fmt: skip
    return dict(zip(specs, compile_kernels(list(specs.values()), processes=2), strict=True))


def test_aligned_copy_moves_128_bits_at_a_time(small: dict[str, MachineCode]) -> None:
    assert small["aligned"].name == "copy"
    assert (small["aligned"].vector_loads, small["aligned"].vector_stores) == (2, 2)
    assert (small["unaligned"].vector_loads, small["unaligned"].vector_stores) == (0, 0)
    assert small["unaligned"].instructions(r"LDG\.E") >= 8


def test_copy_uses_no_tensor_core_no_tma_and_little_else(small: dict[str, MachineCode]) -> None:
    code = small["aligned"]
    assert not code.tensor_core
    assert not code.tma
    assert code.spills == code.shared_bytes == code.conversions_to_fp16 == 0
    assert 8 <= code.registers <= 64
    assert ".target sm_90a" in code.ptx
    assert "EXIT" in code.sass


def test_fp8_without_fp8_tensor_cores_is_told_from_bf16(small: dict[str, MachineCode]) -> None:
    """What a GEMM of two warps falls back to: fp16 tensor cores, after a conversion that bf16 does not need."""
    assert small["fp8 in registers"].tensor_core["HMMA"] > 0
    assert small["fp8 in registers"].tensor_core["QGMMA"] == 0
    assert small["fp8 in registers"].conversions_to_fp16 > 0
    assert small["bf16"].tensor_core["HGMMA"] > 0
    assert small["bf16"].conversions_to_fp16 == 0
    assert small["bf16"].shared_bytes >= 2 * 64 * 64 * 2


def test_spills_are_counted(small: dict[str, MachineCode]) -> None:
    """512 values for each thread do not fit 255 registers."""
    assert small["spilling"].spills >= 4 * (512 - 255)
    assert small["spilling"].instructions("LDL") > 0
    assert small["spilling"].instructions("STL") > 0


def test_kernel_that_inductor_decorated_is_found(small: dict[str, MachineCode]) -> None:
    assert small["of Inductor"].vector_loads == 1
    assert re.search(r"F2FP\S*\.E4M3", small["of Inductor"].sass)


def test_kernel_that_does_not_compile_is_named_with_the_reason(tmp_path: Path) -> None:
    spec = dataclasses.replace(copy_spec(tmp_path, block=1000), label="copy of 1000")
    with pytest.raises(CompileError, match=r"(?s)'copy of 1000' did not compile.*power of 2"):
        compile_kernels([copy_spec(tmp_path), spec])


def test_process_that_dies_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    file = tmp_path / "dying.py"
    file.write_text("import os, sys\nprint('so long', file=sys.stderr)\nsys.stderr.flush()\nos.abort()\n")
    with pytest.raises(CompileError, match=r"(?s)'kernel' did not compile \(exit status -6\).*so long"):
        compile_kernel(KernelSpec(str(file), "kernel", {}))


# --- Our GEMMs --------------------------------------------------------------------------------------------------------


def specs_of(label: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[KernelSpec]:
    """What Triton compiles for each kernel that ``function`` launches: traced, so exactly what a graph contains."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        graph = make_fx(lambda: function(*fakes, **options))().graph
    launches = [node for node in graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    return [_spec(label, node) for node in launches]


def _spec(label: str, node: torch.fx.Node) -> KernelSpec:
    tuned = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    (config,) = tuned.configs
    blocks = {name: block for name, (_, (block,)) in node.kwargs["tma_descriptor_metadata"].items()}
    signature, constexprs, divisible = {}, {}, []
    for parameter in tuned.fn.params:
        value = node.kwargs["kwargs"][parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            constexprs[parameter.name] = value
            continue
        if isinstance(value, int):
            signature[parameter.name] = "i32"
        elif parameter.name in blocks:
            signature[parameter.name] = f"tensordesc<{TRITON_TYPE[value.meta['val'].dtype]}{blocks[parameter.name]}>"
        else:
            signature[parameter.name] = f"*{TRITON_TYPE[value.meta['val'].dtype]}"
        if parameter.name not in blocks and (not isinstance(value, int) or value % 16 == 0):
            divisible.append(parameter.name)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    name = tuned.fn.fn.__name__
    return KernelSpec(tuned.fn.fn.__module__, name, signature, constexprs, divisible, options, f"{name}, {label}")


M, N, K = 1024, 2048, 4096
MODES: list[tuple[str, TileConfig, bool]] = [
    ("16 tokens, fast", TOKENS_16, True),
    ("16 tokens, accurate", TOKENS_16, False),
    ("64 tokens, fast", TOKENS_64, True),
    ("64 tokens, accurate", TOKENS_64, False),
    ("square, fast", SQUARE, True),
    ("square, accurate", SQUARE, False),
    ("wide, fast", WIDE, True),
]
"""Every configuration in every mode that the rules choose it for."""


def operands(a: torch.dtype, b: torch.dtype, *batch: int) -> list[torch.Tensor]:
    return [
        torch.empty(M, K, dtype=a),
        torch.empty(*batch, N, K, dtype=b),
        torch.empty(M, 1),
        torch.empty(*batch, N, 1),
    ]


def gemm_specs() -> dict[str, KernelSpec]:
    """Each mode with the plainest epilogue and E4M3, and with the heaviest and one E5M2 operand, on either side."""
    like = torch.empty(M, N, dtype=torch.bfloat16)
    specs: list[tuple[str, KernelSpec]] = []

    def add(label: str, *found: KernelSpec) -> None:
        specs.extend((spec.name, spec) for spec in found)

    for place, (label, config, fast) in enumerate(MODES):
        plain = specs_of(
            f"{label}, plain", launch_scaled_mm, *operands(E4M3, E4M3), None, torch.bfloat16, fast,
            config=config, split=1,
        )  # fmt: skip
        dtypes = (E5M2, E4M3) if place % 2 else (E4M3, E5M2)
        heavy = specs_of(
            f"{label}, heavy", launch_scaled_mm, *operands(*dtypes), like[0], E4M3, fast, "gelu", like, like,
            torch.empty(1), with_amax=True, config=config, split=1,
        )  # fmt: skip
        add(label, *plain, *heavy)
    add("split", *specs_of(
        "split", launch_scaled_mm, *operands(E4M3, E4M3), like[0], E4M3, True, "gelu", like, like, torch.empty(1),
        with_amax=True, config=TOKENS_16, split=4,
    ))  # fmt: skip
    for label, config, fast in (MODES[0], MODES[2], *MODES[4:]):
        add(label, *specs_of(
            label, launch_scaled_grouped_mm, *operands(E4M3, E4M3, 8), torch.empty(8, dtype=torch.int32),
            torch.bfloat16, fast, config=config,
        ))  # fmt: skip
    for label, config in (("16 tokens", TOKENS_16), ("64 tokens", TOKENS_64), ("square", SQUARE)):
        a, b = operands(E4M3, E4M3)[:2]
        columns = torch.empty(K // 128, M).T
        for kind, scale_b in (("", torch.empty(N // 128, K // 128)), (", rows", torch.empty(K // 128, N).T)):
            add(label, *specs_of(
                label + kind, launch_block_scaled_mm, a, b, columns, scale_b, like[0], torch.bfloat16, config=config,
            ))  # fmt: skip
    return dict(specs)


GEMMS = gemm_specs()


def transposing_specs() -> dict[str, KernelSpec]:
    """Quantize and transpose, from and to whatever a recipe casts."""
    casts = [(torch.bfloat16, E4M3), (torch.float16, E4M3), (torch.float32, E5M2), (E4M3, E4M3), (E5M2, E5M2)]
    specs = []
    for source, dtype in casts:
        label = f"{str(source).removeprefix('torch.')} to {TRITON_TYPE[dtype]}"
        inputs = torch.empty(M, N, dtype=source), torch.empty(M, 1)
        specs += specs_of(label, launch_quantize_transposed, *inputs, dtype, (16, 16))
    return {spec.name: spec for spec in specs}


TRANSPOSING = transposing_specs()


def block_cast_specs() -> dict[str, KernelSpec]:
    """Quantize with scales for blocks: each layout alone and both, of activations and of weights."""
    specs = []
    for source in (torch.bfloat16, torch.float32):
        for square in (False, True):
            for layouts in (((1, 16), None), (None, (16, 16)), ((1, 16), (16, 16))):
                kind = "both" if all(layouts) else "as it is" if layouts[0] else "transposed"
                label = f"{str(source).removeprefix('torch.')}, {'128x128' if square else '1x128'}, {kind}"
                specs += specs_of(
                    label, launch_quantize_block, torch.empty(M, N, dtype=source), E4M3, False, square, *layouts
                )
    return {spec.name: spec for spec in specs}


BLOCK_CASTS = block_cast_specs()


@pytest.fixture(scope="module")
def gemms() -> dict[str, MachineCode]:
    codes = compile_kernels(list(GEMMS.values()), processes=2)
    return dict(zip(GEMMS, codes, strict=True))


@pytest.fixture(scope="module")
def transposing() -> dict[str, MachineCode]:
    return dict(zip(TRANSPOSING, compile_kernels(list(TRANSPOSING.values()), processes=2), strict=True))


@pytest.fixture(scope="module")
def block_casts() -> dict[str, MachineCode]:
    return dict(zip(BLOCK_CASTS, compile_kernels(list(BLOCK_CASTS.values()), processes=2), strict=True))


def threads(spec: KernelSpec) -> int:
    return 32 * int(spec.options["num_warps"])


@pytest.mark.parametrize("name", GEMMS)
def test_nothing_spills_and_shared_memory_suffices(gemms: dict[str, MachineCode], name: str) -> None:
    code = gemms[name]
    assert code.spills == code.instructions("LDL") == code.instructions("STL") == 0
    assert code.shared_bytes <= CHIPS["h100"].shared_memory
    assert code.registers * threads(GEMMS[name]) <= 65536


@pytest.mark.parametrize("name", [name for name in GEMMS if not name.startswith("sum_splits")])
def test_gemm_runs_on_fp8_tensor_cores_fed_by_tma(gemms: dict[str, MachineCode], name: str) -> None:
    code = gemms[name]
    assert set(code.tensor_core) == {"QGMMA"}
    assert code.tma["UTMALDG"] >= 2
    assert code.conversions_to_fp16 == 0
    kinds = {"fp8e4nv": "E4M3", "fp8e5": "E5M2"}
    a, b = (kinds[re.findall(r"fp8\w+", GEMMS[name].signature[operand])[0]] for operand in "ab")
    first, second = (b, a) if GEMMS[name].constexprs["SWAPPED"] else (a, b)
    assert set(re.findall(r"QGMMA\.\w+\.F32\.(\w+\.\w+)", code.sass)) == {f"{first}.{second}"}


@pytest.mark.parametrize("name", [name for name in GEMMS if "plain" in name])
def test_promotion_adds_each_block_in_float32_exactly_when_accurate(gemms: dict[str, MachineCode], name: str) -> None:
    """One addition for each element that a thread holds; and the plain epilogue adds nothing."""
    spec = GEMMS[name]
    elements = spec.constexprs["BLOCK_M"] * spec.constexprs["BLOCK_N"] // threads(spec)
    assert gemms[name].instructions("FADD") == (0 if spec.constexprs["FAST"] else elements)


@pytest.mark.parametrize("name", [name for name in GEMMS if "plain" in name])
def test_result_is_stored_128_bits_at_a_time(gemms: dict[str, MachineCode], name: str) -> None:
    spec = GEMMS[name]
    elements = spec.constexprs["BLOCK_M"] * spec.constexprs["BLOCK_N"] // threads(spec)
    assert gemms[name].vector_stores >= elements // 8
    assert gemms[name].instructions(r"STG\.E(?!.*\.128)") == 0


def test_one_stage_multiplies_as_four_do() -> None:
    """Pipelining moves loads, not products: the same tensor core instructions, and nothing spilled."""
    one, four = (
        compile_kernel(spec)
        for stages in (1, 4)
        for spec in specs_of(
            f"{stages} stages", launch_scaled_mm, *operands(E4M3, E4M3), None, torch.bfloat16, True,
            config=dataclasses.replace(SQUARE, num_stages=stages), split=1,
        )
    )  # fmt: skip
    assert one.tensor_core == four.tensor_core
    assert one.tensor_core["QGMMA"]
    assert one.spills == four.spills == 0
    assert one.shared_bytes < four.shared_bytes


def test_no_kernel_is_warp_specialized() -> None:
    """Triton has compiled such kernels to wrong code: one that is must be compared with itself without it."""
    sources = [path.read_text() for path in (Path(fp8compile.__path__[0]) / "kernels").glob("*.py")]
    assert len(sources) > 8
    assert not any("warp_specialize" in source for source in sources)


def test_modes_cover_the_configurations() -> None:
    """A rule without a mode is for both."""
    chosen = {(rule.config, fast) for rule in RULES for fast in (False, True) if rule.fast in (None, fast)}
    assert chosen == {(config, fast) for _, config, fast in MODES}


# --- Our casts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRANSPOSING)
def test_transposing_spills_nothing_and_moves_128_bits_at_a_time(
    transposing: dict[str, MachineCode], name: str
) -> None:
    """Every element is read and written in vectors of 16 bytes. FP8 data have a scale for each row besides, and so at
    most one for each vector; the one scale of the result is a store by itself."""
    code, spec = transposing[name], TRANSPOSING[name]
    assert code.spills == code.instructions("LDL") == code.instructions("STL") == 0
    assert code.shared_bytes <= CHIPS["h100"].shared_memory
    elements = spec.constexprs["BLOCK_ROWS"] * spec.constexprs["BLOCK_COLUMNS"] // threads(spec)
    width = {"*fp32": 4, "*bf16": 2, "*fp16": 2}.get(spec.signature["x"], 1)
    assert code.vector_loads >= elements * width // 16
    assert code.instructions(r"LDG\.E(?!.*\.128)") <= (elements // 16 if width == 1 else 0)
    assert code.vector_stores == elements // 16
    assert code.instructions(r"STG\.E(?!.*\.128)") == 1


@pytest.mark.parametrize("name", TRANSPOSING)
def test_transposing_divides_exactly_and_keeps_subnormals(transposing: dict[str, MachineCode], name: str) -> None:
    """Instructions that flush subnormals or divide approximately say so: values of 1e-42 have a cast like others."""
    assert "div.rn.f32" in transposing[name].ptx
    assert not re.search(r"\.ftz\b|\.approx\b|div\.full", transposing[name].ptx)
    assert "F2FP.SATFINITE" in transposing[name].sass


@pytest.mark.parametrize("name", BLOCK_CASTS)
def test_block_cast_reads_once_and_moves_128_bits_at_a_time(block_casts: dict[str, MachineCode], name: str) -> None:
    """Every element is loaded once, in vectors of 16 bytes, and stored once for each layout; nothing spills."""
    code, spec = block_casts[name], BLOCK_CASTS[name]
    assert code.spills == code.instructions("LDL") == code.instructions("STL") == 0
    assert code.shared_bytes <= CHIPS["h100"].shared_memory
    elements = spec.constexprs["BLOCK"] ** 2 // threads(spec)
    assert code.vector_loads == elements * {"*fp32": 4, "*bf16": 2}[spec.signature["x"]] // 16
    assert code.instructions(r"LDG\.E(?!.*\.128)") == 0
    layouts = sum(name in spec.signature for name in ("data", "transposed"))
    assert code.vector_stores == layouts * elements // 16
    assert "div.rn.f32" in code.ptx
    assert not re.search(r"\.ftz\b|\.approx\b|div\.full", code.ptx)
