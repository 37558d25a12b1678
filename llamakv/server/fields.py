"""The fields of a request's JSON, taken one by one: of the right type, within their range, or refused by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from llamakv.server.errors_http import HttpError


def refuse(param: str, message: str, *, code: str = "invalid_value") -> HttpError:
    """A 400 that names the field."""
    return HttpError(400, message, param=param, code=code)


class Fields:
    """The fields not taken yet; null is the same as not there. ``close`` refuses what is left."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._known: set[str] = set()

    def take(self, name: str) -> object:
        """The field as it is, None if it is not there."""
        self._known.add(name)
        return self._values.pop(name, None)

    def flag(self, name: str) -> bool:
        """True or false; false if it is not there."""
        value = self.take(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise _wrong_type(name, "true or false", value)
        return value

    def integer(self, name: str, lowest: int, highest: int) -> int | None:
        """A whole number in ``[lowest, highest]``; 5.0 is taken for 5."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong_type(name, "a whole number", value)
        if not lowest <= value <= highest:
            raise refuse(name, f"'{name}' must be {lowest} to {highest}, not {_shown(value)}")
        return value

    def number(self, name: str, lowest: float, highest: float, *, is_open: bool = False) -> float | None:
        """A finite number in ``[lowest, highest]``, with ``is_open`` in ``(lowest, highest]``."""
        value = self.take(name)
        if value is None:
            return None
        number = as_number(value)
        if number is None:
            raise _wrong_type(name, "a number", value)
        if not lowest <= number <= highest or (is_open and number == lowest):
            above = "more than " if is_open else ""
            raise refuse(name, f"'{name}' must be {above}{lowest:g} to {highest:g}, not {_shown(value)}")
        return number

    def text(self, name: str, n_max: int) -> str | None:
        """Text of at most ``n_max`` characters."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise _wrong_type(name, "a string", value)
        if len(value) > n_max:
            raise refuse(name, f"'{name}' must be {n_max} characters at most, not {len(value)}")
        return value

    def mapping(self, name: str) -> Mapping[str, object] | None:
        """An object."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _wrong_type(name, "an object", value)
        return value

    def array(self, name: str) -> list[object] | None:
        """An array."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise _wrong_type(name, "an array", value)
        return value

    def _alike(self, name: str) -> str:
        alike = difflib.get_close_matches(name[:100], sorted(self._known), n=1, cutoff=0.8)
        return f"; did you mean '{alike[0]}'?" if alike else ""

    def close(self, where: str = "") -> None:
        """Refuse all that was not taken.

        Raises:
            HttpError: 400, with the first one's name.
        """
        for name in self._values:
            raise refuse(
                f"{where}{name}",
                f"'{where}{name[:100]}' is not supported by this server{self._alike(name)}",
                code="unsupported_parameter",
            )


def as_number(value: object) -> float | None:
    """A JSON number as a finite float; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _wrong_type(name: str, wanted: str, value: object) -> HttpError:
    return refuse(name, f"'{name}' must be {wanted}, not {_shown(value)}", code="invalid_type")


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, bool):
        return str(value).lower()
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
