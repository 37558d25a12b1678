"""Write completions/ anew: python -m tests.cli.regenerate"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "completions"
SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """What the program says its completion for a shell is."""
    done = subprocess.run(
        [sys.executable, "-m", "llamakv"],
        env={**os.environ, "_LLAMAKV_COMPLETE": f"source_{shell}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip() + "\n"


def file_of(shell: str) -> Path:
    """Where the completion for a shell is kept."""
    return FOLDER / f"llamakv.{shell}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in SHELLS:
        file_of(name).write_text(script(name), encoding="utf-8")
