"""What ``bench`` found: plain data that can be shown, saved and compared. Times are seconds, sizes bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Repeated measurements of one thing (warm-up not among them)."""

    n_runs: int
    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of at least one value."""
        return cls(n_runs=len(values), least=min(values), median=statistics.median(values), most=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it was measured. ``n_cores`` are the processors this process may use."""

    processor: str
    n_cores: int
    memory_bytes: int
    system: str
    python: str
    llamakv: str
    llama_cpp: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchedModel:
    """What was measured with."""

    name: str
    architecture: str
    quantisation: str
    kind: str
    digest: str
    n_bytes: int
    n_ctx_train: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTimes:
    """A text of ``n_tokens``, read and brought back; both times go to the first token of an answer.

    ``resume_cold_s`` began with the session file not in the page cache: ``cold_resident_bytes`` of it were there all
    the same (None: the system does not tell, and None for both where it cannot be made cold). ``file_bytes`` is the
    whole session file, ``raw_bytes`` the state in it before compression.
    """

    n_tokens: int
    prefill_s: Spread
    save_s: Spread
    resume_cold_s: Spread | None
    resume_warm_s: Spread
    cold_resident_bytes: int | None
    raw_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """From how many tokens on resuming is faster than reading again. ``at_most`` means that it was already at the
    shortest text measured; ``n_tokens`` None that it never was."""

    n_tokens: int | None
    at_most: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChange:
    """What a cache type does to the output, against f16 keys and values on the same text: ``n_positions`` next-token
    distributions were compared. ``mean_kl`` and ``most_kl`` are Kullback-Leibler divergences D(f16 ‖ this) in nats,
    ``top_agreement`` the part of positions with the same most likely token."""

    n_positions: int
    mean_kl: float
    most_kl: float
    top_agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeResult:
    """One pair of cache types, measured in a process of its own.

    ``refused`` is the engine's reason where it takes no such context: then all else is None or empty. ``failed`` is
    why measuring ended too soon: what had been measured until then is there, what is missing is None or empty. So it is
    in a row that was being measured when the run was interrupted; each of its lengths was measured at least once.
    ``state_bytes_per_token`` is what a token adds to keys and values, ``context_bytes`` all that the context of
    ``n_ctx`` cells took beside the weights, ``peak_rss_bytes`` the process at its largest, weights and all. ``fork_s``
    is giving ``n_branches`` sequences the longest text's cells. ``prompt_tokens_per_s`` is reading the longest text,
    ``decode_tokens_per_s`` writing behind it, one sequence.
    """

    type_k: str
    type_v: str
    refused: str | None
    flash_attn: bool | None
    n_ctx: int | None
    state_bytes_per_token: float | None
    context_bytes: int | None
    peak_rss_bytes: int | None
    lengths: tuple[LengthTimes, ...]
    prompt_tokens_per_s: Spread | None
    decode_tokens_per_s: Spread | None
    n_branches: int | None
    fork_s: Spread | None
    break_even_warm: BreakEven | None
    break_even_cold: BreakEven | None
    output: OutputChange | None
    failed: str | None = None

    @property
    def is_measured(self) -> bool:
        """Whether there are any times."""
        return bool(self.lengths)

    @property
    def label(self) -> str:
        """``q8_0``, or ``q8_0/q4_0`` for keys and values of different types."""
        return self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """One way to answer all users, in processes of its own.

    ``peak_bytes`` is the sum of each process's own peak, and the file pages they share once, where
    ``counts_shared_once`` (else in each). ``cell_bytes`` is what ``n_cells_peak`` cells took in keys and values and
    recurrent states; ``weights_bytes`` the weights, ``context_bytes`` all that its contexts allocated, summed over its
    processes. ``n_prompt_tokens`` = ``n_reused`` + ``n_evaluated``; ``hit_rate`` is reused over prompt tokens.
    ``preparation_s`` was spent before, once, to fill the store, and is in no other time. ``bytes_read`` and
    ``bytes_written`` are session files and objects, preparation included in the latter. ``n_users_that_fit`` is derived
    from these sizes for the memory limit; ``limited_by`` is ``memory`` or ``sequences``. ``n_other_answers`` are not
    those of the first strategy, token for token. Of several runs this is the one whose time is the median, whole.
    """

    name: str
    n_processes: int
    peak_bytes: int
    counts_shared_once: bool
    weights_bytes: int
    context_bytes: int
    n_cells_peak: int
    cell_bytes: int
    first_token_s: Spread
    elapsed_s: float
    preparation_s: float
    n_generated: int
    tokens_per_s: float
    n_prompt_tokens: int
    n_reused: int
    n_evaluated: int
    hit_rate: float
    bytes_read: int
    bytes_written: int
    n_users_that_fit: int
    limited_by: str
    n_other_answers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategiesResult:
    """The same work, done in several ways: each of ``n_users`` asks one question of ``n_question`` tokens behind a
    prefix of ``n_prefix`` and gets an answer of ``n_answer`` tokens. With ``shares_prefix`` the prefix is the same for
    all, else each has one of its own from the first token on (but for one that the model puts before every text).
    ``failed`` are strategies that could not be run, with the reason."""

    n_users: int
    n_prefix: int
    n_question: int
    n_answer: int
    shares_prefix: bool
    type_k: str
    type_v: str
    flash_attn: bool
    memory_limit_bytes: int
    rows: tuple[StrategyResult, ...]
    failed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """A whole run. ``interrupted`` says that some of it is missing; ``work_dir`` is the folder that session files were
    in, which decides what cold means (None: not recorded)."""

    started_s: float
    elapsed_s: float
    interrupted: bool
    machine: Machine
    model: BenchedModel
    n_threads: int
    n_repeats: int
    types: tuple[TypeResult, ...]
    strategies: StrategiesResult | None
    work_dir: str | None = None
