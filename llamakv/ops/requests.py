"""What the command line asks of an op, and what it gets back: frozen data and callbacks, no parsing, no printing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llamakv.records import SessionRecord
from llamakv.store.session_file import SessionInfo

if TYPE_CHECKING:
    from llamakv.ops.budget import Budget

Compress = Literal["auto", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Which model, and how to run it. None means: as stored in the session, or the default.

    ``path`` is the model file the user named now, ``default`` the one the environment names, ``demo`` the one the demo
    extra brings; ``folders`` are searched for a session's model. ``adapters`` are LoRA files with their scales.
    ``n_ctx`` is the largest context the user allows, in cells; ``n_parallel`` branches share it at the same time.
    ``on_log`` gets the engine's own log. ``cache_dir`` is where digests of model files are remembered.
    """

    path: Path | None = None
    default: Path | None = None
    demo: Path | None = None
    folders: tuple[Path, ...] = ()
    adapters: tuple[tuple[Path, float], ...] | None = None
    n_gpu_layers: int = 0
    n_threads: int | None = None
    n_ctx: int | None = None
    n_parallel: int = 0
    on_log: Callable[[str], None] | None = None
    cache_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Memory settings the user gave; None where the stored or default one is wanted. ``flash_attn`` is
    ``"auto"``, ``"on"`` or ``"off"``; ``swa`` is ``"full"`` or ``"window"``."""

    type_k: str | None = None
    type_v: str | None = None
    flash_attn: str | None = None
    swa: str | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters the user gave; None where the stored or default one is wanted. ``seed`` -1 is a new one."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    penalty_last_n: int | None = None
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    grammar: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """``recompute`` reads the stored tokens again under the settings now given; ``trust_state`` takes the stored
    state although the engine's build differs."""

    recompute: bool = False
    trust_state: bool = False


def _ignore(*_: object) -> None:
    return None


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Callbacks of an op. ``notice`` takes one line meant for the user, ``warning`` one that must not be hidden;
    ``progress`` a phase (``"digest"``, ``"load"``, ``"prefill"``, ``"restore"``, ``"save"``, ``"answers"``,
    ``"bench"``), what is done and the total (bytes for ``digest`` and ``load``, answers for ``answers``, steps for
    ``bench``, else tokens), ``rate`` the tokens
    per second that go with it; ``pause`` is called before something else is written; ``text`` takes text of the reply
    as it comes; ``should_abort`` is asked often and must be quick."""

    notice: Callable[[str], None] = _ignore
    warning: Callable[[str], None] = _ignore
    progress: Callable[[str, int, int], None] = _ignore
    rate: Callable[[float], None] = _ignore
    pause: Callable[[], None] = _ignore
    text: Callable[[str], None] = _ignore
    should_abort: Callable[[], bool] = _never


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A finished save: the session as it is on disk now, bytes this save wrote, and how long it took.

    ``asked`` is set where a conflict made the save go to another file than the one asked for."""

    info: SessionInfo
    n_written: int
    elapsed_s: float
    asked: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session brought back: tokens whose cells came from the file, tokens that had to be read again, and times.

    ``model_load_s`` is the weights' loading and ``restore_s`` everything from opening the file to the last section
    in place."""

    record: SessionRecord | None
    reused: int
    evaluated: int
    model_load_s: float
    restore_s: float
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationStats:
    """Where a conversation stands; bytes are those of the file last saved to, 0 if none."""

    n_tokens: int
    n_cells: int
    n_ctx: int
    n_ctx_max: int
    n_turns: int
    n_raw_bytes: int
    n_stored_bytes: int
    reused: int
    evaluated: int
    generated: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One reply. ``reused`` tokens came from a saved or live prefix, ``evaluated`` were read for this reply,
    ``generated`` were written. ``finish_reason`` is ``stop``, ``length``, ``context`` or ``interrupted``.

    ``first_token_s`` is the time from the request to the first token, ``elapsed_s`` to the last.
    """

    text: str
    finish_reason: str
    reused: int
    evaluated: int
    generated: int
    seed: int
    elapsed_s: float
    first_token_s: float
    saved: Saved | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to begin or to go on with. Exactly one of ``resume`` (an existing session file) and a new
    beginning is meant; ``at`` is a place in the resumed session to go back to (``turn3``, ``1200``); ``save`` is the
    file saved to after every turn (None: keep nothing, or, when resuming, the same file). ``system`` is the system
    prompt. ``reuse_from`` is a store whose sessions a new one may be begun with."""

    model: ModelRequest
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    options: ResumeOptions = field(default_factory=ResumeOptions)
    resume: Path | None = None
    at: str | None = None
    save: Path | None = None
    name: str | None = None
    system: str | None = None
    overwrite: bool = False
    compress: Compress = "auto"
    reuse_from: Path | None = None
    budget: Budget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Text to prefill and keep at ``path``: raw text, or (not ``raw``) the beginning of a user's message, after the
    system prompt, that later questions continue. ``reuse_from`` is a store whose sessions may be begun with."""

    model: ModelRequest
    path: Path
    text: str | None
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    options: ResumeOptions = field(default_factory=ResumeOptions)
    name: str | None = None
    system: str | None = None
    raw: bool = False
    overwrite: bool = False
    compress: Compress = "auto"
    reuse_from: Path | None = None
    budget: Budget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A session to restore and complete once; ``prompt`` is a user's message, or raw text for a raw session (None:
    go on from where it stopped); ``at`` is a place in it to go back to first (``turn3``, ``1200``). Without a ``path``
    it is a new one: a conversation with the ``system`` prompt, or ``raw`` text, begun with what a session in
    ``reuse_from`` has of it. ``save`` is where the result is kept, if anywhere."""

    model: ModelRequest
    path: Path | None
    at: str | None = None
    prompt: str | None = None
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    options: ResumeOptions = field(default_factory=ResumeOptions)
    save: Path | None = None
    name: str | None = None
    overwrite: bool = False
    compress: Compress = "auto"
    system: str | None = None
    raw: bool = False
    reuse_from: Path | None = None
    budget: Budget | None = None
