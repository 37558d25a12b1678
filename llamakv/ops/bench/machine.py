"""Where and with what it is measured."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import psutil

from llamakv import __version__
from llamakv.engine.contract import ModelInfo
from llamakv.ops.bench.results import BenchedModel, Machine
from llamakv.ops.matching import FoundModel
from llamakv.records import EngineVersions


def describe_machine(versions: EngineVersions) -> Machine:
    """This machine, and the programs at work."""
    return Machine(
        processor=_processor(),
        n_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        llamakv=__version__,
        llama_cpp=f"{versions.binding} (llama.cpp {versions.llama_cpp}, {versions.backend})",
    )


def describe_model(found: FoundModel, info: ModelInfo) -> BenchedModel:
    """The model; ``n_bytes`` is the length of its file."""
    return BenchedModel(
        name=info.name,
        architecture=info.architecture,
        quantisation=info.quantisation,
        kind=info.kind.value,
        digest=found.digest,
        n_bytes=found.n_bytes,
        n_ctx_train=info.n_ctx_train,
    )


def _processor() -> str:
    """What the processor calls itself; its architecture where the system does not tell."""
    try:
        if psutil.MACOS:
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, subprocess.SubprocessError):
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
