"""The line a person types into: history, several lines, completion of commands. The only user of prompt_toolkit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth

from llamakv.cli import config
from llamakv.cli.signals import Interrupts
from llamakv.errors import InterruptedByUser

QUOTES = '"""'


class Prompt:
    """Reads what the user types, one message at a time.

    Enter sends, unless a message begun with three quotes is still open; Alt-Enter begins a new line. ``commands`` maps
    each slash command to its help; ``arguments`` gives what may follow one of them.
    """

    def __init__(
        self,
        interrupts: Interrupts,
        history: Path,
        commands: Mapping[str, str],
        arguments: Callable[[str], Iterable[str]],
    ) -> None:
        self._interrupts = interrupts
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            completer=_Commands(commands, arguments),
            key_bindings=_bindings(),
            multiline=True,
            enable_suspend=True,
            prompt_continuation=_continuation,
            color_depth=None if config.wants_colour() else ColorDepth.DEPTH_1_BIT,
            reserve_space_for_menu=4,
        )

    def read(self) -> str:
        """One message, without the quotes around it.

        Raises:
            EOFError: Ctrl-D on an empty line.
            KeyboardInterrupt: Ctrl-C on an empty line.
            InterruptedByUser: a signal asked the process to end.
        """
        self._interrupts.on_end = self._end
        try:
            return unquoted(self._session.prompt("> "))
        finally:
            self._interrupts.on_end = None

    def _end(self, reason: InterruptedByUser) -> None:
        app = self._session.app
        if not app.is_running or app.loop is None:
            raise reason
        app.loop.call_soon_threadsafe(lambda: app.exit(exception=reason))


def unquoted(text: str) -> str:
    """A message without the three quotes it may be put between."""
    bare = text.strip()
    if len(bare) >= 2 * len(QUOTES) and bare.startswith(QUOTES) and bare.endswith(QUOTES):
        return bare[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


def is_open_block(text: str) -> bool:
    """Whether a message begun with three quotes still lacks its end."""
    bare = text.strip()
    return bare.startswith(QUOTES) and not (len(bare) >= 2 * len(QUOTES) and bare.endswith(QUOTES))


def _continuation(width: int, _line: int, _wrapped: int) -> StyleAndTextTuples:
    return [("", "… ".rjust(width))]


def _history(path: Path) -> History:
    """A history only its user can read; forgotten at the end where the file cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600))
        os.chmod(path, 0o600)
        return FileHistory(str(path))
    return InMemoryHistory()


def _bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open_block(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @keys.add("<vt100-mouse-event>")
    def _no_mouse(_: KeyPressEvent) -> None:
        """prompt_toolkit takes a colour code that is pasted as keys for the mouse, and breaks on it."""

    return keys


class _Commands(Completer):
    """Completes slash commands and what follows them; nothing in ordinary messages."""

    def __init__(self, commands: Mapping[str, str], arguments: Callable[[str], Iterable[str]]) -> None:
        self._commands = commands
        self._arguments = arguments

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        command, space, rest = text.partition(" ")
        if not space:
            for name, help_text in self._commands.items():
                if name.startswith(command):
                    yield Completion(name, start_position=-len(command), display_meta=help_text)
            return
        for word in self._arguments(command):
            if word.startswith(rest):
                yield Completion(word, start_position=-len(rest))
