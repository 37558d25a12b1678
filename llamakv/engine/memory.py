"""What models and contexts take in memory, as the engine counts it: facts, estimates, and what really was allocated.

All sizes are bytes. A *device* is the engine's name of where a buffer lies (``CPU``, ``CUDA0``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from llamakv.engine.contract import MemoryRequest
from llamakv.records import MemoryKind


class CacheKind(StrEnum):
    """What a layer keeps of the tokens it has read."""

    FULL = "full"
    """Keys and values of all positions."""
    WINDOWED = "windowed"
    """Keys and values that only the next tokens of a window look at; the context chooses how many cells they have."""
    RECURRENT = "recurrent"
    """A state of constant size for each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One layer. ``kinds`` is what it keeps: nothing (it uses another layer's), one, or attention and a recurrent
    state. ``n_head`` and ``n_head_kv`` are 0 where a layer has no attention, None where the file does not say."""

    index: int
    kinds: tuple[CacheKind, ...]
    n_head: int | None
    n_head_kv: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model file's header says, and the engine makes of it; no weights were read.

    ``unknown`` is the engine's reason where it cannot run the model: then ``kind`` is None, ``layers`` is empty, and
    whatever the header does not say is None. ``weights_bytes`` is the size of all tensors, in all parts of the file.
    ``key_length`` and ``value_length`` are the elements of one head; ``latent_length`` is the rank of latent attention
    (MLA), None without. ``n_window`` is the sliding window in tokens, 0 for none.
    """

    architecture: str
    name: str
    quantisation: str | None
    unknown: str | None
    kind: MemoryKind | None
    n_params: int | None
    weights_bytes: int | None
    n_ctx_train: int | None
    n_vocab: int | None
    n_embd: int | None
    n_layer: int | None
    n_window: int | None
    key_length: int | None
    value_length: int | None
    latent_length: int | None
    layers: tuple[LayerFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePart:
    """One of the caches a context consists of.

    ``k_bytes`` and ``v_bytes`` are its keys and values; for a recurrent state ``k_bytes`` is the part that the engine
    calls R (the last few inputs), ``v_bytes`` the rest (S and P), and ``n_cells`` is the number of sequences.
    ``type_k`` and ``type_v`` are names of cache types.
    """

    kind: CacheKind
    layers: tuple[int, ...]
    n_cells: int
    type_k: str
    type_v: str
    k_bytes: int
    v_bytes: int

    @property
    def n_bytes(self) -> int:
        """All of it."""
        return self.k_bytes + self.v_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBuffer:
    """Memory on one device."""

    device: str
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMemory:
    """What a context takes beside the weights: ``n_ctx`` cells (as rounded up by the engine) for ``n_seq_max``
    sequences.

    ``kv_by_device`` and ``recurrent_by_device`` say where ``parts`` lie; they are empty after a dry run, which
    allocates nothing. ``compute`` are the buffers a decode call works in, which the engine gives in steps of 0.01 MiB,
    ``output`` those that logits come back in.
    """

    n_ctx: int
    n_seq_max: int
    flash_attn: bool
    parts: tuple[CachePart, ...]
    compute: tuple[DeviceBuffer, ...]
    output: tuple[DeviceBuffer, ...]
    kv_by_device: tuple[DeviceBuffer, ...] = ()
    recurrent_by_device: tuple[DeviceBuffer, ...] = ()

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all attention layers."""
        return sum(part.n_bytes for part in self.parts if part.kind is not CacheKind.RECURRENT)

    @property
    def recurrent_bytes(self) -> int:
        """Recurrent states of all sequences."""
        return sum(part.n_bytes for part in self.parts if part.kind is CacheKind.RECURRENT)

    @property
    def compute_bytes(self) -> int:
        """Working space of decode calls."""
        return sum(buffer.n_bytes for buffer in self.compute)

    @property
    def output_bytes(self) -> int:
        """Space for logits."""
        return sum(buffer.n_bytes for buffer in self.output)

    @property
    def n_bytes(self) -> int:
        """All of it: what opening the context takes."""
        return self.kv_bytes + self.recurrent_bytes + self.compute_bytes + self.output_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMemory:
    """What one more token takes, and what one more sequence takes, whatever its length. Windowed layers count with a
    token's part only where they keep all positions (``MemoryRequest.swa_full``)."""

    kv_bytes_per_token: int
    recurrent_bytes_per_sequence: int


class MemoryEstimator(Protocol):
    """A model file, opened without its weights (a dry run: ``no_alloc``), to ask what contexts over it would take, all
    on the CPU and without adapters. Not for use from two threads."""

    @property
    def facts(self) -> ModelFacts:
        """What the file says."""

    def estimate(self, memory: MemoryRequest, *, n_ctx: int, n_parallel: int) -> ContextMemory:
        """What a context would take that ``Model.open_scheduler`` opens for ``n_parallel`` runs with ``n_ctx`` cells in
        all, which the engine rounds up; exact, as the engine would allocate it.

        Raises:
            UsageError: cache types the engine does not take, or not together.
            EngineError: a model it cannot run (see ``ModelFacts.unknown``), or another refusal.
            NoRoomError: there is not even the memory to ask.
            ValueError: no cells, or more sequences than an engine's context can have.
        """

    def per_token(self, memory: MemoryRequest) -> TokenMemory:
        """What a token and a sequence take.

        Raises:
            UsageError, EngineError: as ``estimate``.
        """

    def close(self) -> None:
        """Free what the engine holds."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
