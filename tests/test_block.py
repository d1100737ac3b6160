"""The recipe ``block`` from end to end: what shares a scale, which casts and kernels come of it, and what is kept."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from models import Run, assert_close, compile_fp8, normal, run_module, sqnr
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as fp8
from fp8compile import Cast, Gemm, Recipe
from fp8compile.hardware import CHIPS
from fp8compile.ops import BLOCK_SCALED_MM, QUANTIZE_BLOCK
from fp8compile.passes import POST_GRAD_PASSES, PassContext, PassRecord
from fp8compile.passes.fuse_block_casts import fuse_block_casts
from fp8compile.recipe import BLOCK, E4M3, E5M2, LARGEST, RECIPES


def wide_scales(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """The scale of each element, by index."""
    rows, columns = (torch.arange(size) // step for size, step in zip(shape, block, strict=True))
    return scale[rows][:, columns]


# --- The operators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
@pytest.mark.parametrize("shape", [(1, 1), (13, 300), (300, 13), (256, 128), (129, 127)])
def test_each_block_is_quantized_by_its_own_amax(shape: tuple[int, int], block: tuple[int, int]) -> None:
    """Scale by scale against a loop in float64; a block at the edge counts what it has."""
    x = normal(*shape) * 2.0 ** torch.randint(-9, 9, (shape[0], 1))
    data, scale = QUANTIZE_BLOCK(x, list(block), E4M3, False, False, [1, 1])
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = x[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            assert scale[i, j] == (part.abs().max().double() / LARGEST[E4M3]).float()
    expected = (x / wide_scales(scale, x.shape, block)).clamp(-448, 448).to(E4M3)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_transposed_data_are_the_same_bytes_and_padding_is_zero(block: tuple[int, int]) -> None:
    x = normal(150, 200)
    data, scale = QUANTIZE_BLOCK(x, list(block), E5M2, True, False, [16, 16])
    turned, turned_scale = QUANTIZE_BLOCK(x, list(block), E5M2, True, True, [16, 16])
    assert data.shape == (160, 208)
    assert torch.equal(turned.view(torch.uint8), data.mT.view(torch.uint8))
    assert torch.equal(turned_scale, scale.mT)
    assert turned.is_contiguous()
    assert not data.view(torch.uint8)[150:].any()
    assert not data.view(torch.uint8)[:, 200:].any()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (130, 272, 304), (40, 128, 128), (16, 144, 400)])
@pytest.mark.parametrize(("rows_a", "rows_b"), [(1, 128), (1, 1), (128, 1)])
def test_product_is_that_of_what_the_blocks_stand_for(m: int, n: int, k: int, rows_a: int, rows_b: int) -> None:
    """Within float32's rounding of a sum of K products: K + 3 roundings of the sum of their magnitudes."""
    operands, wide = [], []
    for rows, step in ((m, rows_a), (n, rows_b)):
        data, scale = QUANTIZE_BLOCK(normal(rows, k), [step, BLOCK], E4M3, False, False, [1, 1])
        operands.append((data, scale))
        wide.append(data.double() * wide_scales(scale, data.shape, (step, BLOCK)).double())
    (a, scale_a), (b, scale_b) = operands
    bias = normal(n)
    out = BLOCK_SCALED_MM(a, b, scale_a, scale_b, bias, torch.float32)
    bound = (k + 3) * 2.0**-24 * (wide[0].abs() @ wide[1].abs().T + bias.abs())
    assert ((out - (wide[0] @ wide[1].T + bias.double())).abs() <= bound).all()


def test_nothing_and_zeros() -> None:
    for shape in ((0, 64), (64, 0)):
        data, scale = QUANTIZE_BLOCK(torch.empty(shape), [1, BLOCK], E4M3, False, False, [1, 1])
        assert data.shape == shape
        assert scale.numel() == 0
    data, scale = QUANTIZE_BLOCK(torch.zeros(3, 200), [1, BLOCK], E4M3, False, False, [1, 1])
    assert not data.float().any()
    assert (scale == 2.0**-126).all()


# --- The recipe -------------------------------------------------------------------------------------------------------


def test_recipe_is_e4m3_in_blocks_with_accurate_sums() -> None:
    for role in ("fprop", "dgrad", "wgrad"):
        gemm = RECIPES["block"].gemm(role)
        assert gemm == Gemm(Cast(E4M3, "block"), Cast(E4M3, "block"), "accurate")


def test_fast_sums_are_refused_since_scales_come_between() -> None:
    with pytest.raises(ValueError, match="'fast' is not for granularity 'block'"):
        Recipe.uniform("mine", granularity="block", accumulation="fast")


def nodes_of(model: nn.Module, x: torch.Tensor, **options: Any) -> tuple[list[torch.fx.Node], fp8.Report]:
    graphs: list[torch.fx.Graph] = []
    with fp8.collect_reports(lambda report, before, after, context: graphs.append(after)) as report:
        run_module(compile_fp8(model, recipe="block", **options), model, x)
    return list(graphs[0].nodes), report


def test_what_shares_a_scale_in_each_role() -> None:
    """Inputs and gradients: 128 along the contraction of the GEMM that reads them, tokens in wgrad. Weights: 128x128,
    the same in both roles. M, K, N = 300 tokens, 144 features, 272 outputs."""
    nodes, report = nodes_of(nn.Linear(144, 272, bias=False), normal(300, 144))
    scales = {}
    roles = {row.shape: row.role for row in report.rows}
    for node in nodes:
        if node.target is BLOCK_SCALED_MM:
            a, b, scale_a, scale_b = (argument.meta["val"].shape for argument in node.args[:4])
            contraction = {"fprop": 144, "dgrad": 272, "wgrad": 300}
            role = next(r for shape, r in roles.items() if shape.startswith(f"{a[0]}×{b[0]}×"))
            assert a[1] - contraction[role] in range(16)
            scales[role] = (tuple(scale_a), tuple(scale_b))
    assert scales == {
        "fprop": ((300, 2), (3, 2)),
        "dgrad": ((300, 3), (2, 3)),
        "wgrad": ((272, 3), (144, 3)),
    }


def test_two_blocks_far_apart_in_size_do_not_share_their_precision() -> None:
    """Half of the features are 2⁻²⁰ of the others: with a scale per row they vanish, with blocks they do not."""
    model = nn.Linear(256, 64, bias=False)
    x = normal(32, 256, requires_grad=False)
    x[:, 128:] *= 2.0**-20
    with torch.no_grad():
        model.weight[:, :128] = 0
        small = x[:, 128:] @ model.weight[:, 128:].T
        found = {recipe: sqnr(small, compile_fp8(model, recipe=recipe)(x)) for recipe in ("block", "rowwise")}
    assert found["block"] >= 25
    assert found["rowwise"] < 10


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_step_has_the_quality_of_the_other_recipes(engine: str) -> None:
    """An MLP whose sizes are no multiples of 128, forward and backward, 24 dB."""
    model = nn.Sequential(nn.Linear(200, 300), nn.GELU(), nn.Linear(300, 160))
    x = normal(150, 200)
    expected: Run = run_module(model, model, x)
    got = run_module(compile_fp8(model, recipe="block", engine=engine), model, x)
    assert_close(expected, got, expected, 24.0, 24.0)


# --- What is kept -----------------------------------------------------------------------------------------------------


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.experts


def test_batches_are_kept_with_a_reason() -> None:
    _, report = nodes_of(Batched(), normal(2, 32, 64))
    assert {row.reason for row in report.rows} == {
        "block scales are for products of two matrices, not for batches and groups"
    }


def test_wgrad_over_a_dynamic_number_of_tokens_is_kept_and_the_rest_is_not() -> None:
    model, x = nn.Linear(256, 128), normal(160, 256)
    expected = run_module(model, model, x)
    with fp8.collect_reports() as report:
        got = run_module(compile_fp8(model, recipe="block", dynamic=True), model, x)
    assert {row.role: row.fp8 for row in report.rows} == {"fprop": True, "dgrad": True, "wgrad": False}
    (kept,) = (row for row in report.rows if not row.fp8)
    assert kept.reason == "K is dynamic: blocks of 128 along it need to know its size"
    assert_close(expected, got, expected, 24.0, 24.0)


def test_default_policy_keeps_what_slower_gemms_cannot_win() -> None:
    """At 30 % of the FP8 peak a GEMM takes longer than in bf16, and so the same model is FP8 with other recipes."""
    model = nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16, device="meta")
    x = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = {
        recipe: fp8.explain(model, x, options={"recipe": recipe, "target": "h100"}).in_fp8
        for recipe in ("block", "rowwise_once")
    }
    assert found == {"block": 0, "rowwise_once": 3}


# --- On the GPU -------------------------------------------------------------------------------------------------------


def preview_of(recipe: str = "block", **options: Any) -> fp8.Preview:
    model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).to("meta", torch.bfloat16)
    x = torch.empty(2048, 1024, device="meta", dtype=torch.bfloat16, requires_grad=True)
    return fp8.preview(model, x, target="h100", options={"policy": "all", "recipe": recipe, **options})


def test_a_tensor_is_read_once_for_its_scales_and_both_layouts() -> None:
    """Two activations and two weights in the forward; two gradients and two weights, again, in the backward."""
    casts = [kernel for kernel in preview_of().fp8.kernels if kernel.name == "quantize_block_kernel"]
    assert [kernel.phase for kernel in casts] == ["forward"] * 4 + ["backward"] * 4
    assert {kernel.maker for kernel in casts} == {"fp8compile"}
    m, k, n = 2048, 1024, 2048
    scales = 4 / 128
    read = sorted(2 * (m * k, k * n, m * n, n * k, m * k, n * k, m * n, k * n)[i] for i in range(8))
    assert sorted(kernel.read for kernel in casts) == read
    both = [kernel for kernel in casts if kernel.written == 2 * (1 + scales) * kernel.read / 2]
    assert len(both) == 4  # activations and gradients, for two GEMMs each; weights are read by one in each graph


def test_our_kernel_takes_less_time_than_what_inductor_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step without the pass that chooses it. Of an MLP the bytes are about the same, since Inductor computes
    what it casts twice rather than store it; it needs a third more launches, three for most casts where we need one."""
    ours = preview_of().fp8
    without = [function for function in POST_GRAD_PASSES if function.__name__ != "fuse_block_casts"]
    assert len(without) == len(POST_GRAD_PASSES) - 1
    monkeypatch.setattr("fp8compile.backend._PostGradPass.passes", without)
    inductors = preview_of().fp8
    assert "quantize_block_kernel" not in {kernel.name for kernel in inductors.kernels}
    assert ours.moved < 1.05 * inductors.moved
    assert ours.launches < 0.75 * inductors.launches
    assert sum(k.seconds for k in ours.of_kind("memory")) < 0.9 * sum(k.seconds for k in inductors.of_kind("memory"))


@pytest.mark.parametrize(
    ("x", "fused", "reason"),
    [
        (torch.empty(160, 256), True, None),
        (torch.empty(160, 512)[:, :256], True, None),
        (torch.empty(256, 160).t(), False, "its rows are not contiguous"),
    ],
)
def test_casts_are_fused_or_left_to_inductor_with_a_reason(x: torch.Tensor, fused: bool, reason: str | None) -> None:
    """Two layouts of one matrix, on a device that is not the CPU; a dynamic size is the other reason."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    with FakeTensorMode() as mode:
        node.meta["val"] = torch.empty_strided(x.shape, x.stride(), device="meta")
    parts = []
    for block, transpose in (([1, 128], False), ([128, 1], True)):
        both = graph.call_function(QUANTIZE_BLOCK, (node, block, E4M3, False, transpose, [1, 16]))
        with mode:
            both.meta["val"] = QUANTIZE_BLOCK(node.meta["val"], *both.args[1:])
        for index in (0, 1):
            parts.append(graph.call_function(operator.getitem, (both, index)))
            parts[-1].meta["val"] = both.meta["val"][index]
    graph.output(tuple(parts))
    before = [(part.meta["val"].shape, part.meta["val"].dtype, part.meta["val"].stride()) for part in parts]
    record = PassRecord("fuse_block_casts")
    fuse_block_casts(graph, PassContext(fp8.Policy.all(), RECIPES["block"], CHIPS["h100"], ()), record)
    assert record.matched == (2 if fused else 0)
    assert dict(record.skipped) == ({} if reason is None else {reason: 2})
    launches = [node for node in graph.nodes if node.target is triton_kernel_wrapper_functional]
    assert len(launches) == fused
    (results,) = graph.output_node().args
    after = [(part.meta["val"].shape, part.meta["val"].dtype, part.meta["val"].stride()) for part in results]
    assert after == before


def test_prediction_uses_the_rate_of_block_scales() -> None:
    gemms = [kernel for kernel in preview_of().fp8.kernels if kernel.kind == "gemm"]
    assert len(gemms) == 6
    for kernel in gemms:
        assert kernel.name == "block_scaled_mm_kernel"
        assert kernel.seconds == pytest.approx(kernel.flops / (0.30 * 1979e12) + 2e-6)
