"""What a conversation is found and told by: digests of what was said, one space apart from the other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from llamakv.records import Message
from llamakv.server.contract import ChatMessage

Spoken = ChatMessage | Message

_N_EXCERPT = 80


def message_digests(space: str, messages: Sequence[Spoken]) -> Iterator[bytes]:
    """A digest of the first, the first two, ... messages. White space around a reply does not count: clients trim."""
    state = hashlib.blake2b(digest_size=20, person=b"llamakv chat")
    state.update(len(space).to_bytes(4, "little") + space.encode())
    for message in messages:
        content = message.content.strip() if message.role == "assistant" else message.content
        for part in (message.role, content):
            data = part.encode("utf-8", "surrogatepass")
            state.update(len(data).to_bytes(8, "little") + data)
        yield state.copy().digest()


def text_state(space: str) -> hashlib.blake2b:
    """What the characters of a text are to be added to, as UTF-8 where that can be."""
    state = hashlib.blake2b(digest_size=20, person=b"llamakv text")
    state.update(len(space).to_bytes(4, "little") + space.encode())
    return state


def excerpt(messages: Sequence[Spoken], text: str | None) -> str:
    """What a conversation began with, on a line."""
    words = text or next((message.content for message in messages if message.role == "user"), "")
    return " ".join(words[: 4 * _N_EXCERPT].split())[:_N_EXCERPT]


def begin_of(messages: Sequence[Spoken], text: str | None) -> bytes:
    """A digest of what a conversation began with: all of a chat's first message of a user. Of raw text, of which nobody
    knows later where the first prompt ended, it is what ``excerpt`` tells."""
    words = next((message.content for message in messages if message.role == "user"), None)
    told = excerpt(messages, text) if words is None or text else words.strip()
    return hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=16).digest()
