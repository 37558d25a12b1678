"""A loaded model: weights, vocabulary, and what the file says of itself."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from llamakv.engine.contract import MemoryRequest, ModelInfo
from llamakv.engine.llamacpp.context import NativeContext
from llamakv.engine.llamacpp.gguf_header import GgufHeader, check_is_gguf
from llamakv.engine.llamacpp.memory_log import ModelSizes, logged_buffers, read_sizes
from llamakv.engine.llamacpp.native import (
    Pointer,
    api,
    attention_rotation,
    bare_reason,
    block_of,
    engine_versions,
    load_failure,
    memory_kind,
    model_number,
    model_text,
    native_log,
    require_functions,
    tiles_are_safe,
)
from llamakv.engine.llamacpp.sampler import TokenChooser
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.engine.llamacpp.sequence import LlamaSequence
from llamakv.engine.llamacpp.shared import N_SEQ_MAX, SharedContext
from llamakv.engine.memory import DeviceBuffer
from llamakv.engine.room import no_room
from llamakv.errors import EngineError, ModelFileError
from llamakv.records import EngineVersions, MemorySettings, Sampling

_NO_VOCABULARY = 0  # LLAMA_VOCAB_TYPE_NONE in llama.h
N_PARALLEL_MAX = N_SEQ_MAX - 2
"""Runs at the same time at most, beside the root and the scratch sequence."""


class LlamaModel:
    """``Model`` of the contract. ``n_threads`` is used for prefill and decode alike: another count may give other
    bits (engine-facts e2)."""

    def __init__(
        self,
        path: Path,
        *,
        n_gpu_layers: int = 0,
        adapters: Sequence[tuple[Path, float]] = (),
        on_log: Callable[[str], None] | None = None,
        on_progress: Callable[[float], bool] | None = None,
    ) -> None:
        """Load the weights. ``on_log`` gets the engine's own log lines; ``on_progress`` the part done, 0 ... 1, and
        returns False to stop.

        Raises:
            ModelFileError: not a GGUF file, no vocabulary, an architecture the engine does not know, or an
                adapter that does not belong to the model.
        """
        require_functions()
        native_log().sink = on_log
        check_is_gguf(path)
        self._path = path
        self._adapters: list[tuple[Pointer, float]] = []
        self._contexts: list[LlamaScheduler] = []
        self._pointer = self._load(path, n_gpu_layers, on_progress)
        try:
            self._vocab = api.llama_model_get_vocab(self._pointer)
            self._info = self._read_info(path)
            self._n_ctx_original = self._read_n_ctx_original(path)
            for adapter, scale in adapters:
                self._add_adapter(adapter, scale)
        except BaseException:
            self.close()
            raise
        offloads = n_gpu_layers != 0 and api.llama_supports_gpu_offload()
        self._versions = engine_versions("gpu" if offloads else "cpu")
        self._settings: MemorySettings | None = None

    def _load(self, path: Path, n_gpu_layers: int, on_progress: Callable[[float], bool] | None) -> Pointer:
        params = api.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = tiles_are_safe()
        callback = api.llama_progress_callback(lambda part, _: True if on_progress is None else on_progress(part))
        params.progress_callback = callback
        native_log().clear()
        pointer = api.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise ModelFileError(f"the engine cannot load {path}: {load_failure()}", path=str(path))
        self._log = native_log().lines
        return pointer

    def _add_adapter(self, path: Path, scale: float) -> None:
        check_is_gguf(path)
        pointer = api.llama_adapter_lora_init(self._pointer, os.fsencode(path))
        if not pointer:
            reason = native_log().last_warning()
            raise ModelFileError(
                f"the engine cannot use the LoRA adapter {path}: {bare_reason(reason)}", path=str(path)
            )
        self._adapters.append((pointer, scale))

    def _read_info(self, path: Path) -> ModelInfo:
        model, vocab = self._pointer, self._vocab
        if api.llama_vocab_type(vocab) == _NO_VOCABULARY:
            raise ModelFileError(f"{path} has no vocabulary: text cannot be turned into tokens", path=str(path))
        if not api.llama_model_has_decoder(model) or api.llama_model_is_diffusion(model):
            raise ModelFileError(f"{path} is not a model that continues text", path=str(path))
        template = api.llama_model_chat_template(model, None)
        return ModelInfo(
            architecture=model_text(model, "general.architecture") or "unknown",
            name=model_text(model, "general.name") or path.stem,
            quantisation=(api.llama_ftype_name(api.llama_model_ftype(model)) or b"unknown").decode(),
            kind=memory_kind(model),
            n_ctx_train=api.llama_model_n_ctx_train(model),
            n_vocab=api.llama_vocab_n_tokens(vocab),
            n_layer=api.llama_model_n_layer(model),
            n_window=api.llama_model_n_swa(model),
            n_bytes=api.llama_model_size(model),
            template=template.decode("utf-8", "replace") if template else None,
            bos=self._text_of(api.llama_vocab_bos(vocab)),
            eos=self._text_of(api.llama_vocab_eos(vocab)),
            adds_bos=bool(api.llama_vocab_get_add_bos(vocab)),
        )

    def _read_n_ctx_original(self, path: Path) -> int | None:
        """The context size beyond which the model's other set of rope factors applies; None if it has no two sets."""
        n_ctx = model_number(self._pointer, "{arch}.rope.scaling.original_context_length")
        if n_ctx is None:
            return None
        with GgufHeader(path) as header:
            return n_ctx if header.has_tensor("rope_factors_long.weight") else None

    def _text_of(self, token: int) -> str:
        return self.token_bytes(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    # ------------------------------------------------------------ facts

    @property
    def info(self) -> ModelInfo:
        """What the file says of itself."""
        return self._info

    @property
    def versions(self) -> EngineVersions:
        """Who evaluates: versions and backend."""
        return self._versions

    @property
    def settings(self) -> MemorySettings:
        """The settings of the context last opened, resolved."""
        assert self._settings is not None, "no context was opened"
        return self._settings

    @property
    def weights_by_device(self) -> tuple[DeviceBuffer, ...]:
        """Where the weights lie; see the contract."""
        return logged_buffers(self._log, "model")

    def _sizes(self) -> ModelSizes:
        return read_sizes(
            self._log,
            n_vocab=self._info.n_vocab,
            meta=lambda key: model_number(self._pointer, f"{{arch}}.{key}"),
        )

    def tokenizer_digest(self) -> str:
        """SHA-256 over every token's text and attributes, and the special tokens' ids, in hex."""
        vocab, digest = self._vocab, hashlib.sha256()
        for token in range(self._info.n_vocab):
            text = api.llama_vocab_get_text(vocab, token)
            digest.update(struct.pack("<II", len(text), api.llama_vocab_get_attr(vocab, token)) + text)
        special = (api.llama_vocab_bos, api.llama_vocab_eos, api.llama_vocab_eot, api.llama_vocab_sep)
        digest.update(struct.pack("<4i?", *(ask(vocab) for ask in special), self._info.adds_bos))
        return digest.hexdigest()

    # ------------------------------------------------------------ text

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text.

        Raises:
            EngineError: the text is too long for the engine's 32-bit counts.
        """
        encoded = text.encode("utf-8", "replace")
        n_max = len(encoded) + 16
        if n_max >= 2**31:
            raise EngineError(f"a text of {len(encoded)} bytes is more than the engine can tokenise at once")
        array = (ctypes.c_int32 * n_max)()
        n = api.llama_tokenize(self._vocab, encoded, len(encoded), array, n_max, add_special, parse_special)
        if n < 0:
            raise EngineError(f"the engine cannot tokenise this text (status {n})")
        return list(array[:n])

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; ``b""`` for control tokens unless ``special``."""
        if not 0 <= token < api.llama_vocab_n_tokens(self._vocab):
            raise ValueError(f"token {token} is not in the vocabulary")
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = api.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def is_end(self, token: int) -> bool:
        """Whether the token ends a reply."""
        return bool(api.llama_vocab_is_eog(self._vocab, token))

    def check_sampling(self, sampling: Sampling) -> None:
        """Try whether the engine takes these parameters; see the contract.

        Raises:
            UsageError: a grammar that cannot be read, or a biased token that does not exist.
        """
        TokenChooser(self._vocab, self._info.n_vocab, sampling, ()).close()

    # ------------------------------------------------------------ contexts

    def open_sequence(self, memory: MemoryRequest, *, n_ctx_min: int, n_ctx_max: int, n_threads: int) -> LlamaSequence:
        """A context with room for one sequence, growing as needed; see the contract.

        Raises:
            NoRoomError: there is not enough memory.
            UsageError: cache types the engine does not take.
        """
        scheduler = self.open_scheduler(
            memory, n_parallel=0, n_ctx_min=n_ctx_min, n_ctx_max=n_ctx_max, n_cells_max=n_ctx_max, n_threads=n_threads
        )
        return scheduler.root

    def open_scheduler(
        self,
        memory: MemoryRequest,
        *,
        n_parallel: int,
        n_ctx_min: int,
        n_ctx_max: int,
        n_cells_max: int | None = None,
        n_kept: int = 0,
        is_within_memory: bool = False,
        later_share: float = 0.0,
        n_threads: int,
    ) -> LlamaScheduler:
        """A context for a sequence and ``n_parallel`` runs beside it; see the contract.

        Raises:
            NoRoomError: there is not enough memory.
            UsageError: cache types the engine does not take.
            ValueError: more sequences than llama.cpp can have.
        """
        if not (n_parallel >= 0 and n_kept >= 0 and n_parallel + n_kept <= N_PARALLEL_MAX):
            n = n_parallel + n_kept
            raise ValueError(f"{n} sequences at the same time: 0 ... {N_PARALLEL_MAX} are possible")
        if n_ctx_min > n_ctx_max:
            raise no_room(needed=n_ctx_min, used=0, limit=n_ctx_max, n_ctx_train=self._info.n_ctx_train)
        if block_of(memory.type_k)[0] > 1 or block_of(memory.type_v)[0] > 1:
            self._sizes().check(memory)
        resolved = memory

        def open_context(n_ctx: int, n_seq_max: int) -> NativeContext:
            return NativeContext(
                self._pointer,
                resolved,
                n_ctx=n_ctx,
                n_seq_max=n_seq_max,  # with the scratch sequence
                n_threads=n_threads,
                adapters=self._adapters,
            )

        shared = SharedContext(
            open_context,
            sizes=self._sizes,
            info=self._info,
            swa_full=memory.swa_full,
            n_seq=n_parallel + n_kept + 1,  # with the root
            n_seq_first=n_parallel + min(n_kept, n_parallel) + 1,
            n_ctx_min=n_ctx_min,
            n_ctx_floor=self._n_ctx_floor(),
            n_cells_max=n_ctx_max * (n_parallel + 1) if n_cells_max is None else n_cells_max,
        )
        scheduler = LlamaScheduler(
            shared,
            info=self._info,
            vocab=self._vocab,
            is_end=self.is_end,
            token_bytes=self.token_bytes,
            n_parallel=n_parallel,
            n_ctx_max=n_ctx_max,
            fills_memory=n_cells_max is None or is_within_memory,
            is_for_many=n_kept > 0,
            later_share=later_share,
        )
        resolved = replace(memory, flash_attn=scheduler.flash_attn)
        self._contexts.append(scheduler)
        self._settings = MemorySettings(
            type_k=memory.type_k,
            type_v=memory.type_v,
            flash_attn=scheduler.flash_attn,
            swa_full=memory.swa_full,
            rope_freq_base=memory.rope_freq_base,
            rope_freq_scale=memory.rope_freq_scale,
            attn_rot=attention_rotation(),
        )
        return scheduler

    def _n_ctx_floor(self) -> int:
        """The smallest context that leaves cells their meaning. Models with two sets of rope factors take the long ones
        in any *context* larger than the original one (llama_model::get_rope_factors): a context that grew past that
        would take its cells for something else, so it begins beyond."""
        return 0 if self._n_ctx_original is None else self._n_ctx_original + 1

    def close(self) -> None:
        """Free the sequences, the adapters and the weights."""
        for scheduler in self._contexts:
            scheduler.close()
        self._contexts.clear()
        self._adapters.clear()  # the model owns them (llama.h)
        if self._pointer:
            api.llama_model_free(self._pointer)
            self._pointer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
