"""Plain frozen data that the store and the engine both speak.

Positions count tokens in a sequence and ranges ``[p0, p1)`` are half-open; sizes are bytes; times are seconds since
the epoch (UTC). A session of ``N`` tokens has cells for the first ``N - 1`` only: the last token is *pending* and is
decoded together with whatever follows, because a state holds no logits (design: the pending token).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class MemoryKind(StrEnum):
    """How a model remembers; decides how its state is cut into sections."""

    DENSE = "dense"
    WINDOWED = "sliding-window"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"


class SectionKind(StrEnum):
    """``CELLS``: cells of a range of positions. ``TAIL``: the recurrent part as it was after ``p1`` tokens
    (``p0 == p1``; several may exist). ``WHOLE``: everything up to ``p1`` in one piece (small windowed caches)."""

    CELLS = "cells"
    TAIL = "tail"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter: BLAKE3 hex digest of its file's content, and the scale it is applied with."""

    digest: str
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What must match before a state may be loaded; says nothing about the file's name or folder.

    ``digest`` is the BLAKE3 hex digest of the model file's content, ``n_bytes`` that file's length.
    ``tokenizer_digest`` is a hex digest of the vocabulary and its special tokens.
    """

    digest: str
    n_bytes: int
    architecture: str
    name: str
    quantisation: str
    tokenizer_digest: str
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Settings that change the bytes of a state. ``flash_attn`` is the resolved value, never "auto".

    ``swa_full`` is whether windowed layers keep all cells (ignored by models without a window).
    ``rope_freq_base`` and ``rope_freq_scale`` of 0.0 mean the model's own. ``attn_rot`` is False when the engine's
    switch ``LLAMA_ATTN_ROT_DISABLE`` turned the rotation of quantised keys off.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: bool = True
    swa_full: bool = True
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    attn_rot: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVersions:
    """Who made the state: llama-cpp-python's version, llama.cpp's version and commit, its sequence-state version,
    and the backend the cells lived on (``cpu``, ``cuda``, ...)."""

    binding: str
    llama_cpp: str
    commit: str
    state_version: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    ``penalty_last_n`` tokens are looked at for the penalties. ``logit_bias`` maps token ids to added logits
    (``-inf`` forbids). ``grammar`` is GBNF text with a ``root`` rule. ``seed`` is 0 ... 2**32 - 1.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat and the range ``[p0, p1)`` of tokens it was read or written as.

    ``finish`` is, for replies, why they ended: ``stop``, ``length``, ``context``, ``timeout`` or ``interrupted``; None
    otherwise.
    ``is_open`` marks a last user message that the next one continues (a document saved before its questions).
    ``time_s`` is when it was read or written to its end, None where that was not recorded; messages are equal whenever
    they were said.
    """

    role: str
    content: str
    p0: int
    p1: int
    finish: str | None = None
    is_open: bool = False
    time_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation: the Jinja template it is rendered with (``template_digest`` is its SHA-256 in hex) and the
    messages so far, the system prompt first where there is one."""

    template: str
    template_digest: str
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a session comes from and what the user says of it. ``n_saves`` counts its saves and orders them where
    the clock cannot. ``parent_position`` is the number of the parent's tokens this session began with. ``ttl_s`` is how
    many seconds it may stay unused before it expires; None: for as long as its store allows."""

    session_id: str
    parent_id: str | None = None
    parent_position: int | None = None
    name: str | None = None
    note: str = ""
    tags: tuple[str, ...] = ()
    pinned: bool = False
    ttl_s: float | None = None
    created_s: float = 0.0
    updated_s: float = 0.0
    n_saves: int = 0
    llamakv_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """All a session is, apart from the sections' bytes. ``tokens`` is every token id, the last one pending.

    A chat session has ``chat`` and no ``text``; a raw session has ``text``, all of it, and no ``chat``. ``n_ctx`` is
    the context size it last ran with, in cells (a hint: any size with room for the tokens will do).
    """

    identity: ModelIdentity
    kind: MemoryKind
    settings: MemorySettings
    versions: EngineVersions
    tokens: tuple[int, ...]
    sampling: Sampling
    lineage: Lineage
    chat: Chat | None = None
    n_ctx: int = 0
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSection:
    """One piece of state as the engine gives and takes it.

    Covers positions ``[p0, p1)``; of ``CELLS`` only ``[p0, p_used)`` is wanted back (going back inside a section
    lowers ``p_used`` and leaves the bytes alone). ``data`` is the engine's own bytes, opaque elsewhere; it stays
    valid and unchanged for as long as the section is referenced.
    """

    kind: SectionKind
    p0: int
    p1: int
    p_used: int
    data: memoryview = field(repr=False)
