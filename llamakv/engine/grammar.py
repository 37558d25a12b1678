"""GBNF grammars, looked at before the engine gets them: its parser may never end on some, and prints what it dislikes.

The engine follows all ways at once that a text may have come about (stacks). Before the first token there are as many
as there are ways to the first character; ``check_grammar`` counts them, and what repetitions unroll to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from llamakv.errors import UsageError

_N_NESTED_MAX = 200  # of open brackets; 30,000 overflowed the engine's stack
_N_WAYS_MAX = 10_000
_N_UNROLLED_MAX = 200_000
_N_TIMES_MAX = 2000  # of one repetition (llama-grammar.cpp)
_MANY = 10**9

_PART = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<terminal>"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|<[^<>\s]*>|\.)|(?P<is>::=)"""
    r"""|(?P<name>[A-Za-z0-9_-]+)|(?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\}|[*+?])|(?P<mark>[()|])""",
    re.DOTALL,
)


@dataclass(slots=True)
class _Item:
    """A rule's name, a group, or a terminal (None), and how often it comes (``most`` None: any number of times)."""

    what: str | list[list[_Item]] | None
    least: int = 1
    most: int | None = 1


_Ways = list[list[_Item]]


@dataclass(slots=True)
class _Parts:
    """What a grammar's text consists of, and where its reading is."""

    found: list[tuple[str, str]]
    at: int = 0
    depth: int = field(default=0)

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        return self.found[self.at + ahead] if self.at + ahead < len(self.found) else ("end", "")


def check_grammar(text: str) -> None:
    """Refuse a grammar that the engine cannot read, or would take without end for.

    Raises:
        UsageError: it is no GBNF with a rule named ``root``, or has too many ways to begin, repetitions or brackets.
    """
    if "\0" in text:
        raise UsageError("the grammar has a zero byte in it")
    rules = _read(_Parts(_split(text)))
    if "root" not in rules:
        raise UsageError("the grammar cannot be read: it must be GBNF with a rule named root")
    for name, ways in rules.items():
        for used in _names(ways):
            if used not in rules:
                raise UsageError(f"the grammar cannot be read: rule {name!r} uses {used!r}, which is not there")
    if sum(_n_unrolled(ways) for ways in rules.values()) > _N_UNROLLED_MAX:
        raise UsageError(f"the grammar's repetitions come to more than {_N_UNROLLED_MAX:,} parts")
    counts: dict[str, tuple[int, int] | None] = {}
    for name in rules:
        n_ways, _ = _count_rule(name, rules, counts, 0)
        if n_ways > _N_WAYS_MAX:
            raise UsageError(f"the grammar's rule {name!r} can begin in more than {_N_WAYS_MAX:,} ways")


# ---------------------------------------------------------------- reading


def _split(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(text):
        match = _PART.match(text, at)
        if match is None:
            line = text.count("\n", 0, at) + 1
            raise UsageError(f"the grammar cannot be read at line {line}: it must be GBNF with a rule named root")
        if match.lastgroup is not None and match.lastgroup != "space":
            found.append((match.lastgroup, match[0]))
        at = match.end()
    return found


def _read(parts: _Parts) -> dict[str, _Ways]:
    rules: dict[str, _Ways] = {}
    while parts.peek()[0] != "end":
        (kind, name), following = parts.peek(), parts.peek(1)
        if kind != "name" or following[0] != "is":
            raise UsageError(f"the grammar cannot be read: a rule (name ::= …) should begin at {name[:40]!r}")
        parts.at += 2
        rules[name] = _read_ways(parts)
    return rules


def _read_ways(parts: _Parts) -> _Ways:
    ways: _Ways = [[]]
    while True:
        kind, text = parts.peek()
        if kind == "name" and parts.peek(1)[0] == "is":
            return ways
        if kind == "end" or text == ")":
            return ways
        parts.at += 1
        if text == "|" and kind == "mark":
            ways.append([])
        elif kind == "times":
            if not ways[-1]:
                raise UsageError(f"the grammar cannot be read: {text} stands behind nothing")
            ways[-1].append(_repeated(ways[-1].pop(), text))
        elif kind == "mark":
            ways[-1].append(_Item(_read_group(parts)))
        else:
            ways[-1].append(_Item(text if kind == "name" else None))


def _read_group(parts: _Parts) -> _Ways:
    parts.depth += 1
    if parts.depth > _N_NESTED_MAX:
        raise UsageError(f"the grammar is nested too deeply: more than {_N_NESTED_MAX} brackets are open at once")
    ways = _read_ways(parts)
    if parts.peek()[1] != ")":
        raise UsageError("the grammar cannot be read: a bracket is not closed")
    parts.at += 1
    parts.depth -= 1
    return ways


def _repeated(item: _Item, text: str) -> _Item:
    if text in "*+?":
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
    else:
        first, comma, last = text.strip("{} \n\t").partition(",")
        least = int(first[:9])
        most = least if not comma else int(last.strip()[:9]) if last.strip() else None
    if max(least, most or 0) > _N_TIMES_MAX or (most is not None and most < least):
        raise UsageError(f"the grammar's repetition {text} cannot be: up to {_N_TIMES_MAX:,} times, the smaller first")
    if item.least != 1 or item.most != 1:
        item = _Item([[item]])
    item.least, item.most = least, most
    return item


# ---------------------------------------------------------------- counting


def _names(ways: _Ways) -> Sequence[str]:
    found: list[str] = []
    for way in ways:
        for item in way:
            if isinstance(item.what, str):
                found.append(item.what)
            elif item.what is not None:
                found.extend(_names(item.what))
    return found


def _n_unrolled(ways: _Ways) -> int:
    """How many parts the engine makes of it."""
    n = 1
    for way in ways:
        for item in way:
            size = _n_unrolled(item.what) if isinstance(item.what, list) else 1
            n += size * max(item.least, item.most or 0, 1)
    return min(n, _MANY)


def _count_rule(
    name: str, rules: dict[str, _Ways], counts: dict[str, tuple[int, int] | None], depth: int
) -> tuple[int, int]:
    """In how many ways a rule comes to its first character, and to its end without any."""
    if depth > _N_NESTED_MAX:
        raise UsageError(f"the grammar is nested too deeply: more than {_N_NESTED_MAX} rules begin with one another")
    if name in counts:
        return counts[name] or (0, 0)  # a rule within itself adds nothing to its own beginning
    counts[name] = None
    result = _count(rules[name], rules, counts, depth)
    counts[name] = result
    return result


def _count(
    ways: _Ways, rules: dict[str, _Ways], counts: dict[str, tuple[int, int] | None], depth: int
) -> tuple[int, int]:
    n_starts = n_empty = 0
    for way in ways:
        starts, empty = 0, 1
        for item in way:
            if item.what is None:
                one = (1, 0)
            elif isinstance(item.what, str):
                one = _count_rule(item.what, rules, counts, depth + 1)
            else:
                one = _count(item.what, rules, counts, depth + 1)
            n_times = max(item.least, item.most or item.least + 1, 1) if one[1] else 1
            starts = min(starts + empty * one[0] * n_times, _MANY)
            empty = min(empty * (one[1] * n_times + (item.least == 0)), _MANY)
            if not empty:
                break
        n_starts, n_empty = min(n_starts + starts, _MANY), min(n_empty + empty, _MANY)
    return n_starts, n_empty
