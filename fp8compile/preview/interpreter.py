"""Triton kernels, and programs that Inductor generated for CUDA, executed on CPU tensors in a child process.

Triton chooses between compiler and interpreter when it is first imported, for the whole process. So interpreting has a
process of its own, and the one that compiles is left alone::

    with InterpreterProcess() as interpreter:
        run = interpreter.load(source)  # what Inductor's ``GraphLowering.codegen()`` returned
        outputs = run([x, weight])

``python -m fp8compile.preview.interpreter`` is the child's side: frames on its standard input and output, each a length
and the bytes of ``torch.save``. What the child prints goes to its standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from fp8compile.preview.interpreter_arithmetic import correct_float_casts, correct_interpreter
from fp8compile.preview.interpreter_libdevice import provide_libdevice

__all__ = ["InterpreterFailure", "InterpreterProcess", "correct_float_casts", "run_interpreted"]

LENGTH = struct.Struct("<Q")
LAST_LINES = 20
"""How much of a dead child's standard error its exception shows."""


Program = Callable[[Sequence[Any]], list[Any]]


class InterpreterFailure(RuntimeError):
    """What ran in the child raised, or the child died. The message holds the child's traceback or last words."""


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    answers: IO[bytes]
    errors: IO[bytes]
    folder: tempfile.TemporaryDirectory[str]

    @staticmethod
    def start() -> _Child:
        folder = tempfile.TemporaryDirectory(prefix="fp8compile_interpreter_")
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # the same program with and without a GPU
            "TMPDIR": folder.name,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by ``end``)
        command = [sys.executable, "-m", "fp8compile.preview.interpreter"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        )
        assert process.stdin is not None
        assert process.stdout is not None
        return _Child(process, process.stdin, process.stdout, errors, folder)

    def last_words(self) -> str:
        """How a child that has stopped answering ended, and the last lines it printed."""
        status = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return "\n".join([f"the interpreter's process {how}; the last it printed:", *lines])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.requests, self.answers, self.errors):
            with contextlib.suppress(BrokenPipeError):  # of a request that the child did not read to its end
                stream.close()
        self.folder.cleanup()


class InterpreterProcess:
    """A child process that runs Triton's interpreter; started by the first request, ended by ``close`` or ``with``."""

    def __init__(self) -> None:
        self._child: _Child | None = None
        self._numbers = itertools.count()

    def __enter__(self) -> InterpreterProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child. A later request starts another, in which nothing is loaded."""
        if self._child is not None:
            self._child.end()
        self._child = None

    def call(self, function_path: str, *arguments: Any) -> Any:
        """``function(*arguments)`` in the child; ``function_path`` is ``"module:function"``.

        The module is imported in the child, from the same ``sys.path``, with ``TRITON_INTERPRET=1``, corrected casts
        and libdevice. Arguments and result are what ``torch.save`` takes: CPU tensors with any strides, numbers,
        containers. Changes to the arguments stay in the child. Raises :class:`InterpreterFailure` with the child's
        traceback.
        """
        return self._request("call", function_path, arguments)

    def load(
        self, source: str, mutated: Sequence[int] = (), constants: Mapping[str, torch.Tensor] | None = None
    ) -> Program:
        """The program of a wrapper that Inductor generated for CUDA, as ``GraphLowering.codegen()`` returns it.

        ``constants`` are the graph's own tensors (``GraphLowering.constants``).

        The result is called with the graph's inputs in order: CPU tensors with any strides and offset, numbers, None.
        It returns the outputs. Inputs at the positions ``mutated`` are written in place, as the program does; an output
        that is an input is the caller's own tensor. Inputs that share memory share it in the child too.

        Raises :class:`InterpreterFailure` here for a source that does not load, in the call for one that fails, with
        the kernel's name and the child's traceback.
        """
        number = next(self._numbers)
        self._request("load", number, source, _detached(constants or {}))

        def program(inputs: Sequence[Any]) -> list[Any]:
            sent = list(_detached(dict(enumerate(inputs))).values())
            outputs, written = self._request("run", number, sent, tuple(mutated))
            for position, value in zip(mutated, written, strict=True):
                sent[position].copy_(value)
            return [inputs[x.position] if isinstance(x, _Input) else x for x in outputs]

        return program

    def _request(self, kind: str, *payload: Any) -> Any:
        request = _packed((kind, *payload))
        self._child = self._child or _Child.start()
        try:
            self._child.requests.write(request)
            self._child.requests.flush()
            outcome, result = _receive(self._child.answers)
        except (BrokenPipeError, EOFError):
            message = self._child.last_words()
            self.close()
            raise InterpreterFailure(message) from None
        except BaseException:  # interrupted: the answer would be taken for that of the next request
            self.close()
            raise
        if outcome == "raised":
            raise InterpreterFailure(result)
        return result


def run_interpreted(function_path: str, *arguments: Any) -> Any:
    """:meth:`InterpreterProcess.call` in a child of its own: ``run_interpreted("package.module:function", x, 3)``.

    Starting the child takes seconds, so give one function a table of cases.
    """
    with InterpreterProcess() as interpreter:
        return interpreter.call(function_path, *arguments)


# --- Frames -----------------------------------------------------------------------------------------------------------


def _detached(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The tensors without gradients. Raises ValueError for one that is not on the CPU."""
    for name, x in values.items():
        if isinstance(x, torch.Tensor) and x.device.type != "cpu":
            raise ValueError(f"tensor {name} is on {x.device}; programs run on CPU tensors")
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in values.items()}


def _packed(message: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return LENGTH.pack(buffer.tell()) + buffer.getvalue()


def _receive(stream: IO[bytes]) -> Any:
    """Raises EOFError at the end of the stream, also in the middle of a frame."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(header)
    frame = stream.read(length)
    if len(frame) < length:
        raise EOFError
    return torch.load(io.BytesIO(frame), weights_only=False)  # both ends are this module


# --- The child --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Input:
    """An output that is the input at this position."""

    position: int


def _call(function_path: str, arguments: Sequence[Any]) -> Any:
    module, _, name = function_path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function(*arguments)


class _Programs:
    """What was loaded, by number."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[list[Any]], Sequence[Any]]] = {}

    def load(self, number: int, source: str, constants: dict[str, torch.Tensor]) -> None:
        from fp8compile.preview.interpreter_wrapper import load_wrapper

        self._calls[number] = load_wrapper(source, constants)

    def run(self, number: int, inputs: list[Any], mutated: Sequence[int]) -> tuple[list[Any], list[torch.Tensor]]:
        if number not in self._calls:
            raise LookupError("the process that this program was loaded into has ended; load it again")
        outputs = self._calls[number](list(inputs))
        positions = {id(x): position for position, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
        marked = [_Input(positions[id(x)]) if id(x) in positions else x for x in outputs]
        return marked, [inputs[position] for position in mutated]


def serve() -> None:
    """Answer requests on standard input until it ends. The child's whole life."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that a print does not end up among the frames
    correct_interpreter()
    provide_libdevice()
    programs = _Programs()
    handlers: dict[str, Callable[..., Any]] = {"call": _call, "load": programs.load, "run": programs.run}
    while True:
        try:
            kind, *payload = _receive(requests)
        except EOFError:
            return
        try:
            answer = _packed(("returned", handlers[kind](*payload)))
        except Exception:
            answer = _packed(("raised", traceback.format_exc()))
        answers.write(answer)
        answers.flush()


if __name__ == "__main__":
    # Not the ``serve`` of ``__main__``: the parent finds the classes of what it is sent by their module's name.
    from fp8compile.preview import interpreter

    interpreter.serve()
