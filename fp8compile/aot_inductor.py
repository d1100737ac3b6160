"""AOTInductor with our passes: an exported program becomes a package that runs without Python."""

from __future__ import annotations

import os
from typing import IO, Any

import torch

from fp8compile.backend import compiling_exported
from fp8compile.options import OptionError, Options


def aoti_compile_and_package(
    exported: torch.export.ExportedProgram,
    *,
    package_path: str | os.PathLike[str] | IO[bytes] | None = None,
    options: dict[str, Any] | None = None,
) -> str:
    """``torch._inductor.aoti_compile_and_package`` with FP8 matmuls.

    Args:
        exported: what ``torch.export.export`` returned, of a model in inference.
        package_path: a path that ends in ``.pt2``, or a writable file; default: in Inductor's cache directory.
        options: as for ``torch.compile(backend="fp8")``. ``reuse_weight_casts`` is Inductor's
            ``aot_inductor.use_runtime_constant_folding`` here: weights are cast when the package is loaded.

    Returns:
        The package's path, for ``torch._inductor.aoti_load_package`` or for its C++ counterpart.

    Raises:
        OptionError: for an option that is unknown or has no meaning here.
    """
    parsed = Options.parse(options)
    if parsed.engine != "inductor":
        raise OptionError(f"aoti_compile_and_package: option 'engine' must be 'inductor', not {parsed.engine!r}")
    where: Any = os.fspath(package_path) if isinstance(package_path, os.PathLike) else package_path  # torch compares
    with compiling_exported(parsed) as patches:
        if parsed.reuse_weight_casts:
            patches["aot_inductor.use_runtime_constant_folding"] = True
        return str(torch._inductor.aoti_compile_and_package(exported, package_path=where, inductor_configs=patches))
