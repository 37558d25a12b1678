"""What is drawn, whether into a file or a terminal: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log2"]
Unit = Literal["bytes", "s", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line: as many ``ys`` as ``xs``, from left to right."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over a number of tokens. ``y_label`` says what there is ``y_unit`` of (``memory``); ticks name the unit, as
    in ``4 MB``. Values that a logarithmic scale cannot show (0 and less) are left out."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    y_unit: Unit = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Bars from zero: a group for each of the ``labels``, in it a bar of each series, None where there is none."""

    title: str
    value_label: str
    labels: Sequence[str]
    series: Sequence[tuple[str, Sequence[float | None]]]
    unit: Unit = ""


Panel = Chart | Bars


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRow:
    """A section: positions ``[p0, p1)`` (``p0 == p1`` for a state as it was after ``p1`` tokens), its kind, what it
    takes as the engine gave it and as it is stored, and whether another session shares it."""

    p0: int
    p1: int
    kind: str
    raw_bytes: int
    stored_bytes: int
    is_shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionMap:
    """A session's sections, in any order."""

    title: str
    sections: Sequence[MapRow]

    @property
    def n_positions(self) -> int:
        """Up to where they go."""
        return max((row.p1 for row in self.sections), default=0)

    def by_kind(self) -> dict[str, list[MapRow]]:
        """The sections of each kind, along positions."""
        kinds: dict[str, list[MapRow]] = {}
        for row in sorted(self.sections, key=lambda row: (row.p1, row.p0)):
            kinds.setdefault(row.kind, []).append(row)
        return kinds
