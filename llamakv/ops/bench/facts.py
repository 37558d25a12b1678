"""What has to be known before measuring begins, found out in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llamakv.ops.bench.lengths import check_fits, tokens_to_read
from llamakv.ops.bench.machine import describe_machine, describe_model
from llamakv.ops.bench.processes import Link
from llamakv.ops.bench.requests import TypesRequest
from llamakv.ops.bench.results import BenchedModel, Machine
from llamakv.ops.matching import FoundModel, merge_memory
from llamakv.ops.opening import OpenModel
from llamakv.ops.requests import MemoryOptions, ModelRequest, Reporter

_N_SHORT, _N_MORE = 3, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsJob:
    """What is to be measured; without ``types`` only the model is looked at."""

    found: FoundModel
    model: ModelRequest
    memory: MemoryOptions
    types: TypesRequest | None
    text: str | None
    n_cells: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The machine, the model, and the tokens that are read: the longest text and what comes behind it.
    ``n_state_bytes`` is about what the longest text's state takes with f16 keys and values."""

    machine: Machine
    model: BenchedModel
    n_threads: int
    n_vocab: int
    tokens: tuple[int, ...]
    n_state_bytes: int


def read_facts(link: Link, job: FactsJob) -> Facts:
    """Open the model and find out.

    Raises:
        ModelFileError, MismatchError: it cannot be used.
        NoRoomError: it cannot hold the longest text.
    """
    reporter = Reporter(
        notice=lambda line: link.tell(("notice", line)),
        progress=lambda *values: link.tell(("progress", *values)),
    )
    memory = merge_memory(replace(job.memory, type_k="f16", type_v="f16"), None, None, may_change=True)
    with OpenModel(job.found, job.model, memory, reporter=reporter) as opened:
        tokens: tuple[int, ...] = ()
        n_state = 0
        if job.types is not None:
            check_fits(job.n_cells, opened.n_ctx_max(), job.types)
            n_behind = max(job.n_cells, _N_SHORT + _N_MORE) - job.types.n_tokens
            tokens = tokens_to_read(opened.model, job.text, job.types.n_tokens, n_behind)
            n_state = _n_state_bytes(opened, tokens, job.types.n_tokens)
        return Facts(
            machine=describe_machine(opened.model.versions),
            model=describe_model(job.found, opened.info),
            n_threads=opened.n_threads,
            n_vocab=opened.info.n_vocab,
            tokens=tokens,
            n_state_bytes=n_state,
        )


def _n_state_bytes(opened: OpenModel, tokens: tuple[int, ...], n_tokens: int) -> int:
    """What a state of ``n_tokens`` takes, going by two short ones: so much for each token, and what is always there."""
    sequence = opened.open_sequence(min(_N_SHORT + _N_MORE, opened.n_ctx_max()))
    sequence.extend(tokens[:_N_SHORT])
    n_first, n_cells = sequence.n_state_bytes, sequence.n_cells
    sequence.extend(tokens[_N_SHORT : _N_SHORT + _N_MORE])
    n_each = (sequence.n_state_bytes - n_first) / (sequence.n_cells - n_cells)
    return int(n_first + n_each * max(0, n_tokens - 1 - n_cells))
