"""Fake CPU tensors in place of a model's: shapes and dtypes without memory, whatever device the model is on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode


def as_fakes(
    mode: FakeTensorMode, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A model and its inputs with fake tensors of ``mode``; what is one tensor in both stays one."""
    fakes = _FakeTensors(mode)
    return fakes.model(model), *pytree.tree_map(fakes.tensor, (args, kwargs))


def tensors_of(model: Callable[..., Any]) -> list[torch.Tensor]:
    """A module's parameters and buffers, and what else it holds that is not on the CPU; of a function none."""
    if not isinstance(model, torch.nn.Module):
        return []
    attributes = (leaf for module in model.modules() for leaf in pytree.tree_leaves(vars(module)))
    elsewhere = [leaf for leaf in attributes if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"]
    return [*model.parameters(), *model.buffers(), *elsewhere]


class _FakeTensors:
    """Fake CPU tensors for real ones, the same for the same."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.known: dict[int, Any] = {}

    def tensor(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self.known:
            with self.mode:
                fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
            if isinstance(leaf, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=leaf.requires_grad)
            self.known[id(leaf)] = fake.requires_grad_(leaf.requires_grad)
        return self.known[id(leaf)]

    def model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """A copy of a module with fake tensors; tied ones stay tied. A function is used as it is."""
        if not isinstance(model, torch.nn.Module):
            return model
        return copy.deepcopy(model, {id(tensor): self.tensor(tensor) for tensor in tensors_of(model)})
