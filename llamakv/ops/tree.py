"""Sessions by lineage: each below the one it branched off from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llamakv.ops.listing import ListedSession


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEntry:
    """A session in a tree, ``depth`` levels below the top; ``is_last`` of those below the same parent.

    ``parent`` is the session it branched off from, whether or not it is shown above it: None if there was none, or if
    it is gone (``is_orphan``). ``turn`` is how many of the parent's replies it begins with.
    """

    session: ListedSession
    parent: ListedSession | None
    is_orphan: bool
    depth: int
    is_last: bool
    turn: int


def tree_of(shown: Sequence[ListedSession], everything: Sequence[ListedSession]) -> Iterator[TreeEntry]:
    """Yield the sessions ``shown``, some of ``everything``, from the top down, each right after its parent or its
    siblings; otherwise in the order given. Where two sessions have the same id, the first is the parent; of sessions
    that are each other's parents, one is at the top.
    """
    by_id: dict[str, ListedSession] = {}
    for session in everything:
        if session.summary is not None:
            by_id.setdefault(session.summary.session_id, session)
    names = {session.name for session in shown}
    parents = {session.name: _parent(session, by_id) for session in shown}
    below: dict[str, list[ListedSession]] = {}
    tops = []
    for session in shown:
        parent = parents[session.name]
        if parent is not None and parent.name in names:
            below.setdefault(parent.name, []).append(session)
        else:
            tops.append(session)
    tops += _tops_of_rings(shown, tops, parents, below)
    seen: set[str] = set()
    waiting = [(session, 0, index == 0) for index, session in enumerate(reversed(tops))]
    while waiting:
        session, depth, is_last = waiting.pop()
        seen.add(session.name)
        yield _entry(session, parents[session.name], depth, is_last)
        children = [child for child in reversed(below.get(session.name, ())) if child.name not in seen]
        waiting += [(child, depth + 1, index == 0) for index, child in enumerate(children)]


def _parent(session: ListedSession, by_id: dict[str, ListedSession]) -> ListedSession | None:
    if session.summary is None or session.summary.parent_id is None:
        return None
    return by_id.get(session.summary.parent_id)


def _tops_of_rings(
    shown: Sequence[ListedSession],
    tops: Sequence[ListedSession],
    parents: Mapping[str, ListedSession | None],
    below: Mapping[str, Sequence[ListedSession]],
) -> list[ListedSession]:
    """One of each ring of sessions that no top leads to."""
    found: list[ListedSession] = []
    reached: set[str] = set()

    def reach(session: ListedSession) -> None:
        waiting = [session.name]
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting += [child.name for child in below.get(name, ())]

    for top in tops:
        reach(top)
    for session in shown:
        if session.name not in reached:
            top, passed = session, set[str]()
            while top.name not in passed:
                passed.add(top.name)
                parent = parents[top.name]
                assert parent is not None  # or a top would lead here
                top = parent
            found.append(top)
            reach(top)
    return found


def _entry(session: ListedSession, parent: ListedSession | None, depth: int, is_last: bool) -> TreeEntry:
    summary = session.summary
    position = None if summary is None else summary.parent_position
    turn = 0
    if parent is not None and parent.summary is not None and position is not None:
        turn = sum(end <= position for end in parent.summary.turn_ends)
    return TreeEntry(
        session=session,
        parent=parent,
        is_orphan=summary is not None and summary.parent_id is not None and parent is None,
        depth=depth,
        is_last=is_last,
        turn=turn,
    )
