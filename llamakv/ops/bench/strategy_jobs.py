"""What the processes of a strategy do: look at the model, fill the store, answer users."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil

from llamakv.engine.contract import LiveSequence, MemoryRequest, Model, OnTokens, Run, RunRequest
from llamakv.engine.memory import ContextMemory
from llamakv.engine.text import join
from llamakv.errors import EngineError, UsageError
from llamakv.ops.bench.processes import Link, own_peak_bytes
from llamakv.ops.bench.work import Tokens, User
from llamakv.ops.keeping import Keeper
from llamakv.ops.matching import FoundModel, check_identity, check_layout
from llamakv.ops.opening import OpenModel, restore_sections
from llamakv.ops.requests import ModelRequest, Reporter
from llamakv.ops.resume_cost import sections_restored
from llamakv.records import MemorySettings, Sampling
from llamakv.store.session_file import SessionReader

_N_WARM_UP = 8  # tokens: the first call of a process reads the weights in and makes the buffers
_TELL_EVERY_S = 0.2
_N_CTX_LEAST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How each process opens the model; can be pickled."""

    found: FoundModel
    model: ModelRequest
    memory: MemoryRequest

    def open(self) -> OpenModel:
        """Load it."""
        return OpenModel(self.found, self.model, self.memory, reporter=Reporter())


class Prefix(Enum):
    """Where users have their prefix from."""

    EACH_READS = "each reads its own"
    READ_ONCE = "the root reads it, all share its cells"
    RESUMED = "the root resumes a session, all share its cells"
    OWN_SESSION = "the root resumes the only user's session, and goes on by itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Users of one context of ``n_ctx`` cells. ``begins_with`` is what the root reads or resumes: the prefix and a
    pending token (see ``Work.session_tokens``); ``session`` is where it is saved."""

    users: tuple[User, ...]
    prefix: Prefix
    n_ctx: int
    begins_with: Tokens = ()
    session: Path | None = None

    @property
    def n_parallel(self) -> int:
        """Runs beside the root."""
        return 0 if self.prefix is Prefix.OWN_SESSION else len(self.users)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """What a process had in memory. ``mapped_bytes`` are pages of files, which others that opened the same ones share
    (the weights, programs); ``private_bytes`` all the rest, at its largest."""

    private_bytes: int
    mapped_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAnswer:
    """What one got. Times are ``time.perf_counter`` values, which mean the same in all processes of a machine."""

    tokens: Tokens
    first_token_s: float
    ended_s: float
    n_reused: int
    n_evaluated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """What a process did. ``n_read_once`` tokens were evaluated for all of its users, and are not in theirs.
    ``contexts`` are one per group, ``n_cells_peak`` of all of them."""

    arrived_s: float
    answers: tuple[UserAnswer, ...]
    n_read_once: int
    n_cells_peak: int
    contexts: tuple[ContextMemory, ...]
    bytes_read: int
    memory: ProcessMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLook:
    """What has to be known of a model before work can be given out. ``start`` comes before every text, ``text`` are the
    tokens to cut work from, ``firsts`` different ones to begin with, ``ends`` those that end a reply. ``memory`` is
    what a process takes with the smallest context, ``context``."""

    start: Tokens
    text: Tokens
    firsts: Tokens
    ends: Tokens
    settings: MemorySettings
    n_ctx_train: int
    weights_bytes: int
    context: ContextMemory
    memory: ProcessMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A store that was filled, in ``elapsed_s`` from the first token read to the last session saved."""

    elapsed_s: float
    bytes_written: int


# ---------------------------------------------------------------- before


def look_at_model(link: Link, setup: Setup, text: str, n_firsts: int) -> ModelLook:
    """Load the model once and tell what it is. ``n_firsts`` are wanted; a small vocabulary may have fewer.

    Raises:
        UsageError: the text has no tokens.
    """
    with setup.open() as opened:
        model = opened.model
        tokens = tuple(model.tokenize(text, add_special=False, parse_special=False))
        if not tokens:
            raise UsageError("the text to measure with is empty")
        scheduler = model.open_scheduler(
            setup.memory,
            n_parallel=1,
            n_ctx_min=_N_CTX_LEAST,
            n_ctx_max=_N_CTX_LEAST,
            n_cells_max=_N_CTX_LEAST,
            n_threads=opened.n_threads,
        )
        _warm_up(scheduler.root, tokens)
        return ModelLook(
            start=tuple(model.tokenize("", add_special=True, parse_special=False))[: int(model.info.adds_bos)],
            text=tokens,
            firsts=tuple(itertools.islice(_different(model, tokens), n_firsts)),
            ends=tuple(token for token in range(model.info.n_vocab) if model.is_end(token)),
            settings=model.settings,
            n_ctx_train=model.info.n_ctx_train,
            weights_bytes=model.info.n_bytes,
            context=scheduler.memory,
            memory=_memory(),
        )


def fill_store(link: Link, setup: Setup, sessions: Sequence[tuple[Path, Tokens]], n_ctx: int) -> Prepared:
    """Read each session's tokens and save it. Tells the tokens read so far."""
    with setup.open() as opened:
        tell = _Teller(link)
        _ = opened.identity  # takes a while, once in a process
        _warm_up(opened.open_sequence(n_ctx), sessions[0][1])
        started, n_read, bytes_written = time.perf_counter(), 0, 0
        for path, tokens in sessions:
            opened.sequence.rewind(0)
            opened.sequence.extend(tokens, on_progress=lambda done, _, before=n_read: tell(before + done))  # type: ignore[misc]
            n_read += opened.sequence.n_cells
            saved = Keeper(opened, None, compress="auto").save(
                path,
                chat=None,
                text=join(opened.model.token_bytes(token) for token in tokens),
                sampling=Sampling(),
                reporter=Reporter(),
            )
            bytes_written += saved.n_written
        return Prepared(elapsed_s=time.perf_counter() - started, bytes_written=bytes_written)


# ---------------------------------------------------------------- users


def greedy_without(ends: Sequence[int], *, n_answer: int) -> Sampling:
    """The most likely token each time, but none of ``ends``: answers of exactly ``n_answer`` tokens."""
    return Sampling(max_tokens=n_answer, logit_bias=tuple((token, -math.inf) for token in ends))


def answer_users(link: Link, setup: Setup, groups: Sequence[Group], sampling: Sampling) -> ProcessResult:
    """Load the model, wait until all processes have, and answer the users of all groups. Tells the tokens evaluated and
    written so far. All cells are kept until all users of all processes have their answers.

    Raises:
        EngineError: somebody did not get an answer of the length asked for.
    """
    with setup.open() as opened:
        contexts = [_Context(opened, group, sampling) for group in groups]
        tell = _Teller(link)
        link.wait_for_others()
        arrived_s = time.perf_counter()
        for context in contexts:
            context.begin(on_progress=lambda *_: tell(sum(c.n_done for c in contexts)))
        while any(not context.is_done for context in contexts):
            for context in contexts:
                context.step()
            tell(sum(context.n_done for context in contexts))
        answers = tuple(answer for context in contexts for answer in context.answers())
        link.wait_for_others()
        return ProcessResult(
            arrived_s=arrived_s,
            answers=answers,
            n_read_once=sum(context.n_read_once for context in contexts),
            n_cells_peak=sum(context.scheduler.counts.n_cells_peak for context in contexts),
            contexts=tuple(context.scheduler.memory for context in contexts),
            bytes_read=sum(context.bytes_read for context in contexts),
            memory=_memory(),
        )


class _Context:
    """One group under way, in a context with the cells it needs and no more."""

    def __init__(self, opened: OpenModel, group: Group, sampling: Sampling) -> None:
        self._opened = opened
        self._group = group
        self._sampling = sampling
        self._runs: list[Run] = []
        self._n_extended = 0
        self.n_read_once = 0
        self.bytes_read = 0
        self.scheduler = opened.model.open_scheduler(
            opened.memory,
            n_parallel=group.n_parallel,
            n_ctx_min=group.n_ctx,
            n_ctx_max=group.n_ctx,
            n_cells_max=group.n_ctx,
            n_threads=opened.n_threads,
        )
        _warm_up(self.scheduler.root, group.users[0].prompt)
        self._n_before = self.scheduler.counts.n_decoded

    def begin(self, on_progress: OnTokens) -> None:
        """Have the prefix, and queue all users."""
        group, root = self._group, self.scheduler.root
        if group.prefix is Prefix.READ_ONCE:
            self.n_read_once = root.extend(group.begins_with, on_progress=on_progress)
        elif group.session is not None:
            self._resume(root, group.session)
        if group.prefix is Prefix.OWN_SESSION:
            question = group.users[0].question
            self._n_extended = root.extend(question, replace_pending=True, on_progress=on_progress)
            self._runs = [root.write(self._sampling)]
            return
        self._runs = [
            self.scheduler.submit(RunRequest(tokens=user.prompt, sampling=self._sampling, keeps_cells=True))
            for user in group.users
        ]

    def _resume(self, root: LiveSequence, path: Path) -> None:
        with SessionReader(path) as reader:
            info = reader.info
            check_identity(info.record, self._opened.found)
            check_layout(info.record, self._opened.model.settings)
            tokens = info.record.tokens
            restore_sections(root, tokens, reader, info.sections, len(tokens) - 1, Reporter())
            wanted = sections_restored(info.sections)
        self.bytes_read += info.n_file_bytes + sum(section.n_stored for section in wanted)

    @property
    def is_done(self) -> bool:
        """Whether all users have their answers."""
        return all(run.is_over for run in self._runs)

    @property
    def n_done(self) -> int:
        """Tokens evaluated, those written included."""
        return self.scheduler.counts.n_decoded - self._n_before

    def step(self) -> None:
        """One call, if anybody waits for it."""
        if not self.is_done:
            self.scheduler.step()

    def answers(self) -> list[UserAnswer]:
        """What the users got, in their order.

        Raises:
            EngineError: not what was asked for.
        """
        return [self._answer(number, run) for number, run in enumerate(self._runs)]

    def _answer(self, number: int, run: Run) -> UserAnswer:
        if run.error is not None:
            raise run.error
        n_answer = self._sampling.max_tokens
        if run.n_generated != n_answer:
            raise EngineError(
                f"user {number} got {run.n_generated} tokens instead of {n_answer}: the answer ended by "
                f"'{run.finish_reason}'"
            )
        # on the root's own cells the run found those of its question there, too
        return UserAnswer(
            tokens=tuple(run.tokens[-run.n_generated :]),
            first_token_s=run.first_token_s,
            ended_s=run.ended_s,
            n_reused=run.n_reused - self._n_extended,
            n_evaluated=run.n_evaluated + self._n_extended,
        )


# ---------------------------------------------------------------- helpers


class _Teller:
    """Tells how far a process is, now and then."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._next_s = 0.0

    def __call__(self, n_done: int) -> None:
        now = time.perf_counter()
        if now >= self._next_s:
            self._next_s = now + _TELL_EVERY_S
            self._link.tell(n_done)


def _different(model: Model, text: Tokens) -> Iterator[int]:
    """Tokens, each once: those of a text, and then others that stand for text."""
    seen = set(text)
    yield from dict.fromkeys(text)
    yield from (token for token in range(model.info.n_vocab) if token not in seen and model.token_bytes(token))


def _warm_up(root: LiveSequence, tokens: Sequence[int]) -> None:
    """Decode a little that does not count, and forget it."""
    root.extend([*tokens, *tokens][: _N_WARM_UP + 1])
    root.rewind(0)


def _memory() -> ProcessMemory:
    """What this process takes. Shares of pages that several have (PSS) would depend on who else on this machine has the
    model open."""
    process = psutil.Process()
    now = process.memory_info()
    shared = getattr(now, "shared", None)  # Linux: resident pages of files
    mapped = now.rss - process.memory_full_info().uss if shared is None else shared
    return ProcessMemory(private_bytes=max(own_peak_bytes() - mapped, 0), mapped_bytes=mapped)
