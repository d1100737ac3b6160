"""The house: imports point one way (STYLE.md), nothing heavy is imported before it is used, the package is whole."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"fp8compile": ROOT / "fp8compile", "fp8compile.passes": ROOT / "passes"}
FOUNDATIONS = {"recipe", "policy", "hardware", "ops", "formulas", "site"}
CUDA_ONLY = {"triton", "cuda", "cupy", "pynvml", "nvidia", "cutlass", "flash_attn", "deep_gemm", "transformer_engine"}


def modules() -> dict[str, Path]:
    """Every module of the package by its import name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """What a file imports, with ``from a import b`` as ``a`` and ``a.b``; imports under TYPE_CHECKING left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if top_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def layer(module: str) -> str:
    """The part of the house a module of ours belongs to: ``passes``, ``kernels``, ``backend``, ``recipe`` and so on."""
    return module.split(".")[1] if "." in module else "fp8compile"


def layers_imported(path: Path) -> set[str]:
    ours = modules()
    return {layer(name) for name in imports(path) if name in ours and name != "fp8compile"}


def files(*layers: str) -> list[Path]:
    return [path for name, path in modules().items() if layer(name) in layers]


# --- The reader of imports itself -------------------------------------------------------------------------------------


def test_imports_are_read_as_python_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import a.b as c\nfrom d import e\nif TYPE_CHECKING:\n    import never\n"
        "def f():\n    import late\ntry:\n    import g\nexcept ImportError:\n    pass\n"
    )
    assert imports(file) == {"a.b", "d", "d.e", "late", "g"}
    assert imports(file, top_level=True) == {"a.b", "d", "d.e", "g"}


def test_modules_are_found() -> None:
    assert {"fp8compile", "fp8compile.backend", "fp8compile.passes", "fp8compile.passes.decide"} <= set(modules())
    assert {"recipe", "policy", "hardware"} <= layers_imported(ROOT / "passes" / "context.py")


# --- Arrows -----------------------------------------------------------------------------------------------------------


def test_passes_know_graphs_and_not_torch_compile() -> None:
    """Neither the backend nor what is above it, nor Dynamo."""
    for path in files("passes"):
        assert layers_imported(path) <= FOUNDATIONS | {"passes", "kernels"}, path
        assert not any(name.startswith(("torch._dynamo", "torch.compiler")) for name in imports(path)), path


def test_foundations_do_not_know_passes() -> None:
    for path in files(*FOUNDATIONS):
        assert layers_imported(path) <= FOUNDATIONS | {"kernels"}, path
        assert not any(name.startswith("torch.fx") for name in imports(path)), path


def test_kernels_know_tensors_and_not_graphs() -> None:
    for path in files("kernels"):
        assert layers_imported(path) <= {"kernels", "recipe", "hardware", "formulas"}, path
        assert not any(name.startswith(("torch.fx", "torch._inductor", "torch._dynamo")) for name in imports(path)), (
            path
        )


def test_only_the_backend_and_the_command_line_read_reports() -> None:
    for name, path in modules().items():
        if "report" in layers_imported(path):
            assert layer(name) in {"backend", "explanation", "debug", "saved", "preview", "__main__", "cli"}, path


def test_compiler_does_not_import_distributed_or_optim() -> None:
    for name, path in modules().items():
        if layer(name) not in {"distributed", "optim"}:
            assert not layers_imported(path) & {"distributed", "optim"}, path
    for path in files("distributed", "optim"):
        assert not layers_imported(path) & {"passes", "backend", "report"}, path


def test_no_cuda_only_package_at_module_top_level() -> None:
    """Kernels are Triton and import it; nothing imports them at its own top level, so that Triton may be missing."""
    for name, path in modules().items():
        found = imports(path, top_level=True)
        allowed = {"triton"} if layer(name) == "kernels" else set()
        assert not {module.split(".")[0] for module in found} & CUDA_ONLY - allowed, path
        if layer(name) != "kernels":
            assert not any(module.startswith("fp8compile.kernels") for module in found), path


def test_no_import_cycles() -> None:
    """Following top-level imports from any module never leads back to it."""
    ours = modules()
    edges = {name: {i for i in imports(path, top_level=True) if i in ours} - {name} for name, path in ours.items()}
    edges = {name: targets - {"fp8compile", "fp8compile.passes"} for name, targets in edges.items()}

    def reaches(name: str, seen: set[str]) -> None:
        for target in edges[name] - seen:
            seen.add(target)
            reaches(target, seen)

    for name in edges:
        seen: set[str] = set()
        reaches(name, seen)
        assert name not in seen, name


# --- What importing does ----------------------------------------------------------------------------------------------


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd="/")
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_the_package_does_not_import_inductor_or_dynamo() -> None:
    """They take seconds; ``Policy`` and ``Recipe`` need neither."""
    code = "import sys, fp8compile; fp8compile.Policy.all(); fp8compile.RECIPES; print(*sys.modules)"
    loaded = set(python(code).split())
    assert "fp8compile.policy" in loaded
    assert not loaded & {"torch._inductor.compile_fx", "torch._dynamo.eval_frame", "fp8compile.backend", "networkx"}
    assert "torch._inductor" not in loaded


def test_public_names_all_exist_and_others_do_not() -> None:
    code = (
        "import fp8compile\n"
        "print(all(getattr(fp8compile, name) is not None for name in fp8compile.__all__))\n"
        "print(hasattr(fp8compile, 'no_such_name'))"
    )
    assert python(code).split() == ["True", "False"]


def test_backend_is_found_by_its_name_without_importing_the_package() -> None:
    """The entry point, in a process that never mentions us; a Linear runs through it."""
    code = (
        "import sys, torch\n"
        "assert 'fp8compile' not in sys.modules\n"
        "print('fp8' in torch._dynamo.list_backends())\n"
        "model = torch.compile(torch.nn.Linear(32, 32), backend='fp8', options={'engine': 'eager', 'policy': 'all'})\n"
        "print(tuple(model(torch.randn(16, 32)).shape))\n"
        "print('fp8compile' in sys.modules)"
    )
    assert python(code).splitlines() == ["True", "(16, 32)", "True"]


# --- The package ------------------------------------------------------------------------------------------------------


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_with_modules_is_installed() -> None:
    settings = project()["tool"]["setuptools"]
    needed = {name.rsplit(".", 1)[0] if path.stem != "__init__" else name for name, path in modules().items()}
    assert needed <= set(settings["packages"])
    assert settings["package-dir"]["fp8compile.passes"] == "passes"


def test_wheel_contains_the_passes_under_our_name_and_the_entry_point(tmp_path: Path) -> None:
    """Built without network from the files of the repository; skipped where setuptools is too old to build it."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("needs setuptools 77")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in PACKAGES.values():
        for path in (*folder.rglob("*.py"), *folder.rglob("py.typed")):
            copy = source / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    build = f"import os; os.chdir({str(source)!r}); from setuptools import build_meta; build_meta.build_wheel('out')"
    python(build)
    (wheel,) = (source / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert {"fp8compile/passes/__init__.py", "fp8compile/passes/decide.py", "fp8compile/py.typed"} <= names
    assert not any(name.startswith("passes/") for name in names)
    assert not any(name.startswith(("tests/", "benchmarks/", "examples/")) for name in names)
    assert "fp8 = fp8compile.backend:fp8" in entry_points
