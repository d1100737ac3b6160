"""The entry point of ``torch.compile(model, backend="fp8")``: options, passes, Inductor."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import hashlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.fx
from functorch.compile import make_boxed_func
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass

import fp8compile
from fp8compile.debug import DebugFolder
from fp8compile.options import Options
from fp8compile.passes import (
    JOINT_PASSES,
    POST_GRAD_PASSES,
    GraphInput,
    Pass,
    PassContext,
    qualified_name,
    run_passes,
)
from fp8compile.passes.dataflow import is_inside_control_flow, is_tangent, weight_names
from fp8compile.passes.inductor_decompositions import tracing_decompositions
from fp8compile.passes.measured_gemms import Measure, Remembered
from fp8compile.report import GraphReport, Report
from fp8compile.weight_casts import WeightCasts

log = logging.getLogger("fp8compile")

Listener = Callable[[GraphReport, torch.fx.Graph, torch.fx.Graph, PassContext], None]
_listeners: contextvars.ContextVar[tuple[Listener, ...]] = contextvars.ContextVar("fp8compile_listeners", default=())


def fp8(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph with FP8 matmuls; a TorchDynamo backend.

    Use it as ``torch.compile(model, backend="fp8")``. ``options`` are those of
    :data:`fp8compile.options.OPTIONS` and of Inductor; ``mode`` is Inductor's.

    Raises:
        OptionError: for an unknown option or a value that it does not take.
    """
    parsed = Options.parse(options, mode)
    return compile_with(_ENGINES[parsed.engine], gm, example_inputs, parsed)


@dataclass(frozen=True)
class Engine:
    """What turns the rewritten graphs into something to call.

    Attributes:
        inner_compile: compiles one forward, backward or inference graph, as Inductor's does; None: Inductor's.
        before_joint: sees the joint (or inference) graph before our passes.
        patches: settings of Inductor on top of the user's; one of them may turn ``max_autotune`` off, and measuring.
    """

    inner_compile: Callable[..., Any] | None = None
    before_joint: Callable[[torch.fx.Graph], None] | None = None
    patches: dict[str, Any] = field(default_factory=dict)


def compile_with(
    engine: Engine, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
    """Take a captured graph through our passes and Inductor's, and let ``engine`` compile what comes out."""
    patches = {**options.config_patches(), **engine.patches}
    compilation = _Compilation.of(options, patches, _graph_inputs(gm, example_inputs), engine.before_joint)
    patches |= compilation.hooks(patches)
    inner: dict[str, Any] = {"inner_compile": engine.inner_compile} if engine.inner_compile else {}
    if options.reuse_weight_casts:
        inner["inner_compile"] = compilation.weight_casts.around(engine.inner_compile or compile_fx_inner)
    # AOTAutograd's cache would return a compiled graph without running our passes, and with them the report;
    # Inductor's own cache, which holds the expensive part, stays on.
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(
            gm, example_inputs, config_patches=patches, decompositions=tracing_decompositions(), **inner
        )
    return compiled


@contextlib.contextmanager
def compiling_exported(options: Options) -> Iterator[dict[str, Any]]:
    """Inside, AOTInductor compiles as we do, if it is given these settings.

    The graph that it shows our passes holds weights itself, by their names, so that no input is one.
    """
    patches = options.config_patches()
    patches |= _Compilation.of(options, patches, inputs=()).hooks(patches)
    with_ours = functools.partial(compile_fx, decompositions=tracing_decompositions())
    with mock.patch("torch._inductor.compile_fx.compile_fx", with_ours):  # AOTInductor has no argument for them
        yield patches


@contextlib.contextmanager
def collect_reports(listener: Listener | None = None) -> Iterator[Report]:
    """Gather a report of every graph that is compiled inside the ``with`` block.

    ``listener`` sees each graph's report, the joint graph before and after our passes, and the passes' context.
    """
    report = Report()

    def gather(graph_report: GraphReport, before: torch.fx.Graph, after: torch.fx.Graph, context: PassContext) -> None:
        report.graphs.append(graph_report)
        if listener is not None:
            listener(graph_report, before, after, context)

    token = _listeners.set((*_listeners.get(), gather))
    try:
        yield report
    finally:
        _listeners.reset(token)


@dataclass
class _Compilation:
    """One captured graph on its way: what its passes share."""

    options: Options
    inputs: tuple[GraphInput, ...]
    debug: DebugFolder
    before_joint: Callable[[torch.fx.Graph], None] | None = None
    measure: Measure | None = None
    report: GraphReport | None = None
    weight_casts: WeightCasts = field(default_factory=WeightCasts)

    @classmethod
    def of(
        cls,
        options: Options,
        patches: dict[str, Any],
        inputs: tuple[GraphInput, ...],
        before_joint: Callable[[torch.fx.Graph], None] | None = None,
    ) -> _Compilation:
        """One with ``patches`` to Inductor's settings, which say whether GEMMs are measured."""
        measure = _measure() if patches.get("max_autotune", inductor_config.max_autotune) else None
        return cls(options, inputs, DebugFolder.create(options.debug), before_joint, measure)

    def hooks(self, patches: dict[str, Any]) -> dict[str, Any]:
        """Settings that put our passes behind those that ``patches``, or Inductor's settings, name."""
        passes = {"joint_custom_pre_pass": _JointPass, "post_grad_custom_pre_pass": _PostGradPass}
        return {key: ours(self, patches.get(key, getattr(inductor_config, key))) for key, ours in passes.items()}

    def context(self) -> PassContext:
        options = self.options
        return PassContext(
            options.policy,
            options.recipe,
            options.target,
            self.inputs,
            keeps_weight_casts=options.reuse_weight_casts,
            measure=self.measure,
        )

    def run(self, passes: list[Pass], graph: torch.fx.Graph, context: PassContext, prefix: str) -> None:
        self.debug.write_graph(f"{prefix}_before", graph)
        run_passes(
            passes,
            graph,
            context,
            check=self.options.verify,
            after_each=lambda name, g: self.debug.write_graph(f"{prefix}_after_{name}", g),
        )


class _Pass(CustomGraphPass):
    """Our passes as Inductor calls them, behind those that the user gave Inductor.

    ``uuid`` covers what the rewritten graph depends on besides the graph.
    """

    passes: list[Pass]

    def __init__(self, compilation: _Compilation, users: Any) -> None:
        self.compilation = compilation
        self.users = users if isinstance(users, (list, tuple)) else [users] if users is not None else []

    def uuid(self) -> str | None:
        fingerprint = self.compilation.options.fingerprint()
        users = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.users]
        if fingerprint is None or None in users:
            return None
        key = (source_fingerprint(), fingerprint, self.compilation.inputs, [p.__name__ for p in self.passes], users)
        return hashlib.sha256(repr(key).encode()).hexdigest()

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.prepare(graph)
        for users_pass in self.users:
            users_pass(graph)
        self.rewrite(graph)

    def prepare(self, graph: torch.fx.Graph) -> None:
        """What comes before every pass."""

    @abstractmethod
    def rewrite(self, graph: torch.fx.Graph) -> None:
        """Run our passes on ``graph``."""


class _JointPass(_Pass):
    passes = JOINT_PASSES

    def prepare(self, graph: torch.fx.Graph) -> None:
        if self.compilation.before_joint is not None:
            self.compilation.before_joint(graph)

    def rewrite(self, graph: torch.fx.Graph) -> None:
        if is_inside_control_flow(graph):
            return  # reported, and kept, with the graph around it
        compilation, context = self.compilation, self.compilation.context()
        compilation.weight_casts.weights = {node.name for node in weight_names(graph, compilation.inputs)}
        has_backward = any(is_tangent(node) for node in graph.nodes if node.op == "placeholder")
        before = copy.deepcopy(graph) if _listeners.get() else graph
        compilation.run(self.passes, graph, context, "joint")
        report = compilation.report = GraphReport.of(context, has_backward)
        compilation.debug.write_report(report)
        _log(report)
        for listener in _listeners.get():
            listener(report, before, graph, context)


class _PostGradPass(_Pass):
    passes = POST_GRAD_PASSES

    def rewrite(self, graph: torch.fx.Graph) -> None:
        context = self.compilation.context()
        self.compilation.run(self.passes, graph, context, "post_grad")
        if self.compilation.report is not None:
            self.compilation.report.add_passes(context)


def _run_op_by_op(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The engine ``"eager"``: the rewritten graph, one operator at a time."""
    return make_boxed_func(gm.forward)


def _measure() -> Measure | None:
    """Times GEMMs on the GPU that is present, if one is."""
    return Remembered() if torch.cuda.is_available() else None


_ENGINES: dict[str, Engine] = {"inductor": Engine(), "eager": Engine(_run_op_by_op)}


def _graph_inputs(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[GraphInput, ...]:
    """Name of each input in the user's program, and whether it is a parameter or buffer of a module."""
    inputs = []
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs, strict=False):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", str(node.target))
        path = str(name() if callable(name) else name)
        static = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
        inputs.append(GraphInput(qualified_name(path) or path, isinstance(example, torch.nn.Parameter) or static))
    return tuple(inputs)


def _log(report: GraphReport) -> None:
    summary = Report([report])
    if summary.in_fp8 or not report.rows:
        log.info("%s", summary.summary())
        return
    reasons = "; ".join(f"{count} {reason}" for reason, count in summary.kept.items())
    level = logging.INFO if set(summary.kept) == {"policy: none"} else logging.WARNING
    log.log(level, "nothing in this graph goes to FP8: %s", reasons)


@functools.cache
def source_fingerprint() -> str:
    """A hash of the package's source: another version of the passes never finds this one's compiled graphs."""
    digest = hashlib.sha256()
    for module in (fp8compile, fp8compile.passes):
        for folder in module.__path__:
            for path in sorted(Path(folder).glob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()
