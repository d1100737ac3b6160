"""The debug folder: for every compiled graph, the graph after each pass and what was decided."""

from __future__ import annotations

from pathlib import Path

import torch.fx

from fp8compile.report import GraphReport, Report


class DebugFolder:
    """Numbered files in a folder of its own for each compiled graph; writes nothing if there is no folder."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.written = 0

    @classmethod
    def create(cls, parent: Path | None) -> DebugFolder:
        """A new numbered folder below ``parent``.

        Raises:
            OSError: if it cannot be made; names the option.
        """
        if parent is None:
            return cls(None)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for number in range(len(list(parent.iterdir())), 1_000_000):
                path = parent / f"graph_{number:03}"
                try:
                    path.mkdir()
                except FileExistsError:  # another process writes here too
                    continue
                return cls(path)
        except OSError as error:
            raise OSError(f"option 'debug': cannot write to {str(parent)!r}: {error}") from error
        raise AssertionError("unreachable")

    def write_graph(self, name: str, graph: torch.fx.Graph) -> None:
        """Write ``graph`` as Python, a line for each operator with dtype and shape."""
        if self.path is None:
            return
        owner = graph.owning_module if graph.owning_module is not None else torch.nn.Module()
        readable = torch.fx.GraphModule(owner, graph, class_name=name).print_readable(
            print_output=False, include_stride=True
        )
        self._write(f"{name}.py", readable)

    def write_report(self, report: GraphReport) -> None:
        """Write the decisions, as text and as JSON."""
        if self.path is not None:
            self._write("decisions.txt", str(Report([report])) + "\n")
            self._write("decisions.json", Report([report]).to_json())

    def _write(self, name: str, text: str) -> None:
        assert self.path is not None
        (self.path / f"{self.written:02}_{name}").write_text(text)
        self.written += 1
