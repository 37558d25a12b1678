"""The conversation loop of ``chat`` in a terminal: what is typed, the reply, and the slash commands."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from llamakv.cli import config, describe, refs, render
from llamakv.cli.output import Output
from llamakv.cli.reporting import running
from llamakv.cli.terminal import Prompt
from llamakv.errors import InterruptedByUser, LlamakvError, UsageError

if TYPE_CHECKING:
    from llamakv.ops.chat import Conversation
    from llamakv.ops.requests import Answer, Reporter

COMMANDS = {
    "/help": "show this",
    "/save": "[REF]  save here from now on, or save now",
    "/load": "REF  go on with another session",
    "/undo": "take back the last message and its reply",
    "/retry": "have the last message answered again",
    "/system": "[TEXT]  set the system prompt, or show it",
    "/history": "show the conversation so far",
    "/stats": "tokens, cells, size and speed",
    "/exit": "leave (as Ctrl-D does)",
}
_KEYS = (
    ("Enter", "send"),
    ("Alt-Enter", 'new line; or put several lines between """ and """'),
    ("Ctrl-C", "stop the reply and keep what was said; at an empty prompt, leave"),
    ("//text", "send text that begins with /"),
)
_N_RECALLED = 240
"""Characters of the last messages shown after resuming."""


class Repl:
    """One conversation with a person. Every error but a request to end is shown, and the conversation goes on."""

    def __init__(self, output: Output, conversation: Conversation, root: Path) -> None:
        self._output = output
        self._conversation = conversation
        self._root = root
        self._leaving = False
        self._has_unread_system = False
        self._prompt = Prompt(output.interrupts, config.history_file(), COMMANDS, self._arguments)
        self._actions: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/save": self._save,
            "/load": self._load,
            "/undo": self._undo,
            "/retry": self._retry,
            "/system": self._system,
            "/history": self._history,
            "/stats": self._stats,
            "/exit": self._exit,
            "/quit": self._exit,
        }

    def run(self, *, resumed: str | None, saved_as: str | None) -> bool:
        """Talk until the user leaves. ``resumed`` is the session gone on with, ``saved_as`` the one saved to.

        Returns whether the user left by Ctrl-C at an empty prompt.

        Raises:
            InterruptedByUser: a signal ends the process.
        """
        self._banner(resumed, saved_as)
        try:
            while not self._leaving:
                try:
                    text = self._prompt.read()
                except EOFError:
                    break
                self._take(text)
            by_interrupt = False
        except KeyboardInterrupt:
            by_interrupt = True
        self._save_what_is_not()
        self._farewell()
        return by_interrupt

    def _save_what_is_not(self) -> None:
        """Try once more to save turns that could not be saved when they ended.

        Raises:
            LlamakvError: it still cannot be done; the process ends with its status.
        """
        if self._conversation.n_unsaved_turns and self._conversation.path is not None:
            try:
                with running(self._output) as reporter:
                    self._conversation.save(None, reporter)
            except LlamakvError as error:
                turns = render.count(self._conversation.n_unsaved_turns, "turn")
                error.message = f"{turns} could not be saved: {error.message}"
                raise

    def _take(self, text: str) -> None:
        output = self._output
        try:
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
            elif text.strip():
                said = text[1:] if text.startswith("//") else text
                self._reply(lambda reporter: self._conversation.send(said, reporter))
                self._has_unread_system = False
        except LlamakvError as error:
            output.check()
            output.interrupts.check_ending()
            if error.exit_status == InterruptedByUser.exit_status:
                output.note(error.message)
            else:
                output.show(error)
                if self._conversation.n_unsaved_turns:
                    output.note("this turn is not saved: /save FILE keeps the conversation elsewhere")
        output.interrupts.check_ending()

    def _reply(self, ask: Callable[[Reporter], Answer]) -> None:
        output = self._output
        with running(output, text=output.stream) as reporter:
            answer = ask(reporter)
        output.check()
        output.end_line()
        output.note(describe.answer_line(answer))
        output.write("\n")

    # ---------------------------------------------------------------- commands

    def _command(self, text: str) -> None:
        name, _, argument = text.strip().partition(" ")
        action = self._actions.get(name)
        if action is None:
            raise UsageError(
                f"no command {name!r}; nothing was sent", hint="/help lists them; //text sends text that begins with /"
            )
        if argument.strip() and "  " not in COMMANDS.get(name, ""):
            raise UsageError(f"{name} takes nothing behind it", hint="/help lists the commands")
        action(argument.strip())

    def _arguments(self, command: str) -> Iterable[str]:
        """What may follow a command, for completion."""
        from llamakv.cli.commands.options import session_names

        return session_names(self._root) if command in ("/save", "/load") else ()

    def _help(self, _: str) -> None:
        rows = [*COMMANDS.items(), ("", ""), *_KEYS]
        self._output.write_styled(render.report(rows))

    def _save(self, argument: str) -> None:
        ref, force = _ref(argument)
        conversation = self._conversation
        target = None
        if ref:
            hint = f"choose another name, or replace it: /save --force {ref}"
            is_own = refs.target(self._root, ref).path == conversation.path
            target = refs.fresh(self._root, ref, overwrite=force or is_own, hint=hint)
        elif conversation.path is None:
            raise UsageError("this conversation has no session yet", hint="/save NAME")
        path, name = (None, None) if target is None else (target.path, target.name)
        with running(self._output) as reporter:
            saved = conversation.save(path, reporter, name=name, overwrite=force)
        shown = refs.shown(target) if target is not None else str(conversation.path)
        n_tokens = render.count(len(saved.info.record.tokens), "token")
        self._output.note(f"saved {shown}: {n_tokens}, {render.size(saved.n_written)} written")

    def _load(self, argument: str) -> None:
        ref, force = _ref(argument)
        if not ref:
            raise UsageError("which session?", hint="/load NAME")
        found = refs.existing(self._root, ref)
        if self._is_unsaved() and not force:
            raise UsageError(
                "this conversation is not saved and would be lost", hint=f"/save NAME, or /load --force {ref}"
            )
        with running(self._output) as reporter:
            self._conversation.load(found.path, reporter)
        self._has_unread_system = False
        self._output.note(describe.opened_line(refs.shown(found), self._conversation.opened))
        self._recall()

    def _undo(self, _: str) -> None:
        with running(self._output) as reporter:
            n_removed = self._conversation.undo(reporter)
        self._output.note(f"took back {render.count(n_removed, 'message')}" if n_removed else "nothing to take back")

    def _retry(self, _: str) -> None:
        self._reply(self._conversation.retry)

    def _system(self, argument: str) -> None:
        if argument:
            with running(self._output) as reporter:
                self._conversation.set_system(argument, reporter)
            self._has_unread_system = not self._conversation.stats().n_turns
            self._output.note("system prompt set")
            return
        current = [message.content for message in self._conversation.messages if message.role == "system"]
        self._output.write(f"{current[0]}\n" if current else "no system prompt\n")

    def _history(self, _: str) -> None:
        self._output.write(describe.history_text(self._conversation.messages) or "nothing said yet\n")

    def _stats(self, _: str) -> None:
        self._output.write_styled(render.report(describe.stats_rows(self._conversation.stats())))

    def _exit(self, _: str) -> None:
        self._leaving = True

    # ---------------------------------------------------------------- what is said around

    def _banner(self, resumed: str | None, saved_as: str | None) -> None:
        conversation, output = self._conversation, self._output
        info = conversation.model_info
        model = f"{info.name or info.architecture} {info.quantisation}".strip()
        output.note(f"{model} · context up to {conversation.stats().n_ctx_max:,} tokens")
        if resumed is None:
            where = f"saving to {saved_as}" if saved_as else "not saved; /save NAME keeps this conversation"
            output.note(f"{where} · /help lists the commands")
        if resumed is not None:
            output.note(describe.opened_line(resumed, conversation.opened))
            if saved_as not in (None, resumed):
                output.note(f"saving to {saved_as}")
            self._recall()

    def _recall(self) -> None:
        """Show how the conversation ended, so that the user knows where it goes on."""
        for message in self._conversation.messages[-2:]:
            if message.role != "system":
                self._output.note(f"  {message.role}: {render.excerpt(message.content, _N_RECALLED)}")

    def _is_unsaved(self) -> bool:
        conversation = self._conversation
        return conversation.path is None and any(message.role == "user" for message in conversation.messages)

    def _farewell(self) -> None:
        path = self._conversation.path
        if self._has_unread_system:
            self._output.note("the new system prompt is not saved: nothing was said under it")
        if self._is_unsaved():
            self._output.note("this conversation was not saved; next time: llamakv chat --save NAME")
        elif path is not None and os.path.lexists(path):
            is_named = path.parent == self._root == config.store_dir(None)
            ref = path.name.removesuffix(".bin") if is_named else str(path)
            self._output.note(f"go on with: llamakv chat --resume {shlex.quote(ref)}")


def _ref(argument: str) -> tuple[str, bool]:
    """A REF and whether ``--force`` stands before it."""
    first, _, rest = argument.partition(" ")
    return (rest.strip(), True) if first == "--force" else (argument, False)
