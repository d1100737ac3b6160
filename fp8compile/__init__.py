"""FP8 for PyTorch, as a compiler.

``torch.compile(model, backend="fp8")`` needs no import of this package. Import it to write policies and recipes and to ask
what was decided: :func:`explain`, :class:`Policy`, :class:`Recipe`.
"""

from fp8compile import ops  # noqa: F401  (registers torch.ops.fp8compile)
from fp8compile.policy import Policy
from fp8compile.recipe import RECIPES, Cast, Gemm, Recipe
from fp8compile.site import CollectiveSite, Decision, MatmulSite, keep, use

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """The names that need Inductor, imported when they are used: that import takes seconds."""
    if name in ("fp8", "collect_reports", "explain", "Report"):
        from fp8compile import backend, report
        from fp8compile import explain as explain_module

        globals().update(
            fp8=backend.fp8, collect_reports=backend.collect_reports, explain=explain_module.explain, Report=report.Report
        )
        return globals()[name]
    raise AttributeError(f"module 'fp8compile' has no attribute {name!r}")


__all__ = [
    "RECIPES",
    "Cast",
    "CollectiveSite",
    "Decision",
    "Gemm",
    "MatmulSite",
    "Policy",
    "Recipe",
    "Report",
    "collect_reports",
    "explain",
    "fp8",
    "keep",
    "use",
]
