"""The store keeps to itself, and each library has one home."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from llamakv import store

FOLDER = Path(store.__file__).parent
HOMES = {
    "zstandard": {"codec"},
    "blake3": {"digests"},
    "fcntl": {"files", "locks"},
    "mmap": {"digests", "page_cache"},
    "numpy": {"planes"},
    "sqlite3": {"cache_database"},
}


@pytest.mark.parametrize("module", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_only_what_it_may(module):
    tree = ast.parse(module.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            if name.startswith("llamakv"):
                assert name.startswith(("llamakv.store", "llamakv.records", "llamakv.errors"))
            elif (home := HOMES.get(name.split(".")[0])) is not None:
                assert module.stem in home
        if isinstance(node, ast.Attribute) and module.stem != "files":
            assert node.attr not in ("fsync", "rename", "replace_file", "ftruncate", "link", "unlink", "pwrite")
        assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print")
    assert len(module.read_text().splitlines()) <= 400


def test_listing_and_inspecting_do_not_import_numpy(tmp_path):
    script = (
        "import sys\n"
        "from llamakv.store.session_store import SessionStore\n"
        "entries = SessionStore(sys.argv[1]).list()\n"
        "assert len(entries) == 1 and entries[0].info, entries\n"
        "assert 'numpy' not in sys.modules and 'llama_cpp' not in sys.modules\n"
    )
    (tmp_path / "golden.bin").write_bytes((Path(__file__).parent / "golden" / "v1-hybrid.bin").read_bytes())
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=FOLDER.parents[1])
