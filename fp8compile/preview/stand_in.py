"""A stand-in for a GPU that is not here: what Inductor and Triton ask a driver while they generate code."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.scheduler

from fp8compile.hardware import Chip

DEVICE = torch.device("cuda", 0)


def device_properties(chip: Chip) -> types.SimpleNamespace:
    """What ``torch.cuda.get_device_properties`` would say of the chip."""
    major, minor = chip.capability
    return types.SimpleNamespace(
        name=f"NVIDIA {chip.name.upper()}",
        major=major,
        minor=minor,
        total_memory=int(chip.memory),
        multi_processor_count=chip.multiprocessors,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=chip.shared_memory,
        shared_memory_per_multiprocessor=chip.shared_memory + 1024,
        L2_cache_size=chip.l2_cache,
        gcnArchName="",
    )


class StandInDriver:
    """Triton's active driver while nothing is launched."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.utils = types.SimpleNamespace(get_device_properties=self._properties)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self.chip.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def get_device_interface(self) -> Any:
        return torch.cuda

    @staticmethod
    def is_active() -> bool:
        return True

    def _properties(self, _device: int) -> dict[str, int]:
        chip = self.chip
        return {
            "max_shared_mem": chip.shared_memory,
            "multiprocessor_count": chip.multiprocessors,
            "max_num_regs": 65536,
            "warpSize": 32,
        }


@contextlib.contextmanager
def pretend(chip: Chip) -> Iterator[None]:
    """Inside, torch, Inductor and Triton believe that one such chip is present. Nothing can be launched.

    Raises:
        ModuleNotFoundError: if Triton is not installed.
    """
    try:
        from triton.runtime.driver import driver
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a preview generates Triton kernels, and Triton is not installed; torch's ordinary Linux wheel brings it"
        ) from error

    properties = device_properties(chip)
    answers: dict[str, Any] = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": chip.capability,
        "get_device_properties": properties,
        "current_stream": types.SimpleNamespace(cuda_stream=0),
        "is_bf16_supported": True,
        "get_rng_state": torch.empty(0, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    interface = {"is_available": True, "get_device_properties": properties, "get_compute_capability": _flat(chip)}
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, _always(answer)))
        for name, answer in interface.items():
            patched = staticmethod(_always(answer))
            stack.enter_context(mock.patch.object(device_interface.CudaInterface, name, patched))
        for name in ("torch._inductor.scheduler.has_triton", "torch.utils._triton.has_triton"):
            stack.enter_context(mock.patch(name, _always(True)))
        stack.enter_context(mock.patch.object(torch.version, "cuda", torch.version.cuda or "12.8"))
        stack.enter_context(mock.patch.object(driver, "_active", StandInDriver(chip)))
        stack.enter_context(_asked_anew())
        yield


@contextlib.contextmanager
def _asked_anew() -> Iterator[None]:
    """Forget what torch remembers of Triton's abilities here, before and after."""
    import torch.utils._triton as abilities

    cached = [function for function in vars(abilities).values() if hasattr(function, "cache_clear")]
    for function in cached:
        function.cache_clear()
    try:
        yield
    finally:
        for function in cached:
            function.cache_clear()


def _always(answer: Any) -> Any:
    return lambda *_args, **_kwargs: answer


def _flat(chip: Chip) -> int:
    return 10 * chip.capability[0] + chip.capability[1]
