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
from fp8compile.recipe import RECIPES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from blocks import Shape, build  # noqa: E402

LAUNCHES = (
    r"\w+\.run",  # a Triton kernel: by Inductor's own launcher
    r"extern_kernels\.\w+|aten\.\w+\.\w+|torch\.ops\.aten\.\w+\.\w+",  # the library's
)
AROUND = (
    r"empty_strided_cuda|reinterpret_tensor|get_raw_stream|assert_size_stride(_grouped)?|alloc_from_pool",
    r"torch\.cuda\.(_DeviceGuard|set_device)|args\.clear|buf\d+\.fill_|_mrts_\d+",
    r"(triton\.tools\.tensor_descriptor\.)?TensorDescriptor\.from_tensor",  # by the host: no launch, no memory
)
ALLOWED = re.compile("|".join(LAUNCHES + AROUND))
"""Everything that a wrapper of Inductor's calls on its way through a step."""

TRANSFORMER = Shape(256, 2, 512, 128, kv_heads=1)


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


def blocks_of_every_kind() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    with torch.device("meta"):
        x = torch.empty(512, 256, dtype=torch.bfloat16).requires_grad_()
        ends = torch.empty(4, dtype=torch.int32)
        return {
            "llama": build(TRANSFORMER),
            "gpt": build(Shape(256, 2, 512, 128)),
            "experts": (Experts().bfloat16(), (x, ends)),
            "16 tokens": (nn.Linear(2048, 256).bfloat16(), (torch.empty(16, 2048, dtype=torch.bfloat16),)),
        }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", blocks_of_every_kind())
def test_a_step_is_launches_and_nothing_else(name: str, recipe: str) -> None:
    model, inputs = blocks_of_every_kind()[name]
    graphs = graphs_of(model, *inputs, recipe=recipe)
    assert graphs
    for graph in graphs:
        foreign = {call for call in calls(graph.source) if not ALLOWED.fullmatch(call)}
        assert not foreign, f"{graph.phase}: {foreign}"
        assert get_first_incompatible_cudagraph_node(graph.graph.module) is None
        assert check_lowering_disable_cudagraph(graph.graph.device_node_mapping) is None
        assert graph.graph.disable_cudagraphs_reason is None
        assert not graph.mutated


def test_our_kernels_are_among_the_launches() -> None:
    """What the law above is about: each of our kernels is in some step, and is launched by ``run``."""
    launched: set[str] = set()
    for recipe in RECIPES:
        for model, inputs in blocks_of_every_kind().values():
            for graph in graphs_of(model, *inputs, recipe=recipe):
                launched |= {call.removesuffix(".run").rstrip("_0123456789") for call in calls(graph.source)}
    ours = {name for name in launched if name.endswith("_kernel")}
    assert ours == {
        "scaled_mm_kernel",
        "sum_splits_kernel",
        "block_scaled_mm_kernel",
        "quantize_transposed_kernel",
        "quantize_block_kernel",
    }


def test_what_waits_for_the_device_is_noticed() -> None:
    """The law above, broken: a step that asks for a value."""

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cpu() + 1

    (graph,) = graphs_of(Asks(), torch.empty(8, 8, device="meta"))
    assert any(not ALLOWED.fullmatch(call) for call in calls(graph.source)) or check_lowering_disable_cudagraph(
        graph.graph.device_node_mapping
    )


def test_reduce_overhead_asks_inductor_for_cuda_graphs() -> None:
    patches = Options.parse({"mode": "reduce-overhead"}).config_patches()
    assert patches["triton.cudagraphs"] is True
    assert graphs_of(nn.Linear(256, 256).bfloat16(), torch.empty(64, 256).bfloat16(), mode="reduce-overhead")
