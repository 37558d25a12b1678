"""Processes that save, resume, fork, remove and collect in one store and are killed all the time lose nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llamakv.store.collector import collect
from llamakv.store.session_file import SessionReader, extend_session, read_session, verify_session
from llamakv.store.store_folder import make_store
from tests.store import kills
from tests.store.at_rest import left_over, referenced, there

SHORT_S = 4
LONG_S = 120


def run(root, seconds, seed):
    make_store(root)
    command = [sys.executable, "-m", "tests.store.kills", root, str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    answer = json.loads(done.stdout)
    print(json.dumps(answer["counts"]), answer["killed"])
    assert answer["failed"] == []
    return answer


def check_goes_on(root):
    """Every session is whole and goes on; collecting leaves what they refer to and nothing else."""
    for path in sorted(root.glob("*.bin")):
        assert verify_session(path).is_sound
        with SessionReader(path) as reader:
            kills.check(reader)
    collect(root)
    assert there(root) == referenced(root)
    assert left_over(root) == []
    for i, path in enumerate(sorted(root.glob("*.bin"))):
        base = read_session(path)
        tokens, sections = kills.grown(base.record.tokens, 20, i)
        extend_session(base, kills.record_of(tokens, path.stem), keep=base.sections, new=sections)
        with SessionReader(path) as reader:
            assert reader.info.record.tokens == tokens
            kills.check(reader)
    assert collect(root).n_objects == 0
    assert there(root) == referenced(root)
    assert left_over(root) == []


@pytest.mark.slow
def test_for_seconds(tmp_path):
    root = tmp_path / "store"
    answer = run(root, SHORT_S, 1)
    check_goes_on(root)
    assert answer["killed"] > SHORT_S


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2])
def test_for_minutes(tmp_path, seed):
    root = tmp_path / "store"
    answer = run(root, LONG_S, seed)
    check_goes_on(root)
    assert answer["killed"] > 5 * LONG_S
    for name in ("save", "extend", "fork", "resume", "verify", "pin", "remove", "prune", "move", "gc"):
        assert answer["counts"].get(f"{name} done", 0) > 10, name
