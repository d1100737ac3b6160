"""Tile sizes of the GEMM kernels as data, and the rules that choose among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8compile.hardware import CHIPS

PROGRAMS = CHIPS["h100"].multiprocessors
"""Programs of a persistent kernel: one for each multiprocessor of an H100 or H200."""
LARGEST_SPLIT = 16


@dataclass(frozen=True)
class TileConfig:
    """How a GEMM is cut into tiles.

    Attributes:
        block_m, block_n, block_k: of the tile of ``out``, and how much of K is read at a time.
        num_warps, num_stages: as in Triton.
        swapped: compute the transpose of each tile. wgmma wants 64 rows, so tiles of fewer tokens are computed so.
        group_m: rows of tiles in a band; see :func:`fp8compile.kernels.epilogue.tile_position`.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool = False
    group_m: int = 8

    @property
    def epilogue_columns(self) -> int:
        """Columns that the epilogue works on at a time: 16 elements for each thread, so that it does not spill."""
        return min(self.block_n, 16 * 32 * self.num_warps // self.block_m)

    @property
    def constexprs(self) -> dict[str, Any]:
        """What a GEMM kernel wants to know."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "SWAPPED": self.swapped,
            "COLUMNS": self.epilogue_columns,
        }

    def tiles(self, batch: Any, m: Any, n: Any) -> Any:
        """Tiles of ``batch`` outputs of ``[m, n]``; works on ``int`` and ``SymInt``."""
        return batch * ceil_div(m, self.block_m) * ceil_div(n, self.block_n)


TOKENS_16 = TileConfig(16, 128, 128, num_warps=4, num_stages=4, swapped=True)
TOKENS_64 = TileConfig(64, 128, 128, num_warps=4, num_stages=4, swapped=True)
SQUARE = TileConfig(128, 128, 128, num_warps=8, num_stages=4)
WIDE = TileConfig(128, 256, 128, num_warps=8, num_stages=3)
"""Not for accurate sums: adding each block of K to them takes twice the registers."""
SUM_SPLITS = TileConfig(16, 128, 1, num_warps=4, num_stages=1)
"""Tiles of the kernel that sums the slices of a split K."""


@dataclass(frozen=True)
class Rule:
    """``config`` is for GEMMs of at most ``largest_m`` rows, ``fast`` or not, that fill ``least_programs`` with tiles;
    None and 0 stand for any."""

    config: TileConfig
    largest_m: int | None = None
    fast: bool | None = None
    least_programs: int = 0


RULES: tuple[Rule, ...] = (
    Rule(TOKENS_16, largest_m=16),
    Rule(TOKENS_64, largest_m=64),
    Rule(WIDE, fast=True, least_programs=PROGRAMS),
    Rule(SQUARE),
)
"""The first that fits is taken."""


def choose_config(batch: int, m: int, n: int, fast: bool) -> TileConfig:
    """The tiles of a GEMM of ``batch`` times ``[m, n]``."""
    for rule in RULES:
        if (
            (rule.largest_m is None or m <= rule.largest_m)
            and rule.fast in (None, fast)
            and rule.config.tiles(batch, m, n) >= rule.least_programs
        ):
            return rule.config
    raise AssertionError("the last rule fits all")


def choose_split(tiles: int, k_blocks: int) -> int:
    """Into how many slices K is cut: enough to occupy the GPU, none of them empty, none shorter than four blocks."""
    split = 1
    while 2 * split <= min(PROGRAMS // max(tiles, 1), k_blocks // 4, LARGEST_SPLIT):
        split *= 2
    return ceil_div(k_blocks, ceil_div(k_blocks, split))


def ceil_div(size: Any, block: int) -> Any:
    """``size / block`` rounded up; works on ``int`` and ``SymInt``."""
    return (size + block - 1) // block


def hint(size: Any) -> int:
    """The size seen when a dynamic shape was traced. Choosing by it adds no guard: the choice changes speed only."""
    if isinstance(size, int):
        return size
    seen = size.node.hint
    return 4096 if seen is None else int(seen)
