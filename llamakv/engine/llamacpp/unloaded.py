"""A model whose weights stay on disk: it tokenises and says what it is, and cannot evaluate anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llamakv.engine.llamacpp.dry_model import open_without_memory
from llamakv.engine.llamacpp.model import LlamaModel
from llamakv.engine.llamacpp.native import Pointer, load_failure, native_log
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.errors import EngineError, ModelFileError


class UnloadedModel(LlamaModel):
    """As ``LlamaModel``, without memory for the weights; no context can be opened over it."""

    def _load(self, path: Path, n_gpu_layers: int, on_progress: Callable[[float], bool] | None) -> Pointer:
        pointer = open_without_memory(path)
        if not pointer:
            raise ModelFileError(f"the engine cannot load {path}: {load_failure()}", path=str(path))
        self._log = native_log().lines
        return pointer

    def open_scheduler(self, *_: object, **__: object) -> LlamaScheduler:
        """Not possible: the engine would end the process at the first decode.

        Raises:
            EngineError: always.
        """
        raise EngineError("the model's weights are not loaded: nothing can be evaluated with it")
