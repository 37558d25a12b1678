"""What contexts over a model file would take, asked of the engine itself (a dry run), in a process of its own.

A damaged header can make the engine abort its process (of 400 flipped bytes in the header of a latent-attention model,
23 did): there it ends a process that holds nothing, and is told as an error. What the dry run takes is gone with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp.dry_model import DryModel, header_facts
from llamakv.engine.llamacpp.gguf_header import GgufHeader
from llamakv.engine.llamacpp.native import api, native_log, require_functions
from llamakv.engine.llamacpp.shared import N_SEQ_MAX
from llamakv.engine.memory import CacheKind, ContextMemory, ModelFacts, TokenMemory
from llamakv.engine.memory_limit import within_limits
from llamakv.errors import EngineError, LlamakvError, NoRoomError

_N_MANY = 1 << 16  # cells among which the two decimals of a logged size do not matter
_CELL_BYTES = 160  # what the engine itself keeps for a cell: measured 53 in one cache, and a model has up to three
_END_S = 5.0


class LlamaEstimator:
    """``MemoryEstimator`` of the contract; see the top of this module."""

    def __init__(self, path: Path, *, on_log: Callable[[str], None] | None = None) -> None:
        """Open a file; ``on_log`` gets the engine's own log lines.

        Raises:
            ModelFileError: it cannot be read, is not a GGUF file, or its header is damaged or cut off.
        """
        require_functions()
        self._path = path
        self._on_log = on_log
        with GgufHeader(path) as header:
            self._facts = header_facts(header, path)
        self._worker = _Worker(path, self._facts)
        try:
            self._facts = self._receive()
        except EngineError as error:
            self.close()
            self._facts = replace(self._facts, unknown=error.message)
        except BaseException:
            self.close()
            raise

    def _receive(self) -> Any:
        while True:
            kind, content = self._worker.receive()
            if kind == "log":
                if self._on_log is not None:
                    self._on_log(content)
            elif kind == "error":
                raise content
            else:
                return content

    @property
    def facts(self) -> ModelFacts:
        """What the file says."""
        return self._facts

    def estimate(self, memory: MemoryRequest, *, n_ctx: int, n_parallel: int) -> ContextMemory:
        """What a context would take; see the contract. The engine rounds ``n_ctx`` up.

        Raises:
            UsageError: cache types the engine does not take, or not together.
            EngineError: a model it cannot run, or another refusal.
            NoRoomError: there is not even the memory to ask: the engine keeps a little for each cell.
            ValueError: no cells, or more sequences than llama.cpp can have.
        """
        if not 0 <= n_parallel <= N_SEQ_MAX - 2 or not 0 < n_ctx < 1 << 31:
            raise ValueError(f"a context of {n_ctx} cells for {n_parallel} runs cannot be")
        if self._facts.unknown is not None:
            raise EngineError(f"the engine cannot run {self._path}: {self._facts.unknown}")
        n_free = within_limits(psutil.virtual_memory().available)
        if n_ctx * _CELL_BYTES > n_free:
            raise NoRoomError(
                f"asking about {n_ctx} cells takes {n_ctx * _CELL_BYTES} bytes, {n_free} bytes of memory are free",
                needed=n_ctx * _CELL_BYTES,
                free=n_free,
            )
        self._worker.send((memory, n_ctx, n_parallel + 2))  # the root and the scratch sequence
        result = self._receive()
        assert isinstance(result, ContextMemory)
        return result

    def per_token(self, memory: MemoryRequest) -> TokenMemory:
        """What a token and a sequence take; see the contract.

        Raises:
            UsageError, EngineError: as ``estimate``.
        """
        context = self.estimate(memory, n_ctx=_N_MANY, n_parallel=1)
        growing = [
            part.n_bytes
            for part in context.parts
            if part.kind is CacheKind.FULL or (part.kind is CacheKind.WINDOWED and memory.swa_full)
        ]
        return TokenMemory(
            kv_bytes_per_token=round(sum(growing) / context.n_ctx),
            recurrent_bytes_per_sequence=round(context.recurrent_bytes / context.n_seq_max),
        )

    def close(self) -> None:
        """End the process."""
        self._worker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """The process that asks the engine: a copy of this one where that may be, made in milliseconds, else a new one."""

    def __init__(self, path: Path, header: ModelFacts) -> None:
        is_copy = _may_be_copied()
        kind = multiprocessing.get_context("fork").Process if is_copy else multiprocessing.get_context("spawn").Process
        self._connection, theirs = multiprocessing.Pipe()
        ours = self._connection if is_copy else None
        self._process = kind(target=_work, args=(theirs, ours, path, header), daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until it knows what to do with it
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def send(self, message: object) -> None:
        """Ask it something."""
        with contextlib.suppress(OSError):  # it has ended, which ``receive`` tells
            self._connection.send(message)

    def receive(self) -> tuple[str, Any]:
        """What it says next: a kind and its content.

        Raises:
            EngineError: it has ended, or was.
        """
        try:
            kind, content = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_END_S)
            raise EngineError(f"the engine gave up on this file ({_ended(self._process.exitcode)})") from None
        if kind == "crashed":
            raise RuntimeError(f"the dry run failed:\n{content}")
        return str(kind), content

    def end(self) -> None:
        """End it; it holds nothing that could be lost."""
        self._connection.close()
        self._process.kill()
        self._process.join()


def _may_be_copied() -> bool:
    """Not where system libraries or a driver of a GPU would not work in the copy."""
    return sys.platform == "linux" and not api.llama_supports_gpu_offload()


def _ended(status: int | None) -> str:
    if status is not None and status < 0 and -status in signal.valid_signals():
        return signal.Signals(-status).name
    return f"status {status}"


# ---------------------------------------------------------------- the other side


def _work(connection: Connection, ours: Connection | None, path: Path, header: ModelFacts) -> None:
    """Open the file, send its facts, then answer requests until nobody can ask any more."""
    if ours is not None:
        ours.close()  # so that the other process's end is seen here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the other one ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    native_log().sink = lambda line: connection.send(("log", line))
    callback = _tell_of_abort(connection)
    try:
        model = DryModel(path)
        connection.send(("answer", model.complete(header)))
        while True:
            memory, n_ctx, n_seq_max = connection.recv()
            try:
                connection.send(("answer", model.estimate(memory, n_ctx=n_ctx, n_seq_max=n_seq_max)))
            except LlamakvError as error:
                connection.send(("error", error))
    except LlamakvError as error:
        connection.send(("error", error))
    except (EOFError, OSError):
        pass
    except BaseException:
        connection.send(("crashed", traceback.format_exc()))
    del callback


def _tell_of_abort(connection: Connection) -> object:
    """Have the engine call us before it aborts the process; keep what this returns meanwhile."""
    from llama_cpp import _ggml

    def tell(message: bytes) -> None:
        _, _, reason = message.decode("utf-8", "replace").strip().rpartition("/")  # without the path of its source
        connection.send(("error", EngineError(f"the engine gave up: {reason}")))
        os._exit(1)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(tell)
    if hasattr(_ggml.libggml, "ggml_set_abort_callback"):
        _ggml.libggml.ggml_set_abort_callback(callback)
    return callback
