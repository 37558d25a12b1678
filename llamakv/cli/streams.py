"""Standard input and output, made safe to use: closed ones opened, characters that cannot be written replaced."""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t\r"}
_CONTROLS: dict[int, int | None] = {
    **_PICTURES,
    0x0D: None,
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Control characters as visible ones (U+2400 block), so that text cannot drive a terminal; returns are left out."""


class _Patient(io.RawIOBase):
    """A descriptor that another program set not to block: waits until it takes what is written, which Python's own
    streams drop."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Buffer, /) -> int:
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:
                select.select([], [self._descriptor], [])


class PipeClosed(Exception):
    """The reader of standard output went away."""


def prepare() -> None:
    """Open closed standard streams on the null device and make writing text never fail for its characters.

    A closed descriptor 0, 1 or 2 would otherwise be given to the next file opened, and anything printed would go
    into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and not os.get_blocking(stream.fileno()):
            patient = io.BufferedWriter(_Patient(stream.fileno()))
            setattr(sys, name, io.TextIOWrapper(patient, encoding=stream.encoding, errors="replace", newline="\n"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if name == "stdout" else "backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")


def abandon(stream: TextIO) -> None:
    """Point a stream nobody reads any more at the null device, so that nothing fails when it is flushed at exit."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


def is_terminal(stream: TextIO) -> bool:
    """Whether a person is at the other end."""
    try:
        return stream.isatty()
    except (ValueError, OSError):
        return False


def is_file(stream: TextIO) -> bool:
    """Whether what is written goes to a regular file."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (ValueError, OSError):
        return False


def harmless(text: str) -> str:
    """Text for a terminal: control characters other than newline and tab made visible or left out."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """Harmless text without line breaks."""
    return harmless(text).replace("\n", "\u2424").replace("\t", " ")
