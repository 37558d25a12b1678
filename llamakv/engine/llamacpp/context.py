"""One llama.cpp context with every call checked before it is made: a bad argument may abort the process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp.memory_log import ModelSizes, read_context
from llamakv.engine.llamacpp.native import Pointer, api, bare_reason, cache_type, memory_kind, native_log
from llamakv.engine.llamacpp.window_guard import WindowGuard
from llamakv.engine.memory import ContextMemory
from llamakv.errors import EngineError, NoRoomError, UsageError
from llamakv.records import MemoryKind

N_UBATCH = 256
"""Tokens in a decode call at most; n_batch is the same, because several small batches in one call gave wrong logits
on windowed models (engine-facts d5)."""

ABORTED = 2  # llama_decode's status after its abort callback said so (llama.h)
_FULL = 1
PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY (llama.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A sequence's part of a decode call: ``tokens`` at positions from ``p0`` on; logits of the last one if wanted."""

    seq_id: int
    tokens: Sequence[int]
    p0: int
    want_logits: bool


class NativeContext:
    """Cells for ``n_seq_max`` sequences in one unified memory. Close it with ``close``; not for use from two threads.

    ``adapters`` are native LoRA adapters with their scales. ``flash_attn`` is what the engine settled on. Windowed
    layers that have room for all cells keep them (``WindowGuard``), for which the engine has one sequence more.
    """

    def __init__(
        self,
        model: Pointer,
        memory: MemoryRequest,
        *,
        n_ctx: int,
        n_seq_max: int,
        n_threads: int,
        adapters: Sequence[tuple[Pointer, float]] = (),
    ) -> None:
        is_windowed = memory.swa_full and memory_kind(model) is MemoryKind.WINDOWED
        n_window = api.llama_model_n_swa(model) if is_windowed else 0
        params = api.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = N_UBATCH
        params.n_seq_max = n_seq_max + (n_window > 0)
        params.n_outputs_max = params.n_seq_max
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k, params.type_v = cache_type(memory.type_k), cache_type(memory.type_v)
        params.flash_attn_type = -1 if memory.flash_attn is None else int(memory.flash_attn)
        params.swa_full = memory.swa_full
        params.kv_unified = True
        params.rope_freq_base = memory.rope_freq_base
        params.rope_freq_scale = memory.rope_freq_scale
        params.no_perf = True
        self._abort: Callable[[], bool] | None = None
        self._abort_callback = api.ggml_abort_callback(self._asked_to_abort)
        self._no_callback = ctypes.cast(0, api.ggml_abort_callback)
        native_log().clear()
        self._pointer: Pointer = api.llama_init_from_model(model, params)
        if not self._pointer:
            raise _refused(memory, n_ctx)
        self._log = native_log().lines
        self.flash_attn = _resolved_flash_attn(memory)
        self._memory = api.llama_get_memory(self._pointer)
        self._guard = WindowGuard(self._memory, n_seq_max, n_window) if n_window else None
        self._token = np.zeros(N_UBATCH, np.int32)
        self._pos = np.zeros(N_UBATCH, np.int32)
        self._seq_id = np.zeros(N_UBATCH, np.int32)
        self._output = np.zeros(N_UBATCH, np.int8)
        self._batch = self._make_batch()
        self.n_ctx = int(api.llama_n_ctx(self._pointer))
        self.n_seq_max = n_seq_max
        self._set_adapters(adapters)

    def _make_batch(self) -> Pointer:
        """A llama_batch over our own arrays, each token in one sequence."""
        self._n_seq_ids = np.ones(N_UBATCH, np.int32)
        first = self._seq_id.ctypes.data
        self._seq_id_pointers = np.arange(first, first + 4 * N_UBATCH, 4, dtype=np.uintp)

        def pointer_to(array: np.ndarray, kind: type[ctypes._CDataType]) -> object:
            return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))

        return api.llama_batch(
            n_tokens=0,
            token=pointer_to(self._token, ctypes.c_int32),
            pos=pointer_to(self._pos, ctypes.c_int32),
            n_seq_id=pointer_to(self._n_seq_ids, ctypes.c_int32),
            seq_id=pointer_to(self._seq_id_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=pointer_to(self._output, ctypes.c_int8),
        )

    @property
    def pointer(self) -> Pointer:
        """The native context, for samplers."""
        return self._pointer

    def allocated(self, sizes: ModelSizes, *, is_dry: bool = False) -> ContextMemory:
        """What it took when it was opened; ``sizes`` are its model's, ``is_dry`` says that this was opened without
        memory."""
        return read_context(
            self._log,
            sizes,
            n_ctx=self.n_ctx,
            n_seq_max=self.n_seq_max + (self._guard is not None),
            flash_attn=self.flash_attn,
            is_dry=is_dry,
        )

    def _set_adapters(self, adapters: Sequence[tuple[Pointer, float]]) -> None:
        if not adapters:
            return
        pointers = (api.llama_adapter_lora_p_ctypes * len(adapters))(*(pointer for pointer, _ in adapters))
        scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
        if api.llama_set_adapters_lora(self._pointer, pointers, len(adapters), scales) != 0:
            self.close()
            raise EngineError("the engine refused the LoRA adapters")

    def close(self) -> None:
        """Free the cells; further calls on this object are errors of ours."""
        if self._pointer:
            api.llama_free(self._pointer)
            self._pointer = None

    # ------------------------------------------------------------ decode

    def decode(self, rows: Sequence[Rows], *, should_abort: Callable[[], bool] | None = None) -> bool:
        """Evaluate some tokens of one or several sequences, ``N_UBATCH`` in all at most; False if ``should_abort``
        stopped it: then dense memory may hold some of the tokens, and recurrent memory is not to be used any more
        (engine-facts i2). The logits are valid until the next call.

        Raises:
            NoRoomError: the cells are full; nothing was changed.
            EngineError: the engine refused the batch; nothing was changed.
        """
        n = 0
        for part in rows:
            self._check_seq(part.seq_id)
            end = n + len(part.tokens)
            assert n < end <= N_UBATCH
            self._token[n:end] = part.tokens
            self._pos[n:end] = np.arange(part.p0, part.p0 + end - n)
            self._seq_id[n:end] = part.seq_id
            self._output[n:end] = 0
            self._output[end - 1] = part.want_logits
            n = end
        assert n > 0
        self._batch.n_tokens = n
        if self._guard:
            self._guard.protect()
            for part in rows:
                self._guard.note(part.seq_id)
        if should_abort is None:
            status = api.llama_decode(self._pointer, self._batch)
        else:  # the engine asks for each node of its graph, which took 4 % of a small model's decode: only where needed
            self._abort = should_abort
            api.llama_set_abort_callback(self._pointer, self._abort_callback, None)
            try:
                status = api.llama_decode(self._pointer, self._batch)
            finally:
                api.llama_set_abort_callback(self._pointer, self._no_callback, None)
                self._abort = None
        if status == ABORTED:
            return False
        if status == _FULL:
            raise NoRoomError(f"no room for {n} tokens in a context of {self.n_ctx} cells")
        if status != 0:
            raise EngineError(
                f"the engine refused {n} tokens at position {rows[0].p0} (status {status}): "
                f"{native_log().last_warning()}"
            )
        return True

    def _asked_to_abort(self, _: object) -> bool:
        return self._abort is not None and self._abort()

    def logits(self, n_vocab: int, index: int = -1) -> memoryview:
        """Float32 logits of the token at ``index`` of the last decode call (-1: the last one that had any); valid
        until the next decode."""
        pointer = api.llama_get_logits_ith(self._pointer, index) if self._pointer else None
        if not pointer:
            raise EngineError("there are no logits: nothing was decoded since the state was restored")
        return np.ctypeslib.as_array(pointer, (n_vocab,)).data

    # ------------------------------------------------------------ sequences

    def copy(self, source: int, target: int, p0: int = -1, p1: int = -1) -> None:
        """Let ``target`` share ``source``'s cells of ``[p0, p1)`` (-1, -1: all)."""
        self._check_seq(source)
        self._check_seq(target)
        api.llama_memory_seq_cp(self._memory, source, target, p0, p1)
        if self._guard:
            self._guard.note(target)

    def remove(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Take cells of ``[p0, p1)`` from a sequence; False where the memory cannot (nothing changed then)."""
        self._check_seq(seq_id)
        is_removed = bool(api.llama_memory_seq_rm(self._memory, seq_id, p0, p1))
        if self._guard and is_removed:
            self._guard.note_removed(seq_id, p0)
        return is_removed

    def position_range(self, seq_id: int) -> tuple[int, int]:
        """Smallest and largest position present; (-1, -1) if the sequence is empty."""
        self._check_seq(seq_id)
        return (
            api.llama_memory_seq_pos_min(self._memory, seq_id),
            api.llama_memory_seq_pos_max(self._memory, seq_id),
        )

    # ------------------------------------------------------------ state

    def get_state(self, seq_id: int, flags: int = 0) -> memoryview:
        """The engine's bytes for a sequence, in a buffer of their own."""
        self._check_seq(seq_id)
        n_bytes = api.llama_state_seq_get_size_ext(self._pointer, seq_id, flags)
        buffer = np.empty(n_bytes, np.uint8)
        address = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n_got = api.llama_state_seq_get_data_ext(self._pointer, address, n_bytes, seq_id, flags)
        if n_got != n_bytes:
            raise EngineError(f"the engine gave {n_got} bytes of state where it had announced {n_bytes}")
        return buffer.data

    def set_state(self, seq_id: int, data: memoryview | bytes, flags: int = 0) -> bool:
        """Give a sequence its state; False unless the engine took every byte (the sequence is undefined then)."""
        self._check_seq(seq_id)
        view = np.frombuffer(data, np.uint8)
        address = view.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if self._guard:
            self._guard.protect()
            self._guard.note(seq_id)
        n_taken = api.llama_state_seq_set_data_ext(self._pointer, address, view.size, seq_id, flags)
        return bool(n_taken == view.size)

    def state_size(self, seq_id: int) -> int:
        """Bytes ``get_state`` would give."""
        self._check_seq(seq_id)
        return int(api.llama_state_seq_get_size_ext(self._pointer, seq_id, 0))

    def _check_seq(self, seq_id: int) -> None:
        if not self._pointer:
            raise ValueError("the context was closed")
        if not 0 <= seq_id < self.n_seq_max:
            raise ValueError(f"sequence {seq_id} is not one of 0 ... {self.n_seq_max - 1}")


def _refused(memory: MemoryRequest, n_ctx: int) -> Exception:
    reason = bare_reason(native_log().last_warning())
    if memory.flash_attn is False and memory.type_v not in ("f32", "f16", "bf16"):
        return UsageError(f"cache type {memory.type_v} for V needs flash attention", hint="use --flash-attn on")
    if "cache types" in reason:  # latent attention keeps no values, and wants one type for both
        return UsageError(
            f"cache types {memory.type_k} for K and {memory.type_v} for V do not go together: {reason}",
            hint=f"use --type-k {memory.type_k} --type-v {memory.type_k}",
        )
    if "alloc" in reason:
        return NoRoomError(f"there is not enough memory for a context of {n_ctx} cells: {reason}")
    return EngineError(
        f"the engine refused a context of {n_ctx} cells with cache types {memory.type_k} and {memory.type_v}: {reason}"
    )


def _resolved_flash_attn(memory: MemoryRequest) -> bool:
    if memory.flash_attn is not None:
        return memory.flash_attn
    line = native_log().find("Flash Attention")
    return line is None or "enabled" in line
