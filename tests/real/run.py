"""Running a worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(do: str, *, module: str = "tests.real.worker", **job) -> dict:
    """Run one action in a process of its own and return what it found."""
    text = json.dumps({"do": do, **job}, default=str)
    done = subprocess.run(
        [sys.executable, "-m", module], input=text, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
