"""Trace a model's step on fake tensors: no memory for its weights, no arithmetic, any size."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile.backend import compile_with
from fp8compile.fake_tensors import as_fakes
from fp8compile.hardware import Chip
from fp8compile.options import Options
from fp8compile.preview.lowering import Lowered, Runner, previewing

Model = Callable[..., Any]

_numbers = itertools.count()


def lower_step(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], chip: Chip, options: Options) -> Lowered:
    """Lower one step of ``model`` for ``chip``: forward, and backward if gradients are wanted.

    Weights and inputs may be on any device, ``meta`` and fake ones too; only their shapes are used.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    lowered = Lowered()
    fake_model, fake_args, fake_kwargs = as_fakes(mode, model, args, kwargs)
    with mode, autocast_as_on_gpu():
        outputs = compiled(fake_model, chip, options, lowered)(*fake_args, **fake_kwargs)
        wanted = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.empty_like(leaf) for leaf in wanted])
    return lowered


def compiled(model: Model, chip: Chip, options: Options, lowered: Lowered, runner: Runner | None = None) -> Model:
    """``torch.compile(model)`` for ``chip``, with a code object of its own: nothing compiled earlier is reused."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_with(previewing(chip, lowered, runner), gm, example_inputs, options)

    def step(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Dynamo remembers by a function's name and place which of its sizes have changed, and makes those dynamic.
    step.__code__ = step.__code__.replace(co_name=f"preview_{next(_numbers)}")
    function = torch.compile(step, backend=backend)

    def unlimited(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20):
            return function(*args, **kwargs)

    return unlimited


def autocast_as_on_gpu() -> contextlib.AbstractContextManager[Any]:
    """Autocast on the CPU, where the model is traced, if it is on for CUDA."""
    if torch.is_autocast_enabled("cuda"):
        return torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda"))
    return contextlib.nullcontext()
