"""FP8 for PyTorch, as a compiler.

``torch.compile(model, backend="fp8")`` needs no import of this package. Import it to write policies and recipes and to
ask what was decided: :func:`explain`, :class:`Policy`, :class:`Recipe`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fp8compile import ops  # noqa: F401  (registers torch.ops.fp8compile)
from fp8compile.policy import Policy
from fp8compile.recipe import RECIPES, Cast, Gemm, Recipe
from fp8compile.site import CollectiveSite, Decision, MatmulSite, keep, use

if TYPE_CHECKING:
    from fp8compile.aot_inductor import aoti_compile_and_package
    from fp8compile.backend import collect_reports, fp8
    from fp8compile.explanation import explain
    from fp8compile.preview.result import Preview, preview
    from fp8compile.report import Report

__version__ = "0.1.0"


_IMPORTED_WHEN_USED = {
    "aoti_compile_and_package": "fp8compile.aot_inductor",
    "fp8": "fp8compile.backend",
    "collect_reports": "fp8compile.backend",
    "explain": "fp8compile.explanation",
    "Report": "fp8compile.report",
    "Preview": "fp8compile.preview.result",
}
"""Names whose modules need Inductor, which takes seconds to import."""


def __getattr__(name: str) -> Any:
    if name == "preview":  # a package that can be called
        return importlib.import_module("fp8compile.preview")
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module 'fp8compile' has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_WHEN_USED[name]), name)


__all__ = [
    "RECIPES",
    "Cast",
    "CollectiveSite",
    "Decision",
    "Gemm",
    "MatmulSite",
    "Policy",
    "Preview",
    "Recipe",
    "Report",
    "aoti_compile_and_package",
    "collect_reports",
    "explain",
    "fp8",
    "keep",
    "preview",
    "use",
]
