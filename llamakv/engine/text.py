"""From tokens to text, a token at a time: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence


class TextStream:
    """Turns tokens into text as they come.

    ``prime`` is what was said just before: if it ends inside a character, the first text completes that character.
    Text that might be the beginning of one of ``stops`` is held back until it is decided.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, stops: Sequence[str] = (), prime: bytes = b"") -> None:
        self._token_bytes = token_bytes
        self._stops = tuple(stop for stop in stops if stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(prime)
        self._held = ""
        self._parts: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._parts)

    def feed(self, token: int) -> str:
        """The text that is certain once this token is known; empty after a stop string."""
        return self._take(self._decoder.decode(self._token_bytes(token)))

    def finish(self) -> str:
        """What was held back; a character left incomplete becomes U+FFFD."""
        rest = self._take(self._decoder.decode(b"", final=True))
        if not self.stopped:
            rest += self._give(self._held)
        self._held = ""
        return rest

    def _take(self, text: str) -> str:
        if self.stopped:
            return ""
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return self._give(held[: min(found)])
        n_open = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - n_open :]
        return self._give(held[: len(held) - n_open])

    def _give(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are a beginning of ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - n :]):
            return n
    return 0


def join(pieces: Iterable[bytes]) -> str:
    """The text of a run of tokens; incomplete characters become U+FFFD."""
    return b"".join(pieces).decode("utf-8", "replace")


def open_character(pieces: Sequence[bytes]) -> bytes:
    """The bytes of a character that the last of these tokens leave incomplete; empty if none."""
    tail = b"".join(pieces[-4:])
    for n in range(1, min(4, len(tail)) + 1):
        byte = tail[-n]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return tail[-n:] if length > n else b""
    return b""
