"""What lies between a compiled step and the GPU: launches as Inductor makes its own, nothing that waits for the device,
nothing that a CUDA graph cannot record.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from torch._inductor.cudagraph_utils import check_lowering_disable_cudagraph
from torch._inductor.utils import get_first_incompatible_cudagraph_node

from fp8compile.options import Options
from fp8compile.preview.lowering import LoweredGraph
from fp8compile.preview.result import lower_program

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from blocks import Shape, build

LAUNCHES = (
    r"\w+\.run",  # a Triton kernel: by Inductor's own launcher
    r"extern_kernels\.\w+|aten\.\w+\.\w+|torch\.ops\.aten\.\w+\.\w+",  # the library's
)
AROUND = (
    r"empty_strided_cuda|reinterpret_tensor|get_raw_stream|alloc_from_pool|copy_if_misaligned",
    r"assert_size_stride(_grouped)?|assert_alignment|assert_tensor_metadata",
    r"torch\.cuda\.(_DeviceGuard|set_device)|args\.clear|buf\d+\.fill_|_mrts_\d+",
    r"(triton\.tools\.tensor_descriptor\.)?TensorDescriptor\.from_tensor",  # by the host: no launch, no memory
)
ALLOWED = re.compile("|".join(LAUNCHES + AROUND))
"""Everything that a wrapper of Inductor's calls on its way through a step."""

BLOCKS = {"llama": Shape(256, 2, 512, 128, kv_heads=1), "gpt": Shape(256, 2, 512, 128)}


class Experts(nn.Module):
    """A grouped matmul whose groups are known on the device only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 256, 512))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=ends)


def graphs_of(model: nn.Module, *inputs: Any, **options: Any) -> list[LoweredGraph]:
    given = {"target": "h100", "policy": "all", **options}
    return list(lower_program(model, inputs, {}, Options.parse(given))[0].graphs)


def calls(source: str) -> set[str]:
    """What ``call`` of a wrapper calls, as it is written."""
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == "call"
    ]
    assert len(functions) == 1
    return {ast.unparse(node.func) for node in ast.walk(functions[0]) if isinstance(node, ast.Call)}


def model_and_inputs(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    with torch.device("meta"):
        if name in BLOCKS:
            return build(BLOCKS[name])
        if name == "experts":
            x = torch.empty(512, 256, dtype=torch.bfloat16).requires_grad_()
            return Experts().bfloat16(), (x, torch.empty(4, dtype=torch.int32))
        # in float32: with rowwise scales the library writes bfloat16 only
        return nn.Linear(2048, 250).requires_grad_(False), (torch.empty(16, 2048),)


OURS = {
    ("llama", "rowwise_once"): {"quantize_transposed_kernel", "scaled_mm_kernel"},
    ("llama", "tensorwise"): set(),
    ("gpt", "rowwise"): set(),
    ("gpt", "block"): {"quantize_block_kernel", "block_scaled_mm_kernel"},
    ("experts", "rowwise_once"): {"scaled_grouped_mm_kernel"},
    ("few tokens", "rowwise_once"): {"scaled_mm_kernel", "sum_splits_kernel"},
}
"""Models and recipes, and which of our kernels their steps launch; the rest is Inductor's and the library's."""


@pytest.mark.parametrize(("name", "recipe"), OURS)
def test_a_step_is_launches_and_nothing_else(name: str, recipe: str) -> None:
    model, inputs = model_and_inputs(name)
    graphs = graphs_of(model, *inputs, recipe=recipe)
    assert graphs
    launched = set()
    for graph in graphs:
        called = calls(graph.source)
        foreign = {call for call in called if not ALLOWED.fullmatch(call)}
        assert not foreign, f"{graph.phase}: {foreign}"
        launched |= {call.removesuffix(".run").rstrip("_0123456789") for call in called if call.endswith(".run")}
        assert get_first_incompatible_cudagraph_node(graph.graph.module) is None
        assert check_lowering_disable_cudagraph(graph.graph.device_node_mapping) is None
        assert graph.graph.disable_cudagraphs_reason is None
        assert not graph.mutated
    assert {kernel for kernel in launched if kernel.endswith("_kernel")} == OURS[name, recipe]


@pytest.mark.parametrize(
    "line", ["buf0.item()", "torch.ops.fp8compile.scaled_mm.default(buf0)", "torch.cuda.synchronize()"]
)
def test_what_is_no_launch_is_noticed(line: str) -> None:
    (call,) = calls(f"def call(self, args):\n    x = {line}")
    assert not ALLOWED.fullmatch(call)


def test_reduce_overhead_asks_inductor_for_cuda_graphs() -> None:
    patches = Options.parse({"mode": "reduce-overhead"}).config_patches()
    assert patches["triton.cudagraphs"] is True
    assert graphs_of(nn.Linear(256, 256).bfloat16(), torch.empty(64, 256).bfloat16(), mode="reduce-overhead")
