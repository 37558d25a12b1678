"""A conversation with a model: turns, going back, and keeping it on disk after every turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from llamakv.engine.contract import ModelInfo
from llamakv.engine.prompt import ChatTemplate, TurnPlan, plan_again, plan_turn
from llamakv.engine.room import no_room
from llamakv.errors import AbortedError, MismatchError, UsageError
from llamakv.ops.going_back import go_back, put_back
from llamakv.ops.keeping import Keeper
from llamakv.ops.matching import reasons_to_recompute
from llamakv.ops.opening import OpenModel
from llamakv.ops.prefixes import begin_with_prefix
from llamakv.ops.reading import chat_of, placed, template_of, tokenise, with_system
from llamakv.ops.reply import write_reply
from llamakv.ops.requests import Answer, ConversationStats, Opened, Reporter, ResumeOptions, Saved
from llamakv.records import Chat, Message, Sampling
from llamakv.store.session_file import SessionInfo, check_writable, read_session


class Conversation:
    """A live conversation. Saves to ``path`` after each turn, if there is one. Close it.

    What goes wrong in a turn (no room, a template that refuses, Ctrl-C while the message is being read) leaves the
    conversation as it was before that turn.
    """

    def __init__(
        self,
        opened: OpenModel,
        keeper: Keeper,
        back: Opened,
        *,
        template: ChatTemplate,
        messages: Sequence[Message],
        wanted_system: tuple[Message, ...] | None,
        sampling: Sampling,
        path: Path | None,
        overwrite: bool = False,
        name: str | None = None,
        reuse_from: Path | None = None,
    ) -> None:
        opened.model.check_sampling(sampling)
        self._model = opened
        self._keeper = keeper
        self.opened = back
        self._template = template
        self._messages = tuple(messages)
        self._wanted_system = wanted_system
        self._sampling = sampling
        self._path = path
        self._overwrite = overwrite
        self._name = name
        self._reuse_from = reuse_from
        self._n_unsaved = 0
        self._totals = {"reused": back.reused, "evaluated": back.evaluated, "generated": 0}
        self._last_rate = 0.0

    # ------------------------------------------------------------ facts

    @property
    def model_info(self) -> ModelInfo:
        """What the model says of itself."""
        return self._model.info

    @property
    def path(self) -> Path | None:
        """The file it is saved to after each turn."""
        return self._path

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages so far, a new system prompt that is yet to be read included."""
        return self._with_system(self._messages)

    @property
    def n_unsaved_turns(self) -> int:
        """Turns since the last save that succeeded, where each should have been saved."""
        return self._n_unsaved

    @property
    def sampling(self) -> Sampling:
        """How replies are chosen."""
        return self._sampling

    def stats(self) -> ConversationStats:
        """Where it stands."""
        sequence, stored = self._model.sequence, self._keeper.stored
        return ConversationStats(
            n_tokens=len(sequence.tokens),
            n_cells=sequence.n_cells,
            n_ctx=sequence.n_ctx,
            n_ctx_max=sequence.n_ctx_max,
            n_turns=sum(message.role == "assistant" for message in self._messages),
            n_raw_bytes=stored.n_raw_bytes if stored else 0,
            n_stored_bytes=stored.n_stored_bytes if stored else 0,
            tokens_per_s=self._last_rate,
            **self._totals,
        )

    # ------------------------------------------------------------ turns

    def send(self, text: str, reporter: Reporter) -> Answer:
        """One turn: the user's message, then the model's reply, then a save.

        Raises:
            UsageError: an empty message, or one the template refuses.
            NoRoomError: it does not fit; names used, needed and allowed cells.
            AbortedError: stopped while the message was being read; the conversation is as before.
        """
        if not text.strip():
            raise UsageError("the message is empty")
        started = time.perf_counter()
        wanted = (*self.messages, Message(role="user", content=text, p0=0, p1=0))
        sequence = self._model.sequence
        ends = bool(sequence.tokens) and self._model.model.is_end(sequence.tokens[-1])
        plan = plan_turn(
            self._template,
            self._messages,
            wanted,
            n_tokens=len(sequence.tokens),
            ends_with_end_token=ends,
        )
        return self._turn(plan, wanted, started, reporter)

    def answer_open(self, reporter: Reporter) -> Answer:
        """Let the model reply to a message that was left open: a saved document, as it stands.

        Raises:
            UsageError: the last word is the model's own.
        """
        if not self._messages or self._messages[-1].role == "assistant":
            raise UsageError("the conversation ends with a reply", hint="say something with -p")
        started = time.perf_counter()
        wanted = (*self._messages[:-1], replace(self._messages[-1], is_open=False))
        sequence = self._model.sequence
        plan = plan_turn(
            self._template, self._messages, wanted, n_tokens=len(sequence.tokens), ends_with_end_token=False
        )
        return self._turn(plan, wanted, started, reporter)

    def retry(self, reporter: Reporter) -> Answer:
        """Another reply to the last message: the seed is counted up by one, the old reply is dropped.

        Raises:
            UsageError: there is no reply to try again.
        """
        if not self._messages or self._messages[-1].role != "assistant" or self._messages[-1].p0 == 0:
            raise UsageError("there is no reply to try again")
        started = time.perf_counter()
        if self._sampling.temperature <= 0:
            reporter.notice("temperature is 0: the reply will be the same")
        with self._undoing():
            self._sampling = replace(self._sampling, seed=(self._sampling.seed + 1) % 2**32)
            reused = go_back(self._model.sequence, self._keeper.stored, self._messages[-1].p0, reporter).n_kept
            self._messages = self._messages[:-1]
            answer = self._reply(reused, started, reporter)
        return self._saved(answer, reporter)

    def undo(self, reporter: Reporter) -> int:
        """Take back the last user's message and what came after it, and save. Returns the number of messages taken.

        Raises:
            UsageError: there is nothing to take back.
        """
        last = next((i for i in range(len(self._messages) - 1, -1, -1) if self._messages[i].role == "user"), None)
        if last is None or self._messages[last].is_open:
            raise UsageError("there is nothing to take back")
        n_removed = len(self._messages) - last
        back = go_back(self._model.sequence, self._keeper.stored, self._messages[last].p0, reporter)
        self._totals["evaluated"] += back.n_evaluated
        self._messages = self._messages[:last]
        if self._path is not None and self._keeper.stored is not None:
            if self._model.sequence.tokens:
                self._save_turn(reporter)
            else:
                reporter.notice(f"nothing is left to save: {self._path} keeps the conversation until your next message")
        return n_removed

    def set_system(self, text: str, reporter: Reporter) -> None:
        """Change the system prompt (empty: none). What was said is read again under it, and saved.

        Raises:
            NoRoomError: the conversation does not fit with it.
            AbortedError: stopped; the system prompt is the old one.
        """
        system = (Message(role="system", content=text, p0=0, p1=0),) if text.strip() else ()
        if [m.content for m in system] == [m.content for m in self.messages if m.role == "system"]:
            return
        wanted = (*system, *(message for message in self._messages if message.role != "system"))
        if not self._messages or not wanted or wanted[-1].role == "system":
            self._wanted_system = system  # it is read with the first message
            return
        with self._undoing():
            self._read(plan_again(self._template, wanted), wanted, reporter)
            self._model.sequence.mark()
        if self._path is not None:
            self._save_turn(reporter)

    # ------------------------------------------------------------ disk

    def save(self, path: Path | None, reporter: Reporter, *, name: str | None = None, overwrite: bool = False) -> Saved:
        """Save now; with a path, save there from now on.

        Raises:
            UsageError: there is no path, or nothing to save yet.
        """
        target = path if path is not None else self._path
        if target is None:
            raise UsageError("name a file or a session to save to", hint="/save session.bin")
        is_own = self._keeper.stored is not None and target == self._keeper.stored.path
        if not is_own:
            check_writable(target, overwrite=overwrite)
        saved = self._write(target, reporter, overwrite=overwrite, name=name)
        self._path, self._name = saved.info.path, name if name is not None else self._name
        return saved

    def load(self, path: Path, reporter: Reporter) -> None:
        """Go over to another session of the same model; from now on it is saved there. On any failure this
        conversation stays as it is.

        Raises:
            MismatchError: it was saved with another model or other memory settings.
        """
        info = read_session(path)
        record = info.record
        chat_of(info)
        own = (self._model.identity, self._model.model.settings)
        if (record.identity, record.settings) != own:
            raise MismatchError(
                f"{path} was saved with another model or other memory settings ({record.identity.name}) "
                f"than this conversation's ({self._model.info.name})",
                hint=f"leave this chat and run: llamakv chat --resume {path}",
                expected=record.identity.digest,
                actual=self._model.identity.digest,
            )
        other = reasons_to_recompute(record, self._model.model.versions, ResumeOptions())
        if other:
            raise MismatchError(
                f"{path} cannot be taken over as it is: {'; '.join(other)}",
                hint=f"leave this chat and run: llamakv chat --resume {path}",
            )
        started = time.perf_counter()
        checked: list[tuple[Chat, ChatTemplate]] = []

        def accept(info: SessionInfo) -> None:
            chat = chat_of(info)
            now_s = info.record.lineage.created_s
            checked.append((chat, template_of(self._model, chat.template, now_s=now_s)))

        info = self._model.restore_beside(info, reporter, accept)
        record = info.record
        chat, self._template = checked[0]
        self._keeper.replace_stored(info)
        self._messages, self._wanted_system = chat.messages, None
        self._sampling, self._path, self._name = record.sampling, path, None
        self.opened = Opened(
            record=record,
            reused=self._model.sequence.n_cells,
            evaluated=0,
            model_load_s=0.0,
            restore_s=time.perf_counter() - started,
        )

    def close(self) -> None:
        """Free the model; nothing is saved."""
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ inside a turn

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return messages if self._wanted_system is None else with_system(messages, self._wanted_system)

    def _turn(self, plan: TurnPlan, wanted: tuple[Message, ...], started: float, reporter: Reporter) -> Answer:
        with self._undoing():
            try:
                reused = self._read(plan, wanted, reporter)
            except AbortedError as error:
                raise AbortedError(
                    "interrupted while the message was read: it is not part of the conversation",
                    n_done=error.fields.get("n_done"),
                ) from error
            answer = self._reply(reused, started, reporter)
        return self._saved(answer, reporter)

    def _read(self, plan: TurnPlan, wanted: tuple[Message, ...], reporter: Reporter) -> int:
        """Evaluate what a plan says; returns the number of cells that were there already."""
        sequence = self._model.sequence
        pieces = tokenise(self._model, plan.pieces, at_start=plan.n_keep == 0)
        n_new = sum(len(tokens) for _, tokens in pieces)
        n_needed = plan.n_keep - plan.replace_pending + n_new + 1
        if n_needed > sequence.n_ctx_max:
            raise no_room(
                needed=n_needed,
                used=sequence.n_cells,
                limit=sequence.n_ctx_max,
                n_ctx_train=self._model.info.n_ctx_train,
            )
        if plan.rewritten_from is not None:
            changed = [m.content for m in wanted if m.role == "system"] != [
                m.content for m in self._messages if m.role == "system"
            ]
            why = "there is a new system prompt" if changed else "the template writes earlier messages differently now"
            reporter.notice(f"{why}: {n_new:,} tokens are read again")
        reused = sequence.n_cells
        if plan.n_keep < len(sequence.tokens):
            reused = go_back(self._model.sequence, self._keeper.stored, plan.n_keep, reporter).n_kept
        tokens = [token for _, piece in pieces for token in piece]
        if not sequence.tokens:
            reused = begin_with_prefix(self._model, self._keeper, self._reuse_from, tokens, reporter)
            tokens = tokens[len(sequence.tokens) :]
        if tokens:
            sequence.extend(
                tokens,
                replace_pending=plan.replace_pending,
                on_progress=lambda done, total: reporter.progress("prefill", done, total),
                should_abort=reporter.should_abort,
            )
        self._messages = placed(self._model, wanted, plan, pieces, end=len(sequence.tokens), time_s=time.time())
        self._wanted_system = None
        return reused

    @contextmanager
    def _undoing(self) -> Iterator[None]:
        """Put the conversation back if a turn fails or is stopped before the reply began."""
        before = list(self._model.sequence.tokens)
        words = (self._messages, self._wanted_system, self._sampling)
        try:
            yield
        except BaseException:
            put_back(self._model.sequence, self._keeper.stored, before)
            self._messages, self._wanted_system, self._sampling = words
            raise

    def _reply(self, reused: int, started: float, reporter: Reporter) -> Answer:
        sequence = self._model.sequence
        p0 = len(sequence.tokens)
        reply = write_reply(sequence, self._sampling, reporter, started=started)
        self._messages = (*self._messages, reply.message(p0, len(sequence.tokens)))
        sequence.mark()
        self._totals["reused"] += reused
        self._totals["evaluated"] += p0 - reused
        self._totals["generated"] += reply.n_tokens
        self._last_rate = reply.tokens_per_s
        return Answer(
            text=reply.text,
            finish_reason=reply.finish_reason,
            reused=reused,
            evaluated=p0 - reused,
            generated=reply.n_tokens,
            seed=self._sampling.seed,
            elapsed_s=reply.elapsed_s,
            first_token_s=reply.first_token_s,
        )

    def _saved(self, answer: Answer, reporter: Reporter) -> Answer:
        """The answer after the turn was saved, where it is to be."""
        if self._path is None:
            return answer
        self._n_unsaved += 1
        return replace(answer, saved=self._save_turn(reporter))

    def _save_turn(self, reporter: Reporter) -> Saved:
        assert self._path is not None
        saved = self._write(self._path, reporter, overwrite=self._overwrite, name=self._name)
        self._path = saved.info.path
        return saved

    def _write(self, path: Path, reporter: Reporter, *, overwrite: bool, name: str | None) -> Saved:
        chat = Chat(template=self._template.source, template_digest=self._template.digest, messages=self._messages)
        saved = self._keeper.save(
            path,
            chat=chat,
            text=None,
            sampling=self._sampling,
            reporter=reporter,
            overwrite=overwrite,
            name=name,
            aside_on_conflict=True,
        )
        self._n_unsaved = 0
        return saved
