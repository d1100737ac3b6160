"""Compile for a GPU that is not here: count what it would do, execute it on the CPU, read its machine code.

The package is callable: ``fp8compile.preview(model, *args)`` is :func:`fp8compile.preview.result.preview`.
"""

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from fp8compile.preview.result import preview

        return preview(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
