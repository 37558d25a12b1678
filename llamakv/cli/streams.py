"""Standard input and output, made safe to use: closed ones opened, characters that cannot be written replaced."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t\r"}
_CONTROLS: dict[int, int | None] = {
    **_PICTURES,
    0x0D: None,
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Control characters as visible ones (U+2400 block), so that text cannot drive a terminal; returns are left out."""


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


def harmless(text: str) -> str:
    """Text for a terminal: control characters other than newline and tab made visible or left out."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """Harmless text without line breaks."""
    return harmless(text).replace("\n", "\u2424").replace("\t", " ")
