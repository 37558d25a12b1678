"""The names that answers are kept under, taken before they are written."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from llamakv.errors import ExistsError, LockedError
from llamakv.server.contract import Ask
from llamakv.server.conversations import Conversation, Conversations, Place
from llamakv.server.digests import begin_of
from llamakv.server.loader import Loader
from llamakv.server.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The name that a choice is kept under, and what of the store it builds on."""

    place: Place
    parent: Conversation | None
    is_named: bool


class Claims:
    """Takes names, and gives them back. ``Conversations.lock`` is to be held."""

    def __init__(self, conversations: Conversations, loader: Loader) -> None:
        self._conversations = conversations
        self._loader = loader

    def take(self, ask: Ask, prompt: Prompt) -> list[Claim]:
        """A name for each choice of a request.

        Raises:
            ExistsError: the name it wants is another conversation's.
            LockedError: another request writes that.
        """
        first = self._named(ask, prompt) if ask.session is not None else self._base(ask, prompt)
        return [first, *(self._new(ask.space, prompt) for _ in range(1, ask.n_choices))]

    def give_back(self, space: str, claims: Sequence[Claim]) -> None:
        """Nothing more is written under these names."""
        for claim in claims:
            self._conversations.end(space, claim.place.name)
            there = self._conversations.get(space, claim.place.name)
            for one in (there, claim.parent):
                if one is not None:
                    self._conversations.rest(one)

    def _named(self, ask: Ask, prompt: Prompt) -> Claim:
        name = ask.session
        assert name is not None
        there = self._conversations.get(ask.space, name)
        if there is not None and prompt.base is not there and not _is_same_talk(there, prompt):
            raise ExistsError(
                f"session '{name}' is another conversation: it begins with {there.first_text!r}",
                hint="send all of its messages before the new one, choose another name, or delete it",
            )
        if there is None and self._loader.is_there(ask.space, name):
            raise ExistsError(
                f"session '{name}' is of another model or other memory settings", hint="choose another name"
            )
        if not self._conversations.begin(ask.space, name):
            raise LockedError(f"session '{name}' is being written by another request")
        place = Place(name=name) if there is None else there.place
        parent = prompt.base if prompt.base is not there else None
        return Claim(place=place, parent=parent, is_named=True)

    def _base(self, ask: Ask, prompt: Prompt) -> Claim:
        base = prompt.base
        if (
            base is not None
            and prompt.goes_on
            and self._conversations.get(ask.space, base.name) is base
            and self._conversations.begin(ask.space, base.name)
        ):
            return Claim(place=base.place, parent=None, is_named=False)
        return self._new(ask.space, prompt)

    def _new(self, space: str, prompt: Prompt) -> Claim:
        name = f"serve-{uuid.uuid4().hex[:12]}"
        self._conversations.begin(space, name)
        return Claim(place=Place(name=name), parent=prompt.base, is_named=False)


def _is_same_talk(one: Conversation, prompt: Prompt) -> bool:
    """Whether a prompt is the same conversation as one that was saved, changed perhaps: it begins as that does."""
    if (one.template is None) != (prompt.template is None):
        return False
    return one.begin == begin_of(prompt.messages, prompt.said)
