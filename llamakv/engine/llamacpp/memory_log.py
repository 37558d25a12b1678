"""What the engine says in its log about the sizes of a model and of what a context took, read back into numbers.

The log gives totals in MiB with two decimals. Row lengths that the engine printed when it opened the model make them
exact: a product that rounds to what was logged is taken, and where none does (an architecture with caches of other
shapes) the logged figure stands, at most 0.005 MiB off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp.native import block_of
from llamakv.engine.memory import CacheKind, CachePart, ContextMemory, DeviceBuffer
from llamakv.errors import EngineError, UsageError

_MIB = 1 << 20
_LIKE = {
    "creating": re.compile(r"creating (.*)KV cache"),
    "layer": re.compile(
        r"^(?:llama_kv_cache|llama_memory_recurrent|llama_dsv4_comp_state)(?::|,) layer +(\d+): dev = "
    ),
    "attention": re.compile(
        r"^llama_kv_cache: size = .*\( *(\d+) cells, .*?/(\d+) seqs\), "
        r"K \((\w+)\): +([\d.]+) MiB, V \((\w+)\): +([\d.]+)"
    ),
    "recurrent": re.compile(
        r"^llama_memory_recurrent: size = .*\( *(\d+) cells, .* (\d+) rs_seq\), "
        r"R \((\w+)\): +([\d.]+) MiB, S \((\w+)\): +([\d.]+) MiB, P \(\w+\): +([\d.]+)"
    ),
    "compressor": re.compile(
        r"^llama_dsv4_comp_state: .*state = (\d+) x (\d+), streams = (\d+), rs_seq = (\d+), "
        r"layers = (\d+), size = +([\d.]+)"
    ),
    "buffer": re.compile(r"^\w+: +(\S+) +(KV|RS|DSV4 \w+ state|output|compute|model) buffer size = +([\d.]+) MiB"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model as the engine printed them: for each layer its heads and the elements of a row of keys and of
    values, and for a sequence the elements of a layer's two recurrent states, None where they are not known.

    ``is_latent`` models (MLA) keep no values.
    """

    n_vocab: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    key_length: int
    value_length: int
    k_row: tuple[int, ...]
    v_row: tuple[int, ...]
    r_row: int | None
    s_row: int | None
    is_latent: bool

    def check(self, memory: MemoryRequest) -> None:
        """See that heads can be kept in such types: without flash attention, the engine would abort the process over
        keys that cannot.

        Raises:
            UsageError: a head is not a multiple of the type's block.
        """
        for name, kind, rows in (("k", memory.type_k, self.k_row), ("v", memory.type_v, self.v_row)):
            n_block, _ = block_of(kind)
            heads = (row // n for row, n in zip(rows, self.n_head_kv, strict=True) if n > 0)
            odd = next((length for length in heads if length % n_block), None)
            if odd is not None:
                raise UsageError(
                    f"cache type {kind} needs heads of a multiple of {n_block} numbers, those of this model have {odd}",
                    hint=f"use --type-{name} f16",
                )


def read_sizes(lines: Iterable[str], *, n_vocab: int, meta: Callable[[str], int | None]) -> ModelSizes:
    """Sizes from what the engine logged when it opened a model; ``meta`` looks up whole numbers in the file, by the
    part of the key behind the architecture.

    Raises:
        EngineError: the log says something else than is known here.
    """
    said: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.partition("= ")
        if equals and name.startswith("print_info: "):
            said[name.removeprefix("print_info: ").strip()] = value.strip()

    def per_layer(name: str) -> tuple[int, ...]:
        text = said[name]
        return tuple(map(int, text[1:-1].split(","))) if text.startswith("[") else (int(text),) * n_layer

    try:
        n_layer = int(said["n_layer_all"])
        r_row, s_row = _recurrent_rows(meta)
        return ModelSizes(
            n_vocab=n_vocab,
            n_head=per_layer("n_head"),
            n_head_kv=per_layer("n_head_kv"),
            key_length=int(said["n_embd_head_k"]),
            value_length=int(said["n_embd_head_v"]),
            k_row=per_layer("n_embd_k_gqa"),
            v_row=per_layer("n_embd_v_gqa"),
            r_row=r_row,
            s_row=s_row,
            is_latent=bool(meta("attention.key_length_mla")),
        )
    except (KeyError, ValueError) as error:
        raise EngineError(f"the engine does not tell the model's sizes in the way that is known ({error})") from error


def _recurrent_rows(meta: Callable[[str], int | None]) -> tuple[int | None, int | None]:
    """The usual shapes of recurrent states (llama_hparams::n_embd_r and n_embd_s)."""
    n_embd = meta("embedding_length") or 0
    if n_head := meta("wkv.head_size"):
        return (meta("token_shift_count") or 2) * n_embd, n_embd * n_head
    if n_cached := meta("shortconv.l_cache"):
        return n_embd * (n_cached - 1), 0
    n_inner, n_state = meta("ssm.inner_size"), meta("ssm.state_size")
    n_conv, n_group = meta("ssm.conv_kernel"), meta("ssm.group_count") or 0
    if n_inner is None or n_state is None or n_conv is None:
        return None, None
    return (n_conv - 1) * (n_inner + 2 * n_group * n_state), n_state * n_inner


def logged_buffers(lines: Iterable[str], what: str) -> tuple[DeviceBuffer, ...]:
    """Buffers of one use (``model``, ``compute``), as logged; those of one device together, empty ones left out."""
    sums: dict[str, int] = {}
    for line in lines:
        found = _LIKE["buffer"].match(line)
        if found and found[2] == what:
            sums[found[1]] = sums.get(found[1], 0) + _n_bytes(found[3])
    return tuple(DeviceBuffer(device=device, n_bytes=n) for device, n in sums.items() if n > 0)


@dataclass(slots=True)
class _Reader:
    """Goes through a context's lines in order: which cache, its layers, its buffers, then its size."""

    sizes: ModelSizes
    kind: CacheKind = CacheKind.FULL
    layers: list[int] = field(default_factory=list)
    buffers: list[DeviceBuffer] = field(default_factory=list)
    parts: list[CachePart] = field(default_factory=list)
    kv_buffers: list[DeviceBuffer] = field(default_factory=list)
    recurrent_buffers: list[DeviceBuffer] = field(default_factory=list)

    def take(self, line: str) -> None:
        if found := _LIKE["creating"].search(line):
            windowed = "SWA" in found[1] and "non-SWA" not in found[1]
            self.kind = CacheKind.WINDOWED if windowed else CacheKind.FULL
        elif found := _LIKE["layer"].match(line):
            self.layers.append(int(found[1]))
        elif (found := _LIKE["buffer"].match(line)) and (found[2] in ("KV", "RS") or found[2].startswith("DSV4")):
            self.buffers.append(DeviceBuffer(device=found[1], n_bytes=_n_bytes(found[3])))
        elif found := _LIKE["attention"].match(line):
            self._add_attention(found)
        elif found := _LIKE["recurrent"].match(line):
            self._add_recurrent(found)
        elif found := _LIKE["compressor"].match(line):
            self._add_compressor(found)

    def _add_attention(self, found: re.Match[str]) -> None:
        n_cells, type_k, type_v = int(found[1]) * int(found[2]), found[3], found[5]
        k_row, v_row = self.sizes.k_row, self.sizes.v_row
        k = sum(_row_bytes(type_k, k_row[i]) for i in self.layers)
        v = sum(_row_bytes(type_v, v_row[i]) for i in self.layers)
        padded = _row_bytes(type_v, max(v_row)) * len(self.layers)  # without flash attention
        k_bytes = _confirmed(found[4], k * n_cells)
        v_bytes = _confirmed(found[6], *(() if self.sizes.is_latent else (v * n_cells, padded * n_cells)))
        self._add(self.kind, n_cells, (type_k, type_v), (k_bytes, v_bytes), self.kv_buffers)

    def _add_recurrent(self, found: re.Match[str]) -> None:
        n_cells = int(found[1])
        n_rows = n_cells * (1 + int(found[2])) * len(self.layers)
        r = _confirmed(found[4], *_product(self.sizes.r_row, _row_bytes(found[3], n_rows)))
        s = _confirmed(found[6], *_product(self.sizes.s_row, _row_bytes(found[5], n_rows)))
        n_bytes = (r, s + _n_bytes(found[7]))
        self._add(CacheKind.RECURRENT, n_cells, (found[3], found[5]), n_bytes, self.recurrent_buffers)

    def _add_compressor(self, found: re.Match[str]) -> None:
        n_rows, n_row, n_streams, n_kept, n_layers = (int(found[i]) for i in range(1, 6))
        n_numbers = 2 * n_rows * n_row * n_streams * (1 + n_kept) * n_layers  # two tensors of the same size
        half = _confirmed(found[6], 4 * n_numbers) // 2
        self._add(CacheKind.RECURRENT, n_streams, ("f32", "f32"), (half, half), self.recurrent_buffers)

    def _add(
        self, kind: CacheKind, n_cells: int, types: tuple[str, str], n_bytes: tuple[int, int], to: list[DeviceBuffer]
    ) -> None:
        part = CachePart(
            kind=kind,
            layers=tuple(self.layers),
            n_cells=n_cells,
            type_k=types[0],
            type_v=types[1],
            k_bytes=n_bytes[0],
            v_bytes=n_bytes[1],
        )
        if part.layers:  # a cache none of whose layers exist takes nothing
            self.parts.append(part)
        if len(self.buffers) == 1 and abs(self.buffers[0].n_bytes - part.n_bytes) <= _MIB // 100:
            self.buffers = [replace(self.buffers[0], n_bytes=part.n_bytes)]
        to.extend(buffer for buffer in self.buffers if buffer.n_bytes > 0)
        self.layers, self.buffers = [], []


def read_context(
    lines: Sequence[str], sizes: ModelSizes, *, n_ctx: int, n_seq_max: int, flash_attn: bool, is_dry: bool
) -> ContextMemory:
    """What a context took, from what the engine logged when it opened it; ``is_dry``: it allocated no cells."""
    reader = _Reader(sizes)
    for line in lines:
        reader.take(line)
    output = tuple(
        DeviceBuffer(device=found[1], n_bytes=_confirmed(found[3], 4 * sizes.n_vocab * n_seq_max))
        for found in map(_LIKE["buffer"].match, lines)
        if found and found[2] == "output"
    )
    return ContextMemory(
        n_ctx=n_ctx,
        n_seq_max=n_seq_max,
        flash_attn=flash_attn,
        parts=tuple(reader.parts),
        compute=logged_buffers(lines, "compute"),
        output=output,
        kv_by_device=() if is_dry else _by_device(reader.kv_buffers),
        recurrent_by_device=() if is_dry else _by_device(reader.recurrent_buffers),
    )


def _by_device(buffers: Iterable[DeviceBuffer]) -> tuple[DeviceBuffer, ...]:
    sums: dict[str, int] = {}
    for buffer in buffers:
        sums[buffer.device] = sums.get(buffer.device, 0) + buffer.n_bytes
    return tuple(DeviceBuffer(device=device, n_bytes=n) for device, n in sums.items())


def _row_bytes(type_name: str, n: int) -> int:
    n_block, n_bytes = block_of(type_name)
    return n // n_block * n_bytes


def _product(*factors: int | None) -> tuple[int, ...]:
    """The product, or nothing where a factor is not known."""
    product = 1
    for factor in factors:
        if factor is None:
            return ()
        product *= factor
    return (product,)


def _n_bytes(mib: str) -> int:
    return round(float(mib) * _MIB)


def _confirmed(logged: str, *exact: int) -> int:
    """The first of ``exact`` that rounds to the logged figure (the engine computes it in single precision)."""
    n_logged = _n_bytes(logged)
    slack = 0.0051 * _MIB + n_logged / (1 << 22)
    return next((n for n in exact if abs(n - n_logged) <= slack), n_logged)
