"""What HTTP asks of the service behind it, and what comes back: plain data and one protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llamakv.errors import LlamakvError
from llamakv.records import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a request."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for text, from a client that was let in.

    ``prompt`` is either messages (a chat), or text or token ids to go on from. ``sampling`` holds ``max_tokens`` and
    ``stop`` too. ``n_choices`` answers are wanted; ``n_top_logprobs`` most likely tokens are told for each token chosen
    (0: the chosen one only; None: nothing). ``space`` is what cells and sessions may be shared within: one for all, or
    with ``--isolate`` one for each key. ``session`` names the session that the conversation is kept as; None: a name of
    the server's. ``timeout_s`` counts from when the request came. ``key`` is the name of the API key, and ``user`` whom
    the client asks for: they have their turns alike.
    """

    prompt: tuple[ChatMessage, ...] | str | tuple[int, ...]
    sampling: Sampling
    n_choices: int = 1
    n_top_logprobs: int | None = None
    space: str = ""
    session: str | None = None
    timeout_s: float | None = None
    key: str = ""
    user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token and its natural logarithm of probability, before any sampling parameter; ``top`` are the most likely
    ones."""

    token: int
    text: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """Some of choice ``index``. The last piece of each choice has its ``finish_reason``: ``stop``, ``length``,
    ``context``, ``timeout`` or ``interrupted``."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an answer took. ``n_cached`` of the prompt's tokens were not read again; ``source`` says where they were:
    ``memory``, ``store`` or ``none``. It was ``queued_s`` in the queue, or is so far."""

    n_prompt: int
    n_cached: int
    n_generated: int
    source: str = "none"
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLine:
    """A conversation that is kept: in memory (``n_cells_live`` > 0), in the store (``is_saved``), or both."""

    name: str
    n_tokens: int
    n_turns: int
    n_cells_live: int
    n_cells_shared: int
    is_saved: bool
    is_pinned: bool
    is_active: bool
    used_s: float
    stored_bytes: int
    first_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCounts:
    """Where the service stands, and sums since it started: of all, or of one space. Latencies are counted by the HTTP
    side. ``n_sent_back`` is how often answers gave their cells to others, to be read again. ``n_waiting``,
    ``n_cells_max``, ``n_ctx`` and ``n_sequences_max`` are of the machine in any case."""

    n_active: int
    n_waiting: int
    n_live: int
    n_cells: int
    n_cells_pinned: int
    n_cells_max: int
    n_ctx: int
    n_sequences_max: int
    n_prompt_tokens: int
    n_reused_memory: int
    n_reused_store: int
    n_evaluated: int
    n_generated: int
    n_sent_back: int
    n_saves: int
    n_save_failures: int
    n_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that is served."""

    name: str
    digest: str
    n_ctx_max: int
    n_vocab: int
    created_s: float
    settings: dict[str, object] = field(default_factory=dict)


class Answer(Protocol):
    """A request under way."""

    def pieces(self) -> AsyncIterator[AnswerPiece]:
        """What is written, as it comes, of all choices; ends when all are over. Leaving the iteration (or ``cancel``)
        ends the request and frees its cells at once.

        Raises:
            LlamakvError: it failed; pieces that came before stand.
        """

    @property
    def usage(self) -> Usage:
        """What it took so far; final when ``pieces`` has ended."""

    def cancel(self) -> None:
        """End it."""


class Service(Protocol):
    """One model, and the conversations that are kept over it. All calls come from one event loop."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def counts(self) -> ServiceCounts:
        """Those of all spaces together."""

    async def counts_of(self, space: str) -> ServiceCounts:
        """Those of a space, with nothing in them that others do; of all for the one that all have in common ("")."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken; not while it stops, or after the engine failed."""

    @property
    def failure(self) -> LlamakvError | None:
        """Why the engine does not work any more; then only stopping is left."""

    async def ask(self, ask: Ask) -> Answer:
        """Queue a request.

        Raises:
            BusyError: the queue is full.
            UsageError, NoRoomError: it cannot be done.
        """

    async def sessions(self, space: str) -> Sequence[SessionLine]:
        """The conversations of a space, the one used last first."""

    async def save(self, name: str, new_name: str | None, space: str) -> SessionLine:
        """Have a conversation in the store, now, under a name (its own, or another: then it is a copy).

        Raises: NotFoundError, ExistsError, UsageError (a name that cannot be), WriteError, NoRoomError (the budget).
        """

    async def resume(self, name: str, space: str) -> SessionLine:
        """Bring a saved session into memory. Raises: NotFoundError, MismatchError, NoRoomError, FormatError."""

    async def fork(self, name: str, new_name: str, space: str, at: str | None) -> SessionLine:
        """A conversation that begins as another did (up to ``at``: ``turn2`` or a number of tokens). Raises: as
        ``save``."""

    async def delete(self, name: str, space: str) -> None:
        """Forget a conversation, in memory and in the store. Raises: NotFoundError, LockedError (it is active)."""

    async def inspect(self, name: str, space: str) -> dict[str, object]:
        """All that ``llamakv inspect --json`` tells of a saved session, and where its cells are. Raises:
        NotFoundError."""

    async def pin(self, name: str, space: str, *, pinned: bool) -> SessionLine:
        """Whether its cells stay in memory whatever comes. Raises: NotFoundError, NoRoomError."""

    async def stop(self, timeout_s: float) -> None:
        """Take no more, let what is under way end within the time, save what is not saved, free everything. May be
        called again while it runs: the shorter time counts.

        Raises: WriteError (something could not be saved).
        """
