"""What a store holds and takes: by session, by model, and what it saves by sharing and compressing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llamakv.ops.pruning import what_would_go
from llamakv.ops.requests import Reporter
from llamakv.records import ModelIdentity
from llamakv.store.retention import Rules
from llamakv.store.store_folder import StoreBudget, read_budget
from llamakv.store.survey import Survey, SurveyedSession, take_survey


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUse:
    """What a session takes: ``n_unique`` bytes would be free without it, ``n_shared`` are of sections that others refer
    to as well."""

    session: SurveyedSession
    n_unique: int
    n_shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """What the sessions of one model take, what they share counted once."""

    identity: ModelIdentity
    n_sessions: int
    n_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoreReport:
    """A store as it was found. ``sessions`` begins with the one that takes most for itself; ``n_prunable`` bytes would
    be free if it was pruned by the ``limits`` that count now."""

    survey: Survey
    limits: StoreBudget
    sessions: tuple[SessionUse, ...]
    models: tuple[ModelUse, ...]
    n_prunable: int

    @cached_property
    def by_use(self) -> tuple[SurveyedSession, ...]:
        """The sessions, the one last used at the end."""
        return tuple(sorted(self.survey.sessions, key=lambda session: session.used_s))

    @property
    def n_pinned(self) -> int:
        """Sessions that are never removed by a rule."""
        return sum(session.lineage.pinned for session in self.survey.sessions)

    @property
    def n_orphan_bytes(self) -> int:
        """Bytes of objects that no session refers to."""
        return sum(self.survey.object_bytes[digest] for digest in self.survey.orphans)

    @property
    def n_stored(self) -> int:
        """Bytes of state on disk that sessions refer to."""
        return self._distinct(self.survey.object_bytes) + sum(s.n_stored_own for s in self.survey.sessions)

    @property
    def n_stored_apart(self) -> int:
        """Bytes of state there would be if sessions shared nothing."""
        return sum(session.n_object_bytes + session.n_stored_own for session in self.survey.sessions)

    @property
    def n_raw(self) -> int:
        """Bytes of that state before compression, what is shared counted once."""
        return self._distinct(self.survey.object_raw) + sum(s.n_raw_own for s in self.survey.sessions)

    def _distinct(self, lengths: dict[str, int]) -> int:
        return sum(lengths.get(digest, 0) for digest in self.survey.n_users if digest in self.survey.object_bytes)


def report_store(root: Path, reporter: Reporter, *, limits: StoreBudget) -> StoreReport:
    """Look at all sessions of a store, those that cannot be read too. ``limits`` are the ones that count now.

    Raises:
        NewerFormatError, DamagedError, ReadError: the store itself cannot be read.
    """
    read_budget(root)
    survey = take_survey(root, on_progress=lambda n_done, n: reporter.progress("survey", n_done, n))
    uses = [
        SessionUse(session=session, n_unique=survey.n_unique_bytes(session), n_shared=survey.n_shared_bytes(session))
        for session in survey.sessions
    ]
    return StoreReport(
        survey=survey,
        limits=limits,
        sessions=tuple(sorted(uses, key=lambda use: (-use.n_unique, -use.n_shared, use.session.name))),
        models=_by_model(survey, survey.sessions),
        n_prunable=what_would_go(survey, Rules(max_bytes=limits.max_bytes, ttl_s=limits.ttl_s)),
    )


def _by_model(survey: Survey, sessions: Iterable[SurveyedSession]) -> tuple[ModelUse, ...]:
    groups: dict[str, list[SurveyedSession]] = defaultdict(list)
    for session in sessions:
        groups[session.identity.digest].append(session)
    uses = [
        ModelUse(identity=group[0].identity, n_sessions=len(group), n_bytes=survey.n_bytes_of(group))
        for group in groups.values()
    ]
    return tuple(sorted(uses, key=lambda use: (-use.n_bytes, use.identity.digest)))
