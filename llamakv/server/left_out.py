"""Who sends a conversation's name with fewer messages than it has, or others, goes on from an earlier place: what is
left out then stays, under a name beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llamakv.engine.prefix import n_common
from llamakv.errors import ExistsError, FormatError, NotFoundError
from llamakv.ops.copying import Within, copy_session
from llamakv.ops.keeping import places_beside
from llamakv.records import Message, SessionRecord
from llamakv.server.conversations import Conversation, Conversations
from llamakv.server.folders import path_of


def leaves_out(one: Conversation, before: Conversation | SessionRecord) -> bool:
    """Whether ``one`` lacks something that was said to what its name stood for ``before``. An answer that is given
    anew, to the same messages, takes the place of the other; a system prompt that is changed leaves nothing out."""
    if isinstance(before, SessionRecord):
        messages = None if before.chat is None else before.chat.messages
        marks: Sequence[tuple[int, int]] = ()
    else:
        messages = None if before.template is None else before.messages
        marks = before.marks
    if messages is not None and one.template is not None:
        return any(message.role == "user" for message in _beyond(messages, one.messages))
    n = n_common(before.tokens, one.tokens)
    goes_on = n >= len(before.tokens) - 1
    is_again = n >= one.n_prompt and not any(n_tokens > one.n_prompt for _, n_tokens in marks)
    return not (goes_on or is_again)


def _beyond(before: Sequence[Message], now: Sequence[Message]) -> Iterator[Message]:
    """The messages of ``before`` from the first on that ``now`` has not, but for what the system says."""
    old, new = ([one for one in messages if one.role != "system"] for messages in (before, now))
    n = 0
    while n < min(len(old), len(new)) and _words(old[n]) == _words(new[n]):
        n += 1
    yield from old[n:]


def _words(message: Message) -> tuple[str, str]:
    return message.role, message.content.strip()


def keep_in_memory(
    one: Conversation, before: Conversation, conversations: Conversations, *, is_there: Callable[[str], bool]
) -> bool:
    """Before ``one`` takes the place of another that has its cells: give that another name, if something of it is left
    out and it is not saved; returns whether it has. ``is_there`` says whether the store has a name."""
    one.leaves_out = before.leaves_out and not before.is_saved
    if not leaves_out(one, before):
        return False
    if before.is_saved or before.is_saving:
        one.leaves_out = True  # the store does not know where the replies in a text end
        return False
    for path in places_beside(Path(f"{one.name}.bin")):
        if not conversations.is_taken(one.space, path.stem) and not is_there(path.stem):
            conversations.set_aside(before, path.stem)
            return True
    return False


def keep_in_store(one: Conversation, root: Path, *, is_taken: Callable[[str], bool], within: Within) -> str | None:
    """Before ``one`` is saved in the place of a session: copy that, if something of it is left out; returns the copy's
    name. ``is_taken`` says of a name that no session in the store has whether it is somebody's.

    Raises:
        WriteError, NoRoomError, ...: nothing was changed.
    """
    path, info = path_of(root, one.name), one.place.info
    if info is None or info is one.place.beside or not path.exists():
        return None
    copied = None
    if one.leaves_out or leaves_out(one, info.record):
        with contextlib.suppress(FormatError, NotFoundError):  # it is spoilt or gone, and will not be overwritten
            copied = _copy(path, is_taken, within)
        one.place.beside = info
    return copied


def _copy(path: Path, is_taken: Callable[[str], bool], within: Within) -> str | None:
    for beside in places_beside(path):
        if not is_taken(beside.stem):
            with contextlib.suppress(ExistsError):
                copy_session(path, beside, name=beside.stem, within=within)
                return beside.stem
    return None
