"""The transformer blocks of the H100 table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """A block and the tokens that go through it. ``kv_heads`` None: fused qkv, LayerNorm, bias and GELU (GPT);
    else separate q, k and v, rotary embedding, RMSNorm and SwiGLU (Llama)."""

    dim: int
    heads: int
    ffn: int
    tokens: int
    kv_heads: int | None = None
    head_dim: int = 128


SHAPES = {
    "llama-3-8b": Shape(4096, 32, 14336, 8192, kv_heads=8),
    "gpt-7b": Shape(4096, 32, 16384, 8192),
    "llama-70b/tp8": Shape(8192, 8, 3584, 8192, kv_heads=1),
    "small": Shape(1024, 8, 4096, 4096, kv_heads=8),
}


class LlamaBlock(nn.Module):
    """RMSNorm, grouped-query attention with rotary embedding, SwiGLU. ``x`` is ``[1, tokens, dim]``; ``cos`` and
    ``sin`` are ``[tokens, head_dim]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        assert shape.kv_heads is not None
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.q_proj = nn.Linear(shape.dim, width, bias=False)
        self.k_proj = nn.Linear(shape.dim, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.dim, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.gate_proj = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        normed = self.attention_norm(x)

        def heads(projected: Tensor, count: int) -> Tensor:
            return projected.view(batch, tokens, count, self.shape.head_dim).transpose(1, 2)

        assert self.shape.kv_heads is not None
        q = rotate(heads(self.q_proj(normed), self.shape.heads), cos, sin)
        k = rotate(heads(self.k_proj(normed), self.shape.kv_heads), cos, sin)
        v = heads(self.v_proj(normed), self.shape.kv_heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(attended.transpose(1, 2).reshape(batch, tokens, -1))
        normed = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of ``[batch, heads, tokens, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class GPTBlock(nn.Module):
    """LayerNorm, fused qkv, bias everywhere, GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.attention_norm = nn.LayerNorm(shape.dim)
        self.qkv_proj = nn.Linear(shape.dim, 3 * width)
        self.out_proj = nn.Linear(width, shape.dim)
        self.mlp_norm = nn.LayerNorm(shape.dim)
        self.up_proj = nn.Linear(shape.dim, shape.ffn)
        self.down_proj = nn.Linear(shape.ffn, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv_proj(self.attention_norm(x)).view(batch, tokens, 3, self.shape.heads, self.shape.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(attended.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x)), approximate="tanh"))


def build(shape: Shape, device: str = "meta") -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A block in bf16 and its inputs; the first wants a gradient."""
    with torch.device(device):
        x = torch.empty(1, shape.tokens, shape.dim, dtype=torch.bfloat16).requires_grad_()
        if shape.kv_heads is None:
            return GPTBlock(shape).bfloat16(), (x,)
        tables = tuple(torch.empty(shape.tokens, shape.head_dim, dtype=torch.bfloat16) for _ in range(2))
        return LlamaBlock(shape).bfloat16(), (x, *tables)
