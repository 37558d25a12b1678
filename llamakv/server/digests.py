"""What a conversation is found by: digests of what was said, one space apart from the other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from llamakv.records import Message
from llamakv.server.contract import ChatMessage

Spoken = ChatMessage | Message


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
