"""llama_cpp, its log, its versions, its numbers, and what it says of a model. Nothing here opens one."""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from collections.abc import Callable
from importlib import metadata
from typing import Any

import llama_cpp.llama_cpp as api

from llamakv.errors import UsageError
from llamakv.records import EngineVersions, MemoryKind

__all__ = [
    "CACHE_TYPES",
    "NEEDED",
    "NativeLog",
    "Pointer",
    "api",
    "attention_rotation",
    "bare_reason",
    "block_of",
    "cache_type",
    "engine_versions",
    "load_failure",
    "memory_kind",
    "model_number",
    "model_text",
    "native_log",
    "require_functions",
    "tiles_are_safe",
]

Pointer = Any
"""A native object; ctypes gives them as plain integers or pointers."""

CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
"""Cache types llama.cpp takes: names and their numbers in ggml.h (ggml_type)."""

_DEBUG, _WARN = 1, 3  # ggml_log_level in ggml.h
_N_KEPT_LINES = 4000  # a line for each layer of each cache, beside some hundred others
_PLACES = (b"llama_kv_cache: layer", b"llama_memory_recurrent", b"llama_dsv4_comp_state: layer")
"""How debug lines begin that say where a layer's cells lie; the others are a line for each node of each graph."""


def cache_type(name: str) -> int:
    """llama.cpp's number for a cache type.

    Raises:
        UsageError: no such type.
    """
    if name not in CACHE_TYPES:
        raise UsageError(f"unknown cache type {name!r}", hint=f"one of: {', '.join(CACHE_TYPES)}")
    return CACHE_TYPES[name]


class NativeLog:
    """Receives the engine's log lines: hands them to ``sink`` if there is one, and keeps the latest to look things
    up in. There is one for the process, since llama.cpp has one log."""

    def __init__(self) -> None:
        self.sink: Callable[[str], None] | None = None
        self._lines: deque[str] = deque(maxlen=_N_KEPT_LINES)
        self._warnings: deque[str] = deque(maxlen=8)
        self._callback = api.llama_log_callback(self._take)
        api.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, text: bytes, _: object) -> None:
        if level <= _DEBUG:
            if text.startswith(_PLACES):
                self._lines.append(text.decode("utf-8", "replace"))
            return
        line = text.decode("utf-8", "replace")
        self._lines.append(line)
        if level == _WARN or level == _WARN + 1:
            self._warnings.append(line.strip())
        if self.sink is not None:
            self.sink(line)

    def clear(self) -> None:
        """Forget the lines so far."""
        self._lines.clear()
        self._warnings.clear()

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines since they were last cleared, the latest few thousand."""
        return tuple(self._lines)

    def find(self, part: str) -> str | None:
        """The latest line that contains ``part``."""
        return next((line.strip() for line in reversed(self._lines) if part in line), None)

    def last_warning(self) -> str:
        """The latest warning or error; empty if there was none."""
        return self._warnings[-1] if self._warnings else ""


@functools.cache
def native_log() -> NativeLog:
    """The process's log receiver, installed on first use."""
    return NativeLog()


NEEDED = """
    LLAMA_STATE_SEQ_VERSION ggml_abort_callback llama_adapter_lora_init llama_adapter_lora_p_ctypes llama_batch
    llama_context_default_params llama_decode llama_free llama_ftype_name llama_get_logits_ith llama_get_memory
    llama_init_from_model llama_log_callback llama_log_set llama_logit_bias llama_memory_seq_cp
    llama_memory_seq_pos_max llama_memory_seq_pos_min llama_memory_seq_rm llama_model_chat_template
    llama_model_default_params llama_model_free llama_model_ftype llama_model_get_vocab llama_model_has_decoder
    llama_model_is_diffusion llama_model_is_hybrid llama_model_is_recurrent llama_model_load_from_file
    llama_model_meta_val_str llama_model_n_ctx_train llama_model_n_embd llama_model_n_layer llama_model_n_params
    llama_model_n_swa llama_model_size
    llama_n_ctx llama_progress_callback llama_sampler_accept llama_sampler_apply llama_sampler_chain_add
    llama_sampler_chain_default_params llama_sampler_chain_init llama_sampler_chain_n llama_sampler_chain_remove
    llama_sampler_free llama_sampler_init_dist llama_sampler_init_grammar llama_sampler_init_greedy
    llama_sampler_init_logit_bias llama_sampler_init_min_p llama_sampler_init_penalties llama_sampler_init_temp
    llama_sampler_init_top_k llama_sampler_init_top_p llama_sampler_sample llama_set_abort_callback
    llama_set_adapters_lora llama_state_seq_get_data_ext llama_state_seq_get_size_ext llama_state_seq_set_data_ext
    llama_supports_gpu_offload llama_token_data llama_token_data_array llama_token_to_piece llama_tokenize
    llama_version llama_vocab_bos llama_vocab_eos llama_vocab_eot llama_vocab_get_add_bos llama_vocab_get_attr
    llama_vocab_get_text llama_vocab_is_eog llama_vocab_n_tokens llama_vocab_sep llama_vocab_type
""".split()  # noqa: SIM905
"""All that llamakv takes from the binding; a test compares the list with the code."""


def require_functions() -> None:
    """Check that the binding has what llamakv calls.

    Raises:
        UsageError: a function is missing; names the versions that are supported.
    """
    missing = [name for name in NEEDED if not hasattr(api, name)]
    if missing:
        have = metadata.version("llama-cpp-python")
        raise UsageError(
            f"llama-cpp-python {have} is not supported: it lacks {missing[0]} (need 0.3.36 or later, before 0.4)",
            hint='pip install "llama-cpp-python>=0.3.36,<0.4"',
        )


def engine_versions(backend: str) -> EngineVersions:
    """Versions of the engine in this process, for the record of a session."""
    return EngineVersions(
        binding=metadata.version("llama-cpp-python"),
        llama_cpp=api.llama_version().decode(),
        commit=_ggml_commit(),
        state_version=api.LLAMA_STATE_SEQ_VERSION,
        backend=backend,
    )


def _ggml_commit() -> str:
    from llama_cpp import _ggml

    function = getattr(_ggml.libggml, "ggml_commit", None)
    if function is None:
        return "unknown"
    function.restype = ctypes.c_char_p
    return str(function().decode())


@functools.cache
def block_of(type_name: str) -> tuple[int, int]:
    """How many numbers a block of a type holds, and the bytes it takes."""
    from llama_cpp import _ggml

    blocks, sizes = _ggml.libggml.ggml_blck_size, _ggml.libggml.ggml_type_size
    blocks.restype, blocks.argtypes = ctypes.c_int64, [ctypes.c_int]
    sizes.restype, sizes.argtypes = ctypes.c_size_t, [ctypes.c_int]
    number = cache_type(type_name)
    return int(blocks(number)), int(sizes(number))


def model_text(model: Pointer, key: str) -> str | None:
    """What a model's file says under a key, as text; None where it says nothing, or has an array there."""
    buffer = ctypes.create_string_buffer(4096)
    n = api.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if n >= 0 else None


def model_number(model: Pointer, key: str) -> int | None:
    """The whole number a model's file has under a key, where ``{arch}`` stands for its architecture."""
    architecture = model_text(model, "general.architecture") or ""
    text = model_text(model, key.replace("{arch}", architecture))
    return int(text) if text is not None and text.isdecimal() else None


def memory_kind(model: Pointer) -> MemoryKind:
    """What its sequences keep."""
    if api.llama_model_is_recurrent(model):
        return MemoryKind.RECURRENT
    if api.llama_model_is_hybrid(model):
        return MemoryKind.HYBRID
    return MemoryKind.WINDOWED if api.llama_model_n_swa(model) > 0 else MemoryKind.DENSE


def bare_reason(line: str) -> str:
    """An engine log line without the name of the function it comes from."""
    head, colon, rest = line.partition(": ")
    return rest if colon and " " not in head else line or "no reason given"


def load_failure() -> str:
    """Why the engine did not load the last model, in its own words."""
    words = "error loading model: "
    line = native_log().find(words)
    return bare_reason(native_log().last_warning()) if line is None else line.partition(words)[2]


def attention_rotation() -> bool:
    """Whether llama.cpp rotates quantised keys and values; its own environment switch turns that off, and states
    made one way are silently wrong the other (engine-facts g)."""
    return os.environ.get("LLAMA_ATTN_ROT_DISABLE", "0") in ("", "0")


@functools.cache
def tiles_are_safe() -> bool:
    """Whether the engine's kernels for extra weight layouts may be used.

    On a Xeon with AMX (llama-cpp-python 0.3.36, built there by GCC 12.2) the first prefill of a Q4_1 model ended the
    process with an illegal instruction at ``tilezero`` in the AMX kernels, in the bare binding too. The cause was not
    found; a small program that sets up tiles in the same way runs. Without these layouts the model runs, so on such
    processors they stay off.
    """
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return True
    return "amx_int8" not in flags.split()
