"""Machine code of Triton kernels for a GPU that is not here: compile ahead of time, disassemble, count.

The compiler may abort its process (MLIR and ptxas do), so it runs in another one:
``python -m fp8compile.preview.machine_code <file>`` reads a JSON list of kernels and prints one JSON line for each.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HOPPER = 90
"""Compute capability 9.0."""
_SHOWN_LINES = 12


class CompileError(RuntimeError):
    """A kernel did not compile; the message names it and ends with the compiler's last lines."""


@dataclass(frozen=True)
class KernelSpec:
    """A kernel and what it is specialized on.

    Args:
        source: a dotted module name, or the path of a ``.py`` file.
        kernel: the name of a ``@triton.jit`` function in it, decorated by Inductor or not.
        signature: type of every argument that is not a constexpr, in Triton's words: ``"*bf16"``, ``"i32"``,
            ``"tensordesc<fp8e4nv[128, 128]>"``.
        constexprs: values of the other arguments: numbers, strings, None, Triton dtypes as ``"tl.bfloat16"``.
        divisible: names of the arguments, pointers and integers, that are multiples of 16.
        options: ``num_warps``, ``num_stages`` and the like.
        label: what errors and results call it; the kernel's name if empty.
    """

    source: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    divisible: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.kernel


@dataclass(frozen=True)
class MachineCode:
    """What a compiled kernel consists of.

    Attributes:
        name: of the kernel.
        registers: per thread. spills: bytes of local memory per thread, 0 if nothing spills.
        shared_bytes: of shared memory per block.
        tensor_core: how often each tensor core instruction appears (``QGMMA``: FP8, ``HGMMA``: 16 bits, ``HMMA``...).
        tma: the same for TMA (``UTMALDG``: loads, ``UTMASTG``: stores, ``UTMAREDG``: reductions).
        conversions_to_fp16: FP8 values that are widened to fp16, as a GEMM without FP8 tensor cores does.
        vector_loads, vector_stores: accesses of 128 bits to global memory.
        ptx, sass: the text.
    """

    name: str
    registers: int
    spills: int
    shared_bytes: int
    tensor_core: Counter[str]
    tma: Counter[str]
    conversions_to_fp16: int
    vector_loads: int
    vector_stores: int
    ptx: str = field(repr=False)
    sass: str = field(repr=False)

    def instructions(self, pattern: str) -> int:
        """How many SASS instructions match a regular expression from their mnemonic on, e.g. ``r"LDG\\.E\\.128"``."""
        return sum(bool(re.match(pattern, mnemonic)) for mnemonic in _mnemonics(self.sass))


def compile_kernel(spec: KernelSpec, *, timeout: float = 600) -> MachineCode:
    """Compile one kernel for Hopper; needs no GPU.

    Raises:
        CompileError: if it does not compile.
    """
    return compile_kernels([spec], timeout=timeout)[0]


def compile_kernels(specs: Sequence[KernelSpec], *, processes: int = 1, timeout: float = 600) -> list[MachineCode]:
    """Compile kernels for Hopper, in the order given; needs no GPU.

    Args:
        specs: the kernels. processes: how many compile at a time; each starts once and takes its share of kernels.
        timeout: seconds for one kernel.

    Raises:
        CompileError: for the first kernel that does not compile.
    """
    shares = [range(first, len(specs), processes) for first in range(min(processes, len(specs)))]
    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        done = pool.map(lambda share: _compile_in_subprocess([specs[i] for i in share], timeout), shares)
        found = {
            i: code for share, codes in zip(shares, done, strict=True) for i, code in zip(share, codes, strict=True)
        }
    return [found[i] for i in range(len(specs))]


def _compile_in_subprocess(specs: Sequence[KernelSpec], timeout: float) -> list[MachineCode]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        file.write_text(json.dumps([asdict(spec) for spec in specs]))
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "fp8compile.preview.machine_code", str(file)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout * len(specs))
            out, err, end = run.stdout, run.stderr, f"exit status {run.returncode}"
        except subprocess.TimeoutExpired as error:
            out, err = (bytes(stream or b"").decode(errors="replace") for stream in (error.stdout, error.stderr))
            end = f"no result after {timeout * len(specs):.0f} s"
    codes = [_decode(json.loads(line)) for line in out.splitlines() if line.startswith('{"name"')]
    if len(codes) < len(specs):
        last = "\n".join(line for line in err.splitlines() if line.strip() and set(line) != {"="})
        tail = "\n  ".join(last.splitlines()[-_SHOWN_LINES:])
        raise CompileError(f"kernel {specs[len(codes)].name!r} did not compile ({end}):\n  {tail}")
    return codes


def _decode(fields: dict[str, Any]) -> MachineCode:
    return MachineCode(**{**fields, "tensor_core": Counter(fields["tensor_core"]), "tma": Counter(fields["tma"])})


# --- What runs in the subprocess --------------------------------------------------------------------------------------


def _load_kernel(source: str, kernel: str) -> Any:
    """The jit function, out of whatever it is decorated with."""
    if source.endswith(".py"):
        if "set_driver_to_gpu" in Path(source).read_text():  # Inductor's kernels look for a GPU while they are loaded
            from torch._inductor.runtime import triton_helpers

            triton_helpers.set_driver_to_gpu = lambda: None
        module_spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        if module_spec is None or module_spec.loader is None:
            raise ImportError(f"{source} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module
        module_spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    from triton.runtime.jit import JITFunction

    found = getattr(module, kernel)
    while not isinstance(found, JITFunction):
        found = found.fn
    return found


def _constexpr(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language as tl

        return getattr(tl, value.removeprefix("tl."))
    return value


def _compile(spec: KernelSpec) -> MachineCode:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _load_kernel(spec.source, spec.kernel)
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    constexprs = {name: _constexpr(value) for name, value in spec.constexprs.items()}
    signature = {name: "constexpr" if name in constexprs else spec.signature[name] for name in places}
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(places[name],): value for name, value in constexprs.items()},
            attrs={(places[name],): [["tt.divisibility", 16]] for name in spec.divisible},
        ),
        target=GPUTarget("cuda", HOPPER, 32),
        options=dict(spec.options),
    )
    return read_machine_code(spec.name, compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared)


def read_machine_code(name: str, cubin: bytes, ptx: str, shared_bytes: int) -> MachineCode:
    """Disassemble a compiled kernel with the tools that ship with Triton, and count.

    Args:
        name: for the result. cubin, ptx: as in a compiled kernel's ``asm``.
        shared_bytes: of dynamic shared memory, from its metadata.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage = _cuobjdump("-res-usage", file)
        sass = _cuobjdump("-sass", file)
    mnemonics = _mnemonics(sass)
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return MachineCode(
        name=name,
        registers=used["REG"],
        spills=used["STACK"] + used["LOCAL"],
        shared_bytes=shared_bytes,
        tensor_core=Counter(m.split(".")[0] for m in mnemonics if re.match(r"[A-Z]*(GMMA|MMA)\b", m)),
        tma=Counter(m.split(".")[0] for m in mnemonics if re.match(r"UTMA(LDG|STG|REDG)\b", m)),
        conversions_to_fp16=len(re.findall(r"\bcvt\.rn\.f16x2\.e[45]m[32]x2\b", ptx)),
        vector_loads=sum(bool(re.match(r"LDG\.E\.(.*\.)?128\b", m)) for m in mnemonics),
        vector_stores=sum(bool(re.match(r"STG\.E\.(.*\.)?128\b", m)) for m in mnemonics),
        ptx=ptx,
        sass=sass,
    )


def _cuobjdump(flag: str, file: Path) -> str:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    run = subprocess.run([str(tools / "cuobjdump"), flag, str(file)], capture_output=True, text=True, env=environment)
    if run.returncode:
        raise CompileError(f"cuobjdump {flag} failed: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout


def _mnemonics(sass: str) -> list[str]:
    """``QGMMA.64x256x32.F32.E4M3.E4M3`` and so on, one for each instruction, without predicates and operands."""
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)


def main(file: str) -> None:
    """Compile the kernels of a JSON file; print one JSON line for each as soon as it is done."""
    for fields in json.loads(Path(file).read_text()):
        print(json.dumps(vars(_compile(KernelSpec(**fields)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
