"""Chips as data, the rules their FP8 GEMMs impose, and a roofline model of what things cost on them.

Rates are NVIDIA's published dense peaks; the fractions of them that real kernels reach are what others measured on
Hopper (DESIGN.md, section 6).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fp8compile.recipe import E5M2, LARGEST


@dataclass(frozen=True)
class Chip:
    """A GPU.

    Attributes:
        name: as in ``options={"target": name}``.
        capability: CUDA compute capability.
        high_flops, fp8_flops: dense peak of bf16 and of FP8, FLOP/s; ``fp8_flops`` is 0 without FP8 tensor cores.
        bandwidth: of HBM, bytes/s. memory: bytes of HBM.
        high_efficiency, fp8_efficiency, memory_efficiency: the fraction of each peak that good kernels reach.
        block_efficiency: the fraction of the FP8 peak that GEMMs with a scale for each block reach in Triton.
        launch: seconds that a kernel costs before it does anything.
        alignment: the contraction (K) and the columns (N) of an FP8 GEMM must be multiples of this many elements.
        multiprocessors: streaming multiprocessors. shared_memory: bytes of it that one block can use.
        l2_cache: bytes.
    """

    name: str
    capability: tuple[int, int]
    high_flops: float
    fp8_flops: float
    bandwidth: float
    memory: float
    high_efficiency: float = 0.68
    fp8_efficiency: float = 0.65
    block_efficiency: float = 0.30
    memory_efficiency: float = 0.85
    launch: float = 2e-6
    alignment: int = 16
    multiprocessors: int = 132
    shared_memory: int = 232448
    l2_cache: int = 50 << 20

    @property
    def has_fp8(self) -> bool:
        return self.fp8_flops > 0

    def refuses(self, first: torch.dtype, second: torch.dtype) -> str | None:
        """Why an FP8 GEMM of these operand dtypes cannot run here, or None if it can."""
        if not self.has_fp8:
            return f"{self.name} has no FP8 tensor cores"
        if first not in LARGEST or second not in LARGEST:
            return f"{first} × {second} is not an FP8 GEMM"
        if first == E5M2 and second == E5M2:
            return f"{self.name} does not multiply E5M2 by E5M2"
        return None

    def rate(self, *, fp8: bool, blocks: bool = False) -> float:
        """FLOP/s that a good GEMM reaches; ``blocks``: with a scale for each block."""
        if not fp8:
            return self.high_flops * self.high_efficiency
        return self.fp8_flops * (self.block_efficiency if blocks else self.fp8_efficiency)

    def matmul_seconds(
        self, batch: int, m: int, n: int, k: int, *, fp8: bool, blocks: bool = False, out_bytes: int = 2
    ) -> float:
        """Roofline time of one GEMM: the longer of its arithmetic and its reads and writes, plus a launch."""
        width = 1 if fp8 else 2
        rate = self.rate(fp8=fp8, blocks=blocks)
        moved = batch * (width * (m * k + n * k) + out_bytes * m * n)
        if not rate:
            return float("inf")
        return max(2 * batch * m * n * k / rate, moved / (self.bandwidth * self.memory_efficiency)) + self.launch

    def memory_seconds(self, moved: float, launches: int = 1) -> float:
        """Time of ``launches`` kernels that read and write ``moved`` bytes between them."""
        return moved / (self.bandwidth * self.memory_efficiency) + launches * self.launch


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("a100", (8, 0), 312e12, 0, 2.04e12, 80e9, multiprocessors=108, shared_memory=166912, l2_cache=40 << 20),
        Chip("h100", (9, 0), 989e12, 1979e12, 3.35e12, 80e9),
        Chip("h200", (9, 0), 989e12, 1979e12, 4.8e12, 141e9),
        Chip("b200", (10, 0), 2250e12, 4500e12, 8.0e12, 180e9, multiprocessors=148, l2_cache=126 << 20),
    )
}
DEFAULT_TARGET = "h100"

FP8_GEMM_EFFICIENCY = {"library": 1278 / 1979, "ours": 1347 / 1979}
"""The fraction of the FP8 peak that GEMMs reach on Hopper, of 1979 TFLOP/s: cuBLASLt 1278, Triton with tensor
descriptors 1347, both as others measured them (DESIGN.md, section 6); ours has not been measured yet."""


def get_chip(target: str | None = None) -> Chip:
    """The chip that graphs are compiled for: ``target``, else the GPU present, else an H100.

    Raises:
        ValueError: for a name that is not in :data:`CHIPS`.
    """
    if target is None:
        return _present_chip() or CHIPS[DEFAULT_TARGET]
    if target.lower() not in CHIPS:
        raise ValueError(f"target {target!r} is unknown; there are {', '.join(CHIPS)}")
    return CHIPS[target.lower()]


@functools.cache
def _present_chip() -> Chip | None:
    if not torch.cuda.is_available():
        return None
    name, capability = torch.cuda.get_device_name().lower(), torch.cuda.get_device_capability()
    by_name = [chip for chip in CHIPS.values() if chip.name in name]
    by_capability = [chip for chip in CHIPS.values() if chip.capability <= capability]
    return (by_name or by_capability[-1:] or [CHIPS["a100"]])[0]
