"""``explain``: what ``backend="fp8"`` would do with a model, without compiling kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile.backend import collect_reports, fp8
from fp8compile.fake_tensors import as_fakes, tensors_of
from fp8compile.report import Report
from fp8compile.saved import measure_saved_bytes


def explain(model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Report:
    """Print and return the report of ``model`` on these inputs: for every matmul and collective, FP8 or not and why.

    The model runs once, forward, op by op; where a weight or an input is on the ``meta`` device, on fake tensors.
    Training is assumed where gradients are enabled and something requires one.

    Args:
        model: a module or function; if it was compiled with ``backend="fp8"``, its options are used.
        *args, **kwargs: its inputs.
        options: as for ``torch.compile``; default: those that ``model`` was compiled with.

    Returns:
        The report; ``report.rows`` has one row per site, ``report.graph_breaks`` a reason per break.
    """
    original, compiled_with = _uncompiled(model)
    chosen = {**(compiled_with if options is None else options), "engine": "eager"}
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if _has_meta_tensors(original, args, kwargs):
        context = mode = FakeTensorMode(allow_non_fake_inputs=True)
        original, args, kwargs = as_fakes(mode, original, args, kwargs)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return fp8(gm, example_inputs, options=chosen)  # a backend of its own: nothing compiled earlier is reused

    def explained(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    # Dynamo keeps what it compiled with the code object: a new one leaves the model's own compilations alone
    explained.__code__ = explained.__code__.replace(co_name="explained")
    before = dict(counters["graph_break"])
    unlimited = torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)
    with context, unlimited, collect_reports(measure_saved_bytes) as report:
        torch.compile(explained, backend=backend)(*args, **kwargs)
    for reason, count in counters["graph_break"].items():
        report.graph_breaks += [reason] * (count - before.get(reason, 0))
    del report.graph_breaks[:1]  # the first break is counted twice: in ``explained``, then in the model by itself
    print(report)
    return report


def _has_meta_tensors(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    leaves = (*tensors_of(model), *pytree.tree_leaves((args, kwargs)))
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves)


def _uncompiled(model: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The model that was compiled, and the options it was compiled with if that was with our backend."""
    original = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None) or model
    for wrapper in _backends_of(model):
        if wrapper.compiler_fn is fp8:
            mode = {"mode": wrapper.kwargs["mode"]} if "mode" in wrapper.kwargs else {}
            return original, {**wrapper.kwargs.get("options", {}), **mode}
    return original, {}


def _backends_of(model: Callable[..., Any]) -> Iterator[Any]:
    """The backends that ``torch.compile`` put into what it returned: into the context of a module, or into the closure
    of a function, of which ``model.compile()`` makes one too."""
    contexts = [getattr(model, "dynamo_ctx", None)]
    for function in (model, getattr(model, "_compiled_call_impl", None)):
        contexts += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for context in contexts:
        found = getattr(context, "callback", None)
        while found is not None and not hasattr(found, "compiler_fn"):
            found = getattr(found, "_torchdynamo_orig_backend", None)
        if found is not None:
            yield found
