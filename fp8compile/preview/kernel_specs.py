"""The Triton kernels in Inductor's wrapper, as what the compiler needs to know of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fp8compile.hardware import Chip
from fp8compile.preview.machine_code import KernelSpec
from fp8compile.preview.stand_in import pretend

TRITON_KERNEL = re.compile(r"async_compile\.triton\('(?P<kernel>\w+)', '''(?P<source>.*?)'''", re.DOTALL)


def kernel_specs(wrapper: str, chip: Chip, folder: Path) -> Iterator[KernelSpec]:
    """Every distinct Triton kernel of a wrapper, its source written to ``folder``, with the first of its
    configurations: the one that Inductor's heuristics prefer where nothing is measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, match in enumerate(TRITON_KERNEL.finditer(wrapper)):
        file = folder / f"{match['kernel']}_{number}.py"
        file.write_text(match["source"].replace("\\'", "'"))
        yield _spec(file, match["kernel"], chip)


def _spec(file: Path, kernel: str, chip: Chip) -> KernelSpec:
    from torch._inductor.runtime import triton_helpers  # needs Triton

    description = importlib.util.spec_from_file_location(file.stem, file)
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    with pretend(chip), mock.patch.object(triton_helpers, "set_driver_to_gpu"):
        description.loader.exec_module(module)
    tuned: Any = getattr(module, kernel)
    meta, config = tuned.triton_meta, tuned.configs[0]
    names = list(meta["signature"])
    constexprs = {**meta["constants"], **config.kwargs}
    signature = {name: kind for name, kind in meta["signature"].items() if name not in constexprs}
    hints = meta["configs"][0]
    divisible = [names[index] for (index,), attributes in hints.items() if ["tt.divisibility", 16] in attributes]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return KernelSpec(str(file), kernel, signature, constexprs, divisible, options)
