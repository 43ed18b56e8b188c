"""The rooms keep their import rules (DESIGN.md's table), and the wheel holds everything they need."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("compiler", "graphs", "runtime", "tools")

# Third-party packages a room may import anywhere, and the other rooms it may import.
PACKAGES = {
    "graphs": {"numpy", "torch", "transformers", "onnx", "onnx_ir", "onnxscript"},
    "runtime": {"numpy", "tokenizers", "jinja2", "onnxruntime", "tensorrt", "tensorrt_rtx", "cuda"},
}
OTHER_ROOMS = {"graphs": set(), "runtime": {"graphs"}, "compiler": {"graphs", "runtime"}}
LAZY_ROOMS = {"compiler/cli.py": {"tools"}}  # only inside functions: `speccompile train`, `speccompile zoo`


def source_files(room: str) -> list[Path]:
    return sorted(path for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("speccompile", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(path: Path) -> list[tuple[str, bool]]:
    """Dotted names the file imports, each with whether that happens at the top of the file."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: write imports in full"
                # The last part may be a module or a name inside one: readers of this list try both.
                found.extend((f"{child.module}.{alias.name}", top) for alias in child.names)
            visit(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(path.read_text("utf-8")), True)
    return found


def numpy_only_modules() -> set[str]:
    """Modules of `graphs` that import, directly or through each other, no third-party package but numpy."""
    names = {module_name(path): path for path in source_files("graphs")}
    needs = {name: {target for target, _ in imports(path)} for name, path in names.items()}

    def own(target: str) -> str | None:
        return next((name for name in (target, target.rpartition(".")[0]) if name in names), None)

    allowed = set(names)
    while True:
        bad = {
            name
            for name in allowed
            for target in needs[name]
            if (target.startswith("speccompile.") and own(target) not in allowed)
            or target.split(".")[0] not in sys.stdlib_module_names | {"numpy", "speccompile", "__future__"}
        }
        if not bad:
            return allowed
        allowed -= bad


def test_the_walk_sees_what_it_must() -> None:
    allowed = numpy_only_modules()
    assert {"speccompile.graphs", "speccompile.graphs.contract", "speccompile.graphs.tree"} <= allowed
    assert "speccompile.graphs.target" not in allowed, "target.py holds torch modules"


@pytest.mark.parametrize("room", ["graphs", "runtime", "compiler"])
def test_rooms_import_only_what_they_may(room: str) -> None:
    wrong = []
    for path in source_files(room):
        where = path.relative_to(ROOT).as_posix()
        for target, top in imports(path):
            first, _, rest = target.partition(".")
            if first == "speccompile":
                rooms = {room} | OTHER_ROOMS[room] | (set() if top else LAZY_ROOMS.get(where, set()))
                allowed = rest.split(".")[0] in rooms
            else:
                allowed = room not in PACKAGES or first in PACKAGES[room] | sys.stdlib_module_names
            if not allowed:
                wrong.append(f"{where} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_the_runtime_uses_only_the_numpy_modules_of_graphs() -> None:
    numpy_only = numpy_only_modules() - {"speccompile.graphs"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {target}"
        for path in source_files("runtime")
        for target, _ in imports(path)
        if target.startswith("speccompile.graphs") and not {target, target.rpartition(".")[0]} & numpy_only
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_the_runtime_loads_nothing_heavy() -> None:
    modules = [module_name(path) for path in source_files("runtime")]
    program = (
        "import importlib, sys\n"
        f"for name in {['speccompile.runtime', *modules]!r}: importlib.import_module(name)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    loaded = set(ast.literal_eval(run.stdout))
    assert "numpy" in loaded
    assert not loaded & {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf"}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy of the checkout: in place it would leave and reuse `build/lib`."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "build")
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    run = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_source_and_data_file(wheel_names: set[str]) -> None:
    expected = {
        f"speccompile/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".sh"
    }
    needed = {f"speccompile/{room}/py.typed" for room in ROOMS} | {"speccompile/graphs/named_trees.json"}
    assert needed <= expected
    assert {name for name in wheel_names if name.startswith("speccompile/")} == expected


def test_the_wheel_holds_the_licence_and_the_command(wheel_names: set[str]) -> None:
    names = {name.partition("/")[2] for name in wheel_names if name.partition("/")[0].endswith(".dist-info")}
    assert {"licenses/LICENSE", "entry_points.txt"} <= names
