"""A model file opened in this process without memory for its weights, and contexts over it without memory for their
cells (a dry run). A damaged header may make the engine abort the process: see ``dry_run``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp.context import NativeContext
from llamakv.engine.llamacpp.gguf_header import GgufHeader
from llamakv.engine.llamacpp.memory_log import ModelSizes, read_sizes
from llamakv.engine.llamacpp.native import (
    Pointer,
    api,
    load_failure,
    memory_kind,
    model_number,
    model_text,
    native_log,
    tiles_are_safe,
)
from llamakv.engine.memory import CacheKind, CachePart, ContextMemory, LayerFacts, ModelFacts
from llamakv.errors import EngineError

_LOAD_NOTHING = 0  # llama_load_mode in llama.h; the others abort without memory (engine-facts l)
_N_PROBE = 1024  # cells of the context that shows which layer keeps what; any number does


class DryModel:
    """The engine's view of a model file. Not for use from two threads."""

    def __init__(self, path: Path) -> None:
        """Open a file.

        Raises:
            EngineError: the engine cannot run it, with its reason.
        """
        self._pointer: Pointer = open_without_memory(path)
        if not self._pointer:
            raise EngineError(load_failure())
        if not api.llama_model_has_decoder(self._pointer) or api.llama_model_is_diffusion(self._pointer):
            raise EngineError("it is not a model that continues text")
        self._sizes: ModelSizes = read_sizes(
            native_log().lines,
            n_vocab=api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._pointer)),
            meta=lambda key: model_number(self._pointer, f"{{arch}}.{key}"),
        )

    def complete(self, header: ModelFacts) -> ModelFacts:
        """What the header says, with what the engine makes of it.

        Raises:
            EngineError: it refuses even a small context.
        """
        context = self.estimate(MemoryRequest(), n_ctx=_N_PROBE, n_seq_max=3)
        return _engine_facts(self._pointer, self._sizes, header, context)

    def estimate(self, memory: MemoryRequest, *, n_ctx: int, n_seq_max: int) -> ContextMemory:
        """What a context would take. Real memory is used for recurrent states and the output buffer, and some 60 bytes
        for each cell of each cache, until this returns.

        Raises:
            UsageError, EngineError, NoRoomError: the engine refuses it.
        """
        self._sizes.check(memory)
        context = NativeContext(self._pointer, memory, n_ctx=n_ctx, n_seq_max=n_seq_max, n_threads=1)
        try:
            return context.allocated(self._sizes, is_dry=True)
        finally:
            context.close()


def open_without_memory(path: Path) -> Pointer:
    """A native model without its weights; null where the engine refuses it (``load_failure`` tells why)."""
    params = api.llama_model_default_params()
    params.no_alloc = True
    params.load_mode = _LOAD_NOTHING
    params.n_gpu_layers = 0
    params.use_extra_bufts = tiles_are_safe()
    native_log().clear()
    return api.llama_model_load_from_file(os.fsencode(path), params)


def header_facts(header: GgufHeader, path: Path) -> ModelFacts:
    """What a file's header says by itself; of a file in several parts, not the sizes of all its tensors."""
    architecture = header.text("general.architecture") or "unknown"

    def number(key: str) -> int | None:
        return header.number(f"{architecture}.{key}")

    file_type = header.number("general.file_type")
    name = None if file_type is None else api.llama_ftype_name(file_type)
    is_whole = (header.number("split.count") or 1) == 1
    return ModelFacts(
        architecture=architecture,
        name=header.text("general.name") or path.stem,
        quantisation=None if name is None else name.decode(),
        unknown=None,
        kind=None,
        n_params=header.tensor_elements if is_whole else None,
        weights_bytes=header.tensor_bytes if is_whole else None,
        n_ctx_train=number("context_length"),
        n_vocab=header.length("tokenizer.ggml.tokens") or number("vocab_size"),
        n_embd=number("embedding_length"),
        n_layer=number("block_count"),
        n_window=number("attention.sliding_window"),
        key_length=number("attention.key_length"),
        value_length=number("attention.value_length"),
        latent_length=number("attention.kv_lora_rank") if number("attention.key_length_mla") else None,
        layers=(),
    )


def _engine_facts(model: Pointer, sizes: ModelSizes, header: ModelFacts, context: ContextMemory) -> ModelFacts:
    n_layer = api.llama_model_n_layer(model)
    return replace(
        header,
        architecture=model_text(model, "general.architecture") or "unknown",
        quantisation=(api.llama_ftype_name(api.llama_model_ftype(model)) or b"unknown").decode(),
        kind=memory_kind(model),
        n_params=api.llama_model_n_params(model),
        weights_bytes=api.llama_model_size(model),
        n_ctx_train=api.llama_model_n_ctx_train(model),
        n_vocab=sizes.n_vocab,
        n_embd=api.llama_model_n_embd(model),
        n_layer=n_layer,
        n_window=api.llama_model_n_swa(model),
        key_length=sizes.key_length or None,
        value_length=sizes.value_length or None,
        layers=tuple(layer_facts(i, sizes, context.parts) for i in range(n_layer)),
    )


def layer_facts(index: int, sizes: ModelSizes, parts: tuple[CachePart, ...]) -> LayerFacts:
    """What one layer keeps in a context's caches."""
    kept = {part.kind for part in parts if index in part.layers}
    has_attention = sizes.n_head_kv[index] > 0 and kept != {CacheKind.RECURRENT}
    return LayerFacts(
        index=index,
        kinds=tuple(kind for kind in CacheKind if kind in kept),
        n_head=sizes.n_head[index] if has_attention else 0,
        n_head_kv=sizes.n_head_kv[index] if has_attention else 0,
    )
