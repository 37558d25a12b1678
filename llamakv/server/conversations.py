"""The conversations that are kept, in memory or in the store, and finding the one that a request goes on from."""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llamakv.engine.contract import Run
from llamakv.engine.prefix import n_common
from llamakv.records import Message, Sampling
from llamakv.server.contract import ChatMessage
from llamakv.server.digests import begin_of, excerpt, message_digests, text_state
from llamakv.store.session_file import SessionInfo

N_KNOWN_MAX = 4096
"""Saved conversations of a space that are known without being in memory, at about 5 KB each; the oldest are forgotten
(and still found by their tokens)."""

N_MARKS_MAX = 64
"""Earlier replies of a raw text that are remembered, so that it can be gone on with from there in another way."""


@dataclass(slots=True, eq=False, kw_only=True)
class Place:
    """Where conversations of one name are saved: the one that goes on takes the place of the one before. ``info`` is
    the session as it was last saved or read. ``is_stale``: its tokens were read again, its stored state is not theirs.
    ``beside`` is that session, once it was copied for the sake of what would be left out.
    """

    name: str
    info: SessionInfo | None = None
    is_stale: bool = False
    beside: SessionInfo | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """What was said with one user. ``run`` has its cells, None where they are in the store only; then ``tokens`` and
    what they mean may be there only, too (``is_loaded`` is False).

    ``created_s`` is the time that its chat template takes for now. ``n_settled`` of its cells are what ``place`` holds;
    ``parent`` is what it was forked from. ``said`` is, of raw text, the text as its user knows it;
    ``marks`` are where earlier replies of it end, as characters and tokens (in memory only). ``is_exact`` says that the
    tokens of the last reply are its text. ``is_named``: its user gave it its
    name. ``is_wanted``: it is to be saved; ``is_saved``: the store has all of it; ``failed_s`` is when saving it last
    failed. ``is_let_go``: its cells may be given to others. ``is_gone``: another has taken its place. ``changed_s`` is
    what its file's time was when it was read there, ``tokens_digest`` tells its tokens while they are not here.
    ``begin`` tells what it began with (``begin_of``), ``n_prompt`` how many tokens its last prompt had (0: not known).
    ``leaves_out``: the session in its place has something that it has not.
    """

    space: str
    place: Place
    created_s: float
    used_s: float
    n_tokens: int
    tokens: tuple[int, ...] = ()
    template: str | None = None
    messages: tuple[Message, ...] = ()
    said: str | None = None
    marks: tuple[tuple[int, int], ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    is_exact: bool = True
    is_loaded: bool = True
    run: Run | None = None
    parent: SessionInfo | None = None
    n_settled: int = 0
    n_turns: int = 0
    n_stored_bytes: int = 0
    first_text: str = ""
    begin: bytes = b""
    n_prompt: int = 0
    leaves_out: bool = False
    is_saved: bool = False
    is_named: bool = False
    is_wanted: bool = True
    is_pinned: bool = False
    is_saving: bool = False
    is_gone: bool = False
    is_let_go: bool = False
    failed_s: float = 0.0
    changed_s: float = 0.0
    tokens_digest: bytes = b""
    keys: list[tuple[bytes, Known]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What it is called in its space."""
        return self.place.name


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Known:
    """The first ``n_messages`` of a conversation, or ``n_said`` characters of raw text, are its first ``n_tokens``
    tokens."""

    conversation: Conversation
    n_tokens: int
    n_messages: int = 0
    n_said: int = 0


class Conversations:
    """All of them, by space and name, and by what was said. Safe between threads; ``lock`` is never held for long."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._named: dict[str, dict[str, Conversation]] = defaultdict(dict)
        self._known: dict[bytes, dict[Known, None]] = {}  # what several conversations begin with is known of each
        self._lengths: dict[str, dict[int, int]] = defaultdict(dict)  # of raw texts: how many are known to each length
        self._active: dict[tuple[str, str], int] = {}

    # ------------------------------------------------------------ by name

    def get(self, space: str, name: str) -> Conversation | None:
        """The conversation of this name."""
        with self.lock:
            return self._named[space].get(name)

    def of(self, space: str) -> list[Conversation]:
        """All of a space."""
        with self.lock:
            return list(self._named[space].values())

    def all(self) -> list[Conversation]:
        """All of all spaces."""
        with self.lock:
            return [one for named in self._named.values() for one in named.values()]

    def live(self, space: str | None = None) -> list[Conversation]:
        """Those in memory, of a space or of all."""
        return [one for one in (self.all() if space is None else self.of(space)) if one.run is not None]

    def add(self, conversation: Conversation) -> Conversation | None:
        """Know a conversation from now on; returns the one of the same name whose place it takes."""
        with self.lock:
            named = self._named[conversation.space]
            before = named.pop(conversation.name, None)
            if before is not None:
                self._forget_keys(before)
            named[conversation.name] = conversation
            self._learn_keys(conversation)
            self._forget_oldest(named)
            return before

    def remove(self, conversation: Conversation) -> None:
        """Know it no longer."""
        with self.lock:
            named = self._named[conversation.space]
            if named.get(conversation.name) is conversation:
                del named[conversation.name]
            self._forget_keys(conversation)

    def is_taken(self, space: str, name: str) -> bool:
        """Whether a conversation has this name, or is going to."""
        with self.lock:
            return name in self._named[space] or (space, name) in self._active

    def rename(self, conversation: Conversation, name: str) -> None:
        """Call it something else, since somebody else has its place."""
        with self.lock:
            named = self._named[conversation.space]
            if named.get(conversation.name) is conversation:
                del named[conversation.name]
            if self._active.pop((conversation.space, conversation.name), None):
                self._active[conversation.space, name] = 1
            conversation.place.name = name
            named[name] = conversation

    def set_aside(self, conversation: Conversation, name: str) -> None:
        """Keep it under another name: its own is to be another's."""
        with self.lock:
            self.remove(conversation)
            if conversation.place.info is not None:
                conversation.parent = conversation.place.info
            conversation.place = Place(name=name)
            self.make_keys(conversation)
            self.add(conversation)

    def _forget_oldest(self, named: dict[str, Conversation]) -> None:
        while len(named) > N_KNOWN_MAX:
            oldest = next((one for one in named.values() if one.run is None and not one.is_pinned), None)
            if oldest is None:
                return
            del named[oldest.name]
            self._forget_keys(oldest)

    # ------------------------------------------------------------ those under way

    def begin(self, space: str, name: str) -> bool:
        """A conversation of this name is being written; False if one is already."""
        with self.lock:
            if (space, name) in self._active:
                return False
            self._active[space, name] = 1
            return True

    def end(self, space: str, name: str) -> None:
        """It is not any more."""
        with self.lock:
            self._active.pop((space, name), None)

    def is_active(self, space: str, name: str) -> bool:
        """Whether it is being written."""
        with self.lock:
            return (space, name) in self._active

    def actives(self, space: str) -> list[str]:
        """Names of those that are being written."""
        with self.lock:
            return [name for where, name in self._active if where == space]

    def rest(self, one: Conversation) -> None:
        """Leave to the store what it has of a conversation that is neither in memory nor being gone on with; forget it
        if the store has not all of it."""
        with self.lock:
            is_current = self._named[one.space].get(one.name) is one  # else its place is another's
            if one.run is not None or not is_current or self.is_active(one.space, one.name):
                return
            if not one.is_saved:
                self.remove(one)
            elif one.is_loaded:
                unload(one)

    # ------------------------------------------------------------ by what was said

    def find_chat(self, space: str, messages: Sequence[ChatMessage]) -> Iterator[Known]:
        """Conversations that these messages begin with, the longest beginning first; of all messages only as far as
        they were a prompt."""
        digests = list(message_digests(space, messages))
        for n in range(len(messages), 0, -1):
            with self.lock:
                found = list(self._known.get(digests[n - 1], ()))
            if n < len(messages) or messages[-1].role != "assistant":
                yield from reversed(found)

    def find_text(self, space: str, text: str) -> Iterator[Known]:
        """Raw texts that this one begins with, the longest first."""
        with self.lock:
            lengths = sorted(n for n in self._lengths[space] if n <= len(text))
        found: list[Known] = []
        state, begin = text_state(space), 0
        for n in lengths:
            state.update(text[begin:n].encode("utf-8", "surrogatepass"))
            begin = n
            with self.lock:
                found += self._known.get(state.digest(), ())
        yield from reversed(found)

    def find_tokens(self, space: str, tokens: Sequence[int]) -> Conversation | None:
        """The raw text in memory that these tokens go on from."""
        fitting = [
            one
            for one in self.live(space)
            if one.template is None and one.n_tokens < len(tokens) and n_common(one.tokens, tokens) == one.n_tokens
        ]
        return max(fitting, key=lambda one: one.n_tokens, default=None)

    def find_same(self, conversation: Conversation) -> Conversation | None:
        """One that is in memory and is the same to its last token."""
        with self.lock:
            for key, _ in conversation.keys[-1:]:
                for other in reversed(self._known.get(key, {})):
                    same = other.conversation
                    if same is not conversation and same.run is not None and same.tokens == conversation.tokens:
                        return same
        return None

    def n_live(self, space: str, tokens: Sequence[int]) -> int:
        """How many cells of these tokens conversations in memory have, at most."""
        return max((n_common(one.tokens[:-1], tokens) for one in self.live(space)), default=0)

    def make_keys(self, conversation: Conversation) -> None:
        """Work out what it is to be found by: each place where a reply of ours, or what one was to follow, ends."""
        space = conversation.space
        if conversation.template is None:
            conversation.keys = _keys_of_text(conversation)
            return
        keys = []
        messages = conversation.messages
        for n, digest in enumerate(message_digests(space, messages), 1):
            message = messages[n - 1]
            is_last = n == len(messages)
            has_place = message.p1 > message.p0 and not message.is_open
            ends_turn = message.role == "assistant" or is_last or messages[n].role == "assistant"
            if has_place and ends_turn and (not is_last or conversation.is_exact):
                keys.append((digest, Known(conversation=conversation, n_tokens=message.p1, n_messages=n)))
        conversation.keys = keys

    def _learn_keys(self, conversation: Conversation) -> None:
        lengths = self._lengths[conversation.space]
        for key, known in conversation.keys:
            self._known.setdefault(key, {})[known] = None
            if conversation.template is None:
                lengths[known.n_said] = lengths.get(known.n_said, 0) + 1

    def _forget_keys(self, conversation: Conversation) -> None:
        lengths = self._lengths[conversation.space]
        for key, known in conversation.keys:
            found = self._known.get(key, {})
            if known not in found:  # it was never learnt
                continue
            del found[known]
            if not found:
                del self._known[key]
            if conversation.template is None:
                lengths[known.n_said] -= 1
                if not lengths[known.n_said]:
                    del lengths[known.n_said]
        conversation.keys = []


def _keys_of_text(conversation: Conversation) -> list[tuple[bytes, Known]]:
    """What raw text is found by: each place where a reply ends."""
    said = conversation.said
    if said is None:
        return []
    ends = list(conversation.marks[-N_MARKS_MAX:])
    if conversation.is_exact:
        ends.append((len(said), conversation.n_tokens))
    keys = []
    state, begin = text_state(conversation.space), 0
    for n_said, n_tokens in ends:
        state.update(said[begin:n_said].encode("utf-8", "surrogatepass"))
        begin = n_said
        keys.append((state.digest(), Known(conversation=conversation, n_tokens=n_tokens, n_said=n_said)))
    return keys


# ---------------------------------------------------------------- from the store


def stub_of(info: SessionInfo, space: str, *, name: str, changed_s: float) -> Conversation:
    """A session in the store as a conversation; what it takes most memory for is left there."""
    record = info.record
    chat = record.chat
    messages = chat.messages if chat is not None else ()
    return Conversation(
        space=space,
        place=Place(name=name),
        created_s=record.lineage.created_s,
        used_s=changed_s,
        n_tokens=len(record.tokens),
        template=None if chat is None else chat.template,
        messages=messages,
        said=record.text,
        sampling=record.sampling,
        is_loaded=False,
        n_turns=sum(message.role == "assistant" for message in messages),
        n_stored_bytes=info.n_stored_bytes,
        first_text=excerpt(messages, record.text),
        begin=begin_of(messages, record.text),
        is_saved=True,
        changed_s=changed_s,
        tokens_digest=_digest_of(record.tokens),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a conversation is at one moment; see ``Conversation``."""

    tokens: tuple[int, ...]
    template: str | None
    messages: tuple[Message, ...]
    said: str | None
    marks: tuple[tuple[int, int], ...]
    created_s: float


def words_of(one: Conversation) -> Words:
    """What a conversation is now; ``Conversations.lock`` is to be held."""
    return Words(
        tokens=one.tokens,
        template=one.template,
        messages=one.messages,
        said=one.said,
        marks=one.marks,
        created_s=one.created_s,
    )


def unload(one: Conversation) -> None:
    """Leave to the store what it has of a conversation that is not in memory any more."""
    one.tokens_digest = _digest_of(one.tokens)
    one.is_loaded, one.tokens, one.messages, one.said, one.marks = False, (), (), None, ()
    one.place.info, one.parent, one.n_settled = None, None, 0


def is_still(one: Conversation, info: SessionInfo) -> bool:
    """Whether a session is what a conversation was when it was last here; somebody else may have taken its name."""
    if one.is_loaded:
        return one.tokens == info.record.tokens
    return one.tokens_digest == _digest_of(info.record.tokens)


def _digest_of(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16).digest()


def load(one: Conversation, info: SessionInfo) -> None:
    """Take back what the store has of a conversation."""
    record = info.record
    one.place.info, one.tokens, one.n_tokens = info, record.tokens, len(record.tokens)
    one.messages = record.chat.messages if record.chat is not None else ()
    one.template = record.chat.template if record.chat is not None else None
    one.said = record.text
    one.created_s, one.sampling, one.is_loaded = record.lineage.created_s, record.sampling, True
    one.used_s = time.time()
