"""Lower: our operators become what Inductor fuses on a CPU and cuBLASLt's and CUTLASS's scaled matmuls on a GPU.

The GPU's lowering is made on meta tensors, which stand for any device that is not a CPU, and then run on CPU tensors.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from models import compile_fp8, fp8_nodes, mlp, normal
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

import fp8compile as fp8
from fp8compile import Policy
from fp8compile.hardware import CHIPS
from fp8compile.ops import COMPUTE_SCALE, QUANTIZE, QUANTIZE_TRANSPOSED, SCALED_GROUPED_MM, SCALED_MM
from fp8compile.passes import PassContext, PassRecord
from fp8compile.passes.lower import LOWERINGS, lower
from fp8compile.recipe import E4M3, E5M2, RECIPES

aten = torch.ops.aten


def graph_of(target: Any, *args: Any, device: str) -> Graph:
    """A graph of one call; tensors become placeholders on ``device``."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    graph, nodes, values = Graph(), [], []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            nodes.append(graph.placeholder(f"x{len(nodes)}"))
            with mode:
                values.append(torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device))
            nodes[-1].meta["val"] = values[-1]
        else:
            nodes.append(arg)
            values.append(arg)
    call = graph.call_function(target, tuple(nodes))
    with mode:
        call.meta["val"] = target(*values)
    call.meta["partitioner_tag"] = "is_forward"
    graph.output(call)
    return graph


def lowered(target: Any, *args: Any, device: str = "cpu") -> Graph:
    graph = graph_of(target, *args, device=device)
    (old,) = [node for node in graph.nodes if node.op == "call_function"]
    before = old.meta["val"]
    lower(graph, PassContext(Policy.all(), RECIPES["rowwise"], CHIPS["h100"], ()), PassRecord("lower"))
    (result,) = graph.output_node().args
    after = result.meta["val"]
    assert (after.shape, after.dtype, after.device) == (before.shape, before.dtype, before.device)
    assert after.stride() == before.stride()
    assert result.meta["partitioner_tag"] == "is_forward"
    return graph


class OnCPU(torch.fx.Interpreter):
    """Runs a graph that was lowered for a GPU. Torch's CPU kernel of ``_scaled_mm`` takes rowwise scales in recent
    releases only, so its definition stands in."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten._scaled_mm.default:
            a, b, scale_a, scale_b, bias, _, out_dtype, _ = args
            out = a.float() @ b.float() * scale_a * scale_b
            return (out if bias is None else out + bias.float()).to(out_dtype)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return super().call_function(target, args, kwargs)


def run_on_cpu(graph: Graph, *args: Any) -> torch.Tensor:
    interpreter = OnCPU(GraphModule(torch.nn.Module(), graph))
    return interpreter.run(*[arg for arg in args if isinstance(arg, torch.Tensor)])


def targets(graph: Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def operands(rows: tuple[bool, bool], bias: torch.dtype | None = None, m: int = 48, n: int = 32, k: int = 64):
    """FP8 operands of ``scaled_mm``, with a scale per row where told, and a bias."""
    data, scales = [], []
    for size, rowwise in zip((m, n), rows, strict=True):
        x = torch.randn(size, k)
        scale = COMPUTE_SCALE(x, [1] if rowwise else [0, 1], E4M3, False)
        data.append(QUANTIZE(x, scale, E4M3, False, [1, 1]))
        scales.append(scale)
    return (*data, *scales, None if bias is None else torch.randn(n).to(bias))


CASTS = [
    (COMPUTE_SCALE, (torch.randn(7, 9), [0, 1], E4M3, False)),
    (COMPUTE_SCALE, (torch.randn(2, 7, 9), [-1], E5M2, True)),
    (QUANTIZE, (torch.randn(7, 9), torch.rand(7, 1), E4M3, False, [1, 1])),
    (QUANTIZE, (torch.randn(2, 7, 9), torch.rand(1, 1, 1), E5M2, True, [16, 16])),
    (QUANTIZE, (torch.randn(9, 7).t(), torch.rand(1, 9), E4M3, True, [1, 16])),
]


def test_every_operator_has_a_lowering() -> None:
    """All that the package registers; a new operator without one would reach Inductor as an opaque call."""
    ours = {getattr(torch.ops.fp8compile, name).default for name in dir(torch.ops.fp8compile) if _is_operator(name)}
    assert {COMPUTE_SCALE, QUANTIZE, QUANTIZE_TRANSPOSED, SCALED_MM, SCALED_GROUPED_MM} <= ours
    assert set(LOWERINGS) == ours


def _is_operator(name: str) -> bool:
    return isinstance(getattr(torch.ops.fp8compile, name, None), torch._ops.OpOverloadPacket)


@pytest.mark.parametrize(("target", "args"), CASTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_casts_become_aten_and_give_the_same_bytes(target: Any, args: tuple[Any, ...], device: str) -> None:
    graph = lowered(target, *args, device=device)
    assert not fp8_nodes(graph)
    got, expected = run_on_cpu(graph, *args), target(*args)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("bias", [None, torch.float32])
def test_matmul_on_cpu_becomes_a_float32_matmul(bias: torch.dtype | None) -> None:
    args = (*operands((True, False), bias), torch.bfloat16, True)
    graph = lowered(SCALED_MM, *args)
    assert not fp8_nodes(graph)
    assert aten.mm.default in targets(graph)
    assert torch.equal(run_on_cpu(graph, *args), SCALED_MM(*args))


@pytest.mark.parametrize(
    ("rows", "out_dtype"),
    [
        ((True, True), torch.bfloat16),  # CUTLASS writes nothing else
        ((False, False), torch.bfloat16),
        ((False, False), torch.float32),
        ((False, False), torch.float16),
    ],
)
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_matmul_on_a_gpu_becomes_the_librarys_where_it_can_and_gives_the_same_result(
    rows: tuple[bool, bool], out_dtype: torch.dtype, bias: torch.dtype | None
) -> None:
    """One ``aten._scaled_mm``, whose operands Hopper takes: a row-major, b column-major. Its result is within two
    roundings to the output's dtype, and the rounding of float32 sums of 64 products, of the reference."""
    args = (*operands(rows, bias), out_dtype, True)
    graph = lowered(SCALED_MM, *args, device="meta")
    assert not fp8_nodes(graph)
    (gemm,) = [node for node in graph.nodes if node.target is aten._scaled_mm.default]
    a, b = (arg.meta["val"] for arg in gemm.args[:2])
    assert (a.stride(1), b.stride(0)) == (1, 1)
    scale_a, scale_b = (arg.meta["val"] for arg in gemm.args[2:4])
    expected_shapes = ((48, 1), (1, 32)) if all(rows) else ((1, 1), (1, 1))
    assert (tuple(scale_a.shape), tuple(scale_b.shape)) == expected_shapes
    got, expected = run_on_cpu(graph, *args).double(), SCALED_MM(*args).double()
    bound = 2 * torch.finfo(out_dtype).eps + 64 * torch.finfo(torch.float32).eps
    assert ((got - expected).abs() <= bound * expected.abs().max()).all()


@pytest.mark.parametrize(
    ("rows", "out_dtype"),
    [
        ((True, False), torch.bfloat16),
        ((False, True), torch.bfloat16),
        ((True, True), torch.float32),
        ((True, True), torch.float16),
    ],
)
@pytest.mark.parametrize("bias", [None, torch.float32])
def test_matmul_that_the_library_refuses_becomes_one_launch_of_our_kernel(
    rows: tuple[bool, bool], out_dtype: torch.dtype, bias: torch.dtype | None
) -> None:
    """Mixed scales, and rowwise scales with other outputs than bfloat16. What it computes: tests of the preview."""
    args = (*operands(rows, bias), out_dtype, True)
    graph = lowered(SCALED_MM, *args, device="meta")
    assert not fp8_nodes(graph)
    assert aten._scaled_mm.default not in targets(graph)
    (launch,) = [node for node in graph.nodes if node.target is triton_kernel_wrapper_functional]
    kernel = kernel_side_table.get_kernel(launch.kwargs["kernel_idx"])
    assert kernel.fn.__name__ == "scaled_mm_kernel"
    assert (launch.kwargs["kwargs"]["bias"] is None) == (bias is None)
    result = graph.output_node().args[0]
    result = result[0] if isinstance(result, tuple) else result
    assert (tuple(result.meta["val"].shape), result.meta["val"].dtype) == ((48, 32), out_dtype)


@pytest.mark.parametrize("fast", [True, False])
def test_accumulation_reaches_the_gpu_s_kernel(fast: bool) -> None:
    graph = lowered(SCALED_MM, *operands((True, True)), torch.bfloat16, fast, device="meta")
    (gemm,) = [node for node in graph.nodes if node.target is aten._scaled_mm.default]
    assert gemm.args[7] is fast


def test_bias_of_the_outputs_dtype_goes_into_the_gpu_s_kernel_and_another_is_added() -> None:
    for bias, inside in ((torch.bfloat16, True), (torch.float32, False)):
        graph = lowered(SCALED_MM, *operands((True, True), bias), torch.bfloat16, True, device="meta")
        (gemm,) = [node for node in graph.nodes if node.target is aten._scaled_mm.default]
        assert (gemm.args[4] is not None) == inside
        assert (aten.add.Tensor in targets(graph)) != inside


def test_one_row_with_rowwise_scales_does_not_go_to_the_library() -> None:
    """M = 1: there one scale for a would be taken for a tensorwise one beside N scales for b."""
    graph = lowered(SCALED_MM, *operands((True, True), m=1), torch.bfloat16, True, device="meta")
    assert aten._scaled_mm.default not in targets(graph)
    assert triton_kernel_wrapper_functional in targets(graph)


def lowered_transposition(x: torch.Tensor, row_scale: torch.Tensor, multiples: list[int], device: str) -> Graph:
    graph = graph_of(QUANTIZE_TRANSPOSED, x, row_scale, E4M3, multiples, device=device)
    (both,) = graph.output_node().args
    with graph.inserting_after(both):
        parts = [graph.call_function(operator.getitem, (both, index)) for index in (1, 0)][::-1]
    for index, part in enumerate(parts):
        part.meta["val"] = both.meta["val"][index]
    graph.output_node().args = (tuple(parts),)
    lower(graph, PassContext(Policy.all(), RECIPES["rowwise_once"], CHIPS["h100"], ()), PassRecord("lower"))
    return graph


@pytest.mark.parametrize("shape", [(7, 9), (2, 7, 9)])
@pytest.mark.parametrize("from_fp8", [True, False])
@pytest.mark.parametrize("multiples", [[1, 1], [16, 16]])
def test_transposition_to_one_scale_becomes_aten_and_gives_the_same_bytes(
    shape: tuple[int, ...], from_fp8: bool, multiples: list[int]
) -> None:
    """On a CPU, and on a GPU for more than one matrix."""
    x = torch.randn(shape) * torch.randn(*shape[:-1], 1).exp()
    scale = COMPUTE_SCALE(x, [-1], E4M3, True)
    x = QUANTIZE(x, scale, E4M3, False, [1, 1]) if from_fp8 else x
    graph = lowered_transposition(x, scale, multiples, "meta" if len(shape) == 3 else "cpu")
    assert not fp8_nodes(graph)
    for got, expected in zip(run_on_cpu(graph, x, scale), QUANTIZE_TRANSPOSED(x, scale, E4M3, multiples), strict=True):
        assert got.shape == expected.shape
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_transposition_to_one_scale_is_one_launch_on_a_gpu() -> None:
    graph = lowered_transposition(torch.randn(7, 9), torch.rand(7, 1), [16, 16], "meta")
    assert not fp8_nodes(graph)
    (launch,) = [node for node in graph.nodes if node.target is triton_kernel_wrapper_functional]
    assert kernel_side_table.get_kernel(launch.kwargs["kernel_idx"]).fn.__name__ == "quantize_transposed_kernel"
    data, scale = (node.meta["val"] for node in graph.output_node().args[0])
    assert (tuple(data.shape), data.dtype, tuple(scale.shape)) == ((16, 16), E4M3, (1, 1))


def test_padding_of_a_dynamic_size_is_computed_at_run_time() -> None:
    """The amounts are symbols of the graph, one program for every size."""
    seen: list[str] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        return QUANTIZE(x, COMPUTE_SCALE(x, [1], E4M3, False), E4M3, True, [1, 16])

    compiled = compile_fp8(model, dynamic=True)
    with fp8.collect_reports(lambda *_: seen.append("compiled")):
        for rows in (21, 32, 5):
            x = torch.randn(rows, 64)
            assert torch.equal(compiled(x).view(torch.uint8), model(x).view(torch.uint8))
    assert seen == ["compiled"]


def test_graph_without_our_operators_is_left_as_it_is() -> None:
    graph = graph_of(aten.mm.default, torch.randn(4, 5), torch.randn(5, 6), device="cpu")
    before = str(graph)
    record = PassRecord("lower")
    lower(graph, PassContext(Policy.all(), RECIPES["rowwise"], CHIPS["h100"], ()), record)
    assert str(graph) == before
    assert record.matched == 0


def test_inductor_runs_the_lowered_program_forward_and_backward() -> None:
    """Generated code against the same rewritten graph run op by op: SQNR at least 45 dB. They differ where a value is
    kept in float32 instead of rounded, which flips single FP8 roundings."""
    model, x = mlp(), normal(32, 64)
    results = {}
    for engine in ("eager", "inductor"):
        torch._dynamo.reset()
        model.zero_grad()
        with fp8.collect_reports() as report:
            out = compile_fp8(model, engine=engine)(x)
            out.square().sum().backward()
        assert report.in_fp8 == 6
        results[engine] = [out.detach(), *(p.grad.clone() for p in model.parameters())]
    for ours, reference in zip(results["inductor"], results["eager"], strict=True):
        assert (ours - reference).norm() <= 10 ** (-45 / 20) * reference.norm()
