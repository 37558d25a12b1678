"""Texts with names in braces, filled with values: no attributes, indexes, conversions or formats."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping

from llamakv.errors import UsageError


class TextTemplate:
    """``Summarise: {body}``; ``{{`` and ``}}`` are braces. ``names`` are those it needs.

    Raises:
        UsageError: it cannot be read, or names nothing.
    """

    def __init__(self, text: str) -> None:
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise UsageError(f"the template cannot be read: {error}", hint="write {{ and }} for braces") from error
        self._parts: list[tuple[str, str | None]] = []
        for literal, name, spec, conversion in parsed:
            if name == "" or spec or conversion:
                shown = (
                    "{" + (name or "") + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
                )
                raise UsageError(
                    f"the template's {shown} is not a name in braces",
                    hint="write {column}, and {{ and }} for braces",
                )
            self._parts.append((literal, name))
        self.names = frozenset(name for _, name in self._parts if name is not None)
        if not self.names:
            raise UsageError("the template names nothing", hint="put a name in braces, such as {prompt}")

    def fill(self, values: Mapping[str, str], where: str, there: Iterable[str] | None = None) -> str:
        """The text with values in the places of their names. ``there`` are the names an error tells of (None: those of
        the values).

        Raises:
            UsageError: one is missing; begins with ``where``.
        """
        for name in sorted(self.names):
            if name not in values:
                found = ", ".join(sorted(values if there is None else there)) or "nothing"
                raise UsageError(f"{where}: the template's {{{name}}} is not there; there is {found}")
        return "".join(literal + ("" if name is None else values[name]) for literal, name in self._parts)
