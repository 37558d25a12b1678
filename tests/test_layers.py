"""Imports go one way, and each outside library has one home (the table in the project's design)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import llamakv

ROOT = Path(llamakv.__file__).parent

MAY_IMPORT = {
    "errors": set(),
    "records": {"errors"},
    "store": {"records", "errors", "store"},
    "engine": {"records", "errors", "engine"},
    "ops": {"store", "engine", "records", "errors", "ops"},
    "server": {"ops", "store", "engine", "records", "errors", "server"},
    "cli": {"ops", "server", "records", "errors", "cli"},
}
ONLY_FOR_TYPES = {"cli": {"store", "engine"}}
HOMES = {
    "zstandard": ["store.codec"],
    "blake3": ["store.digests"],
    "fcntl": ["store.files", "store.locks"],
    "sqlite3": ["store.cache_database"],
    "llama_cpp": ["engine.llamacpp"],
    "jinja2": ["engine.prompt"],
    "psutil": ["engine.llamacpp", "ops.opening", "ops.process_memory", "ops.bench"],
    "matplotlib": ["cli.plots"],
    "plotext": ["cli.plots"],
    "rich": ["cli.render"],
    "platformdirs": ["cli.config"],
    "typer": ["cli.app", "cli.commands"],
    "prompt_toolkit": ["cli"],
    "starlette": ["server"],
    "uvicorn": ["server.run", "server.connections"],
    "prometheus_client": ["server.metrics"],
    "click": [],
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module, and whether it is imported for type checking only."""

    def visit(node: ast.AST, typing_only: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                yield from visit(child, True)
            elif isinstance(child, ast.Import):
                yield from ((alias.name, typing_only) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"relative import in {path}"
                yield from ((f"{child.module}.{alias.name}", typing_only) for alias in child.names)
            else:
                yield from visit(child, typing_only)

    return visit(ast.parse(path.read_text()), False)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    layer = name_of(path).split(".")[0]
    if layer not in MAY_IMPORT:
        return
    for module, typing_only in imports_of(path):
        parts = module.split(".")
        if parts[0] != "llamakv" or len(parts) < 2 or parts[1].startswith("__"):
            continue
        allowed = MAY_IMPORT[layer] | (ONLY_FOR_TYPES.get(layer, set()) if typing_only else set())
        assert parts[1] in allowed, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_library_is_imported_in_its_home_only(path: Path) -> None:
    for module, _ in imports_of(path):
        homes = HOMES.get(module.split(".")[0])
        if homes is not None:
            assert any(f"{name_of(path)}.".startswith(f"{home}.") for home in homes), f"{name_of(path)}: {module}"


def test_commands_that_need_no_engine_do_not_import_it() -> None:
    code = (
        "import sys, llamakv.cli.app, llamakv.ops.inspect, llamakv.ops.sessions, llamakv.ops.lineage, "
        "llamakv.ops.history, llamakv.ops.comparing, llamakv.ops.copying; "
        "print([m for m in ('llama_cpp', 'numpy', 'jinja2', 'prompt_toolkit') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
