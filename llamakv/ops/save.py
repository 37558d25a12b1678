"""Prefilling a text and keeping it: the beginning that many questions will share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llamakv.engine.prefix import n_common
from llamakv.engine.prompt import ChatTemplate, Piece, plan_open
from llamakv.engine.text import join
from llamakv.errors import AbortedError, ExistsError, UsageError
from llamakv.ops.keeping import Keeper
from llamakv.ops.lineage import INCOMPLETE, join_note, split_note
from llamakv.ops.matching import CHAT_SAMPLING, find_model, merge_memory, merge_sampling, random_seed
from llamakv.ops.opening import OpenModel, resume
from llamakv.ops.prefixes import begin_with_prefix
from llamakv.ops.reading import template_of, tokenise
from llamakv.ops.requests import Reporter, Saved, SaveRequest
from llamakv.records import Chat, Message, Sampling, SessionRecord
from llamakv.store.session_file import SessionInfo, check_writable, read_session

_N_STRETCH = 1024  # tokens, a multiple of the engine's batch
_N_FIRST = 256  # enough to see what each token takes, and whether all of them will fit
_KEEP_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """A finished save: tokens that were there already, tokens read now, and whether all of the text was read (False
    after an interruption: what had been read is saved all the same, and the same command goes on from there)."""

    saved: Saved
    reused: int
    evaluated: int
    n_tokens_wanted: int
    elapsed_s: float
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToRead:
    """What is to be read, as text and as it goes into the record."""

    pieces: tuple[Piece, ...]
    messages: tuple[Message, ...]
    template: ChatTemplate | None
    raw: str | None


def save_prefix(request: SaveRequest, reporter: Reporter) -> SaveResult:
    """Read a text and save the session. A session at ``path`` that is a beginning of the new one is extended; any
    other is left alone unless ``overwrite``. While a long text is read, what has been read is saved every half minute.

    Raises:
        UsageError: no text, or no chat template and not ``raw``.
        ExistsError: another session is there.
    """
    started = time.perf_counter()
    if not (request.text or "").strip() and not request.system:
        raise UsageError("the text is empty: there is nothing to save")
    if request.raw and request.system:
        raise UsageError("raw text has no system prompt", hint="leave out --raw or --system")
    earlier = earlier_session(request)
    check_writable(request.path, overwrite=request.overwrite or earlier is not None)
    opened, keeper = _open(request, earlier, reporter)
    with opened:
        return read_and_keep(opened, keeper, request, earlier, reporter, started=started)


def read_and_keep(
    opened: OpenModel,
    keeper: Keeper,
    request: SaveRequest,
    earlier: SessionInfo | None,
    reporter: Reporter,
    *,
    started: float,
) -> SaveResult:
    """``save_prefix`` with a model that is open, and in it, where there is one, the ``earlier`` session at the path."""
    text = text_of(request, opened, earlier)
    pieces = tokenise(opened, text.pieces, at_start=True)
    tokens = [token for _, piece in pieces for token in piece]
    if earlier is not None and is_incomplete(earlier.record):
        check_tokens_continue(earlier, tokens)
    sampling = sampling_of(request, earlier)
    opened.model.check_sampling(sampling)

    target = request.path
    own_note = "" if earlier is None else split_note(earlier.record.lineage.note)[1]

    def keep(*, complete: bool) -> Saved:
        nonlocal target
        chat, raw = _as_read(opened, text, pieces, earlier, complete=complete)
        mark = "" if complete else f"{INCOMPLETE} {len(opened.sequence.tokens)} of {len(tokens)} tokens"
        saved = keeper.save(
            target,
            chat=chat,
            text=raw,
            sampling=sampling,
            reporter=reporter,
            overwrite=request.overwrite,
            name=request.name,
            note=join_note(mark, own_note),
            aside_on_conflict=True,
        )
        target = saved.info.path
        return saved

    if earlier is None:
        opened.open_sequence(min(len(tokens), opened.n_ctx_max()))
        if len(tokens) <= opened.sequence.n_ctx_max:
            begin_with_prefix(opened, keeper, request.reuse_from, tokens, reporter)

    def make_room(n_cells: int) -> None:
        keeper.make_room(target, reporter=reporter, overwrite=request.overwrite, n_cells=n_cells)

    reused, complete = _read(opened, tokens, reporter, keep, make_room)
    nothing_new = earlier is not None and _is_same(earlier, opened, sampling, request.name)
    return SaveResult(
        saved=Saved(info=earlier, n_written=0, elapsed_s=0.0)
        if nothing_new and earlier is not None
        else keep(complete=complete),
        reused=reused,
        evaluated=opened.sequence.n_cells - reused,
        n_tokens_wanted=len(tokens),
        elapsed_s=time.perf_counter() - started,
        complete=complete,
    )


def tokens_of(opened: OpenModel, request: SaveRequest) -> tuple[int, ...]:
    """What a new session of a text would hold."""
    pieces = tokenise(opened, text_of(request, opened, None).pieces, at_start=True)
    return tuple(token for _, piece in pieces for token in piece)


# ---------------------------------------------------------------- what is there


def earlier_session(request: SaveRequest) -> SessionInfo | None:
    """The session at the path, if it may be a beginning of what is wanted; None if there is none or it will go."""
    if request.overwrite or not os.path.lexists(request.path):
        return None
    info = read_session(request.path)
    if not is_incomplete(info.record) and not _is_beginning(info.record, request):
        raise _another(info)
    return info


def _another(info: SessionInfo) -> ExistsError:
    return ExistsError(
        f"{info.path} holds another session ({len(info.record.tokens):,} tokens), which this text does not continue",
        hint="use --force to replace it, or save under another name",
        path=str(info.path),
    )


def is_incomplete(record: SessionRecord) -> bool:
    return record.lineage.note.startswith(INCOMPLETE)


def _is_same(earlier: SessionInfo, opened: OpenModel, sampling: Sampling, name: str | None) -> bool:
    """Whether the file holds already what is to be saved."""
    record = earlier.record
    return (
        not is_incomplete(record)
        and record.tokens == tuple(opened.sequence.tokens)
        and (record.sampling, record.settings, record.versions)
        == (sampling, opened.model.settings, opened.model.versions)
        and record.lineage.name == name
        and opened.sequence.n_settled == opened.sequence.n_cells
    )


def check_tokens_continue(earlier: SessionInfo, tokens: Sequence[int]) -> None:
    """Whether a session that was left in the middle of a text was in the middle of this one."""
    read = earlier.record.tokens
    if tuple(tokens[: len(read)]) != read:
        raise _another(earlier)


def _is_beginning(record: SessionRecord, request: SaveRequest) -> bool:
    wanted = request.text or ""
    if request.raw or record.text is not None:
        return request.raw and record.text is not None and wanted.startswith(record.text)
    messages = record.chat.messages if record.chat is not None else ()
    system = "".join(message.content for message in messages if message.role == "system")
    rest = [message for message in messages if message.role != "system"]
    if system != (request.system or "") or len(rest) > 1 or (rest and not rest[0].is_open):
        return False
    return wanted.rstrip().startswith(rest[0].content) if rest else True


def _open(request: SaveRequest, earlier: SessionInfo | None, reporter: Reporter) -> tuple[OpenModel, Keeper]:
    if earlier is not None:
        opened, info, _ = resume(request.path, request.model, request.memory, request.options, reporter, earlier)
        return opened, Keeper(opened, info, compress=request.compress, budget=request.budget)
    found = find_model(request.model, None, reporter)
    memory = merge_memory(request.memory, None, None, may_change=True)
    opened = OpenModel(found, request.model, memory, reporter=reporter)
    return opened, Keeper(opened, None, compress=request.compress, budget=request.budget)


def sampling_of(request: SaveRequest, earlier: SessionInfo | None) -> Sampling:
    base = replace(CHAT_SAMPLING, seed=random_seed()) if earlier is None else earlier.record.sampling
    return merge_sampling(request.sampling, base)


# ---------------------------------------------------------------- reading


def text_of(request: SaveRequest, opened: OpenModel, earlier: SessionInfo | None) -> TextToRead:
    if request.raw:
        assert request.text is not None
        return TextToRead(pieces=(Piece(index=0, text=request.text),), messages=(), template=None, raw=request.text)
    stored = earlier.record.chat if earlier is not None else None
    now_s = earlier.record.lineage.created_s if earlier is not None else time.time()
    template = template_of(opened, stored.template if stored is not None else None, now_s=now_s)
    content = (request.text or "").rstrip()  # so that a file that grows goes on from its last word
    system = (Message(role="system", content=request.system, p0=0, p1=0),) if request.system else ()
    messages = (*system, Message(role="user", content=content, p0=0, p1=0, is_open=True))
    return TextToRead(pieces=plan_open(template, messages).pieces, messages=messages, template=template, raw=None)


def _read(
    opened: OpenModel,
    tokens: Sequence[int],
    reporter: Reporter,
    keep: Callable[..., Saved],
    make_room: Callable[[int], None],
) -> tuple[int, bool]:
    """Evaluate what is not there yet, keeping it now and then; returns the cells that were there, and whether all was
    read. The stretches between are whole batches, so that they change nothing in how the text is cut into batches."""
    sequence = opened.sequence
    n_there = n_common(sequence.tokens, tokens)
    rewound = sequence.rewind(n_there, should_abort=reporter.should_abort)
    reused = rewound.n_kept
    if rewound.n_evaluated:
        reporter.notice(f"this model's memory cannot go back: {rewound.n_evaluated:,} tokens were read again")
    total = len(tokens) - 1
    if len(tokens) > sequence.n_ctx_max:
        sequence.extend(tokens[n_there:])  # raises, before a part of it is read
    kept_s = time.monotonic()
    while len(sequence.tokens) < len(tokens):
        n_done = sequence.n_cells - reused
        stretch = _N_STRETCH - n_done % _N_STRETCH if n_done else _N_FIRST
        until = min(sequence.n_cells + stretch + 1, len(tokens))
        try:
            sequence.extend(
                tokens[len(sequence.tokens) : until],
                on_progress=lambda done, _, before=n_done: reporter.progress("prefill", before + done, total - reused),  # type: ignore[misc]
                should_abort=reporter.should_abort,
            )
        except AbortedError as error:
            if sequence.n_cells <= reused:
                n = total - reused
                raise AbortedError(
                    f"interrupted: none of {n:,} tokens was read, nothing was saved", n_done=0
                ) from error
            return reused, False
        if n_done == 0 and until < len(tokens):
            make_room(total)  # before the rest is read in vain
        if until < len(tokens) and time.monotonic() - kept_s > _KEEP_EVERY_S:
            keep(complete=False)
            kept_s = time.monotonic()
    return reused, True


def _as_read(
    opened: OpenModel,
    text: TextToRead,
    pieces: Sequence[tuple[int, list[int]]],
    earlier: SessionInfo | None,
    *,
    complete: bool,
) -> tuple[Chat | None, str | None]:
    """What the session holds of the text: all of it, or what was read before an interruption."""
    tokens = opened.sequence.tokens
    if text.template is None:
        return None, text.raw if complete else join(opened.model.token_bytes(token) for token in tokens)
    messages = list(text.messages)
    position = 0
    for index, piece in pieces:
        end = min(position + len(piece), len(tokens))
        messages[index] = replace(messages[index], p0=position, p1=end)
        position = end
    if not complete:
        content = _content_read(opened, text)
        if content is None:
            return None, join(opened.model.token_bytes(token) for token in tokens)
        messages[-1] = replace(messages[-1], content=content)
    template = text.template
    dated = _dated(messages, earlier)
    return Chat(template=template.source, template_digest=template.digest, messages=dated), None


def _dated(messages: Sequence[Message], earlier: SessionInfo | None) -> tuple[Message, ...]:
    """Messages with the time they were read: what was read before keeps its own."""
    chat = None if earlier is None else earlier.record.chat
    before = () if chat is None else chat.messages
    now_s = time.time()
    return tuple(next((old for old in before if old == new), replace(new, time_s=now_s)) for new in messages)


def _content_read(opened: OpenModel, text: TextToRead) -> str | None:
    """The open message's content as far as it was read; None where that cannot be told."""
    assert text.template is not None
    read = join(opened.model.token_bytes(token, special=True) for token in opened.sequence.tokens)
    empty = text.template.render_open((*text.messages[:-1], replace(text.messages[-1], content="")))
    if not read.startswith(empty):
        return None
    content = read[len(empty) :]
    again = text.template.render_open((*text.messages[:-1], replace(text.messages[-1], content=content)))
    return content if again == read else None
