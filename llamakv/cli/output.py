"""Where a command's result, its notices and its errors go: text for people, or one JSON document."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from llamakv.cli import config, streams
from llamakv.cli.signals import Interrupts
from llamakv.errors import AbortedError, InterruptedByUser, LlamakvError, WriteError

SCHEMA_VERSION = 1

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

_STREAMING = frozenset({"chat", "fork", "serve"})
"""Commands whose ``--json`` output is lines with a ``type``; the closing document is the line of type ``done``."""

_BOLD_RED, _YELLOW, _DIM = "1;31", "33", "2"


class Output:
    """One command's way to the outside. stdout carries the result and nothing else; all else goes to stderr.

    With ``json``, exactly one document is written, whether the command succeeds or fails. Not safe between threads.
    """

    def __init__(self) -> None:
        self.command = ""
        self.json = False
        self.verbose = False
        self.quiet = False
        self.finished = False
        self.pipe_closed = False
        self._write_error: WriteError | None = None
        self.interrupts = Interrupts()
        self._open_line = False

    # ---------------------------------------------------------------- results

    def write(self, text: str) -> None:
        """Write to stdout, as it is to a file or pipe and harmlessly to a terminal.

        Raises:
            PipeClosed: nobody reads stdout any more.
            WriteError: it cannot be written (a full disk).
        """
        self._put(streams.harmless(text) if streams.is_terminal(sys.stdout) else text)
        if text:
            self._open_line = not text.endswith("\n")

    def stream(self, text: str) -> None:
        """As ``write``, from inside an op: what fails is remembered, the op is asked to stop, ``check`` raises it."""
        if self.stopped:
            return
        try:
            self.write(text)
        except streams.PipeClosed:
            pass
        except WriteError as error:
            self._write_error = error

    @property
    def stopped(self) -> bool:
        """Whether stdout takes nothing any more, so that going on is pointless."""
        return self.pipe_closed or self._write_error is not None

    def check(self) -> None:
        """Raise what ``stream`` met.

        Raises:
            PipeClosed, WriteError: as ``write``.
        """
        if self._write_error is not None:
            raise self._write_error
        if self.pipe_closed:
            raise streams.PipeClosed

    def write_styled(self, text: str) -> None:
        """Write rendered text that already is what the terminal should get."""
        self._put(text)

    def line(self, kind: str, data: Mapping[str, Json]) -> None:
        """One JSON line of a ``type``."""
        self._write_json({"type": kind, **data})

    def stream_line(self, kind: str, data: Mapping[str, Json]) -> None:
        """As ``line``, from inside an op, in one write: what fails is remembered, as with ``stream``."""
        if self.stopped:
            return
        try:
            self.line(kind, data)
        except streams.PipeClosed:
            pass
        except WriteError as error:
            self._write_error = error

    def document(self, data: Json, *, status: str = "ok", errors: Sequence[Json] = ()) -> None:
        """The closing JSON document; written once, later calls are ignored."""
        if not self.json or self.finished:
            return
        self.finished = True
        kind = {"type": "done"} if self.command in _STREAMING else {}
        self._write_json(
            {
                **kind,
                "schema_version": SCHEMA_VERSION,
                "command": self.command,
                "status": status,
                "data": data,
                "errors": list(errors),
            }
        )

    def _write_json(self, value: Json) -> None:
        unicode = "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()
        self._put(json.dumps(value, ensure_ascii=not unicode, allow_nan=False) + "\n")

    def write_bytes(self, pieces: Iterable[bytes]) -> None:
        """Write bytes to stdout, which is no terminal.

        Raises:
            PipeClosed, WriteError: as ``write``; what ``pieces`` raises.
        """
        with self._writing():
            sys.stdout.flush()
        for piece in pieces:
            with self._writing():
                sys.stdout.buffer.write(piece)
        with self._writing():
            sys.stdout.flush()

    def _put(self, text: str) -> None:
        with self._writing():
            sys.stdout.write(text)
            sys.stdout.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as error:
            self.pipe_closed = True
            streams.abandon(sys.stdout)
            raise streams.PipeClosed from error
        except OSError as error:
            self.json = False
            streams.abandon(sys.stdout)
            raise WriteError(f"standard output could not be written: {error.strerror}") from error

    # ---------------------------------------------------------------- everything else

    def note(self, text: str) -> None:
        """A dim line for the user; nothing with ``-q``."""
        if not self.quiet:
            self._say(text, _DIM)

    def notice(self, text: str) -> None:
        """A line an op wants the user to see."""
        if not self.quiet:
            self._say(f"note: {text}", _YELLOW, n_styled=len("note:"))

    def warning(self, text: str) -> None:
        """A line that must be seen, ``-q`` or not."""
        self._say(f"warning: {text}", _YELLOW, n_styled=len("warning:"))

    def log(self, text: str) -> None:
        """The engine's own log, as it comes."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text if text.endswith("\n") else text + "\n")

    def failure(self, error: LlamakvError, *, data: Json = None) -> None:
        """Report an error: a line and a hint on stderr, or the JSON document on stdout."""
        if self.json:
            self.document(data, status="error" if data is None else "partial", errors=[error_json(error)])
            return
        self.show(error)

    def show(self, error: LlamakvError) -> None:
        """An error as text, with its hint; an interruption is what the user wanted, not an error."""
        if isinstance(error, InterruptedByUser | AbortedError):
            self._say(error.message, _DIM)
        else:
            self._say(f"error: {error.message}", _BOLD_RED, n_styled=len("error:"))
        if error.hint:
            self._say(f"hint: {error.hint}", _DIM, n_styled=len("hint:"))

    def ask(self, question: str) -> bool:
        """A yes-or-no question on the terminal; anything but yes is no."""
        self.end_line()
        sys.stderr.write(f"{streams.one_line(question)} [y/N] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if not answer.endswith("\n"):
            sys.stderr.write("\n")
        return answer.strip().lower() in ("y", "yes")

    def end_line(self) -> None:
        """Begin a new line on the terminal if streamed text left one open there."""
        if self._open_line and streams.is_terminal(sys.stdout):
            self._open_line = False
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _say(self, text: str, style: str, *, n_styled: int | None = None) -> None:
        self.end_line()
        text = streams.one_line(text)
        if has_colour(sys.stderr):
            n_styled = len(text) if n_styled is None else n_styled
            text = f"\x1b[{style}m{text[:n_styled]}\x1b[0m{text[n_styled:]}"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def has_colour(stream: TextIO) -> bool:
    """Whether a stream takes escape codes and the user likes them."""
    return streams.is_terminal(stream) and config.wants_colour()


def error_json(error: LlamakvError) -> dict[str, Json]:
    """An error as data: its stable code, the message, the hint, its typed fields and the exit status."""
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "fields": to_json(error.fields),
        "exit_status": exit_status(error),
    }


def exit_status(error: LlamakvError) -> int:
    """The process's exit status for an error."""
    status = error.fields.get("status")
    return status if error.code == "interrupted" and isinstance(status, int) else error.exit_status


def to_json(value: object) -> Json:
    """Plain data from frozen data: paths as text, numbers as they are, and infinities, which JSON lacks, as text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"no JSON form for {type(value).__name__}")
