"""What options take: parsers that say in one line what is wrong with a value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import typer

from llamakv.cli import config
from llamakv.errors import UsageError

Value = TypeVar("Value")


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers in ``[low, high]``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a whole number") from None
        _check_range(value, low, high)
        return value

    return parse


def real(low: float = -math.inf, high: float = math.inf) -> Callable[[str], float]:
    """A parser of finite numbers in ``[low, high]``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a number") from None
        if not math.isfinite(value):
            raise typer.BadParameter(f"{text!r} is not a finite number")
        _check_range(value, low, high)
        return value

    return parse


def _check_range(value: float, low: float, high: float | None) -> None:
    if value < low:
        raise typer.BadParameter(f"{value} is less than {low}")
    if high is not None and value > high:
        raise typer.BadParameter(f"{value} is more than {high}")


def n_tokens(text: str) -> int:
    """A number of tokens, or -1 for no limit."""
    value = whole(-1, 2**31 - 1)(text)
    if value == 0:
        raise typer.BadParameter("it must be at least 1, or -1 for no limit")
    return value


_BYTES = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def size_limit(text: str) -> float:
    """A number of bytes (``100MB``, ``20GiB``, ``1.5G``; powers of a thousand unless it says ``i``), or ``none``, which
    is infinity."""
    if text == "none":
        return math.inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B?", text, re.ASCII)
    if found is None or (found[3] and not found[2]):
        raise typer.BadParameter(f"{text!r} is not a size (such as 100MB, 20GiB or 1.5G) or none")
    unit = _BYTES[found[2].upper()]
    if found[3]:
        unit = 1 << (10 * round(math.log(unit, 1000)))
    n_bytes = int(Fraction(found[1]) * unit)
    if not 0 < n_bytes < 1 << 62:
        raise typer.BadParameter("it must be at least one byte, and less than 4 EiB")
    return n_bytes


def time_span(text: str) -> float:
    """A number of seconds: ``90``, ``30m``, ``12h``, ``7d``, ``2w``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text, re.ASCII)
    if found is None or found[2] not in _SECONDS:
        raise typer.BadParameter(f"{text!r} is not a time (such as 30m, 12h, 7d, 2w, or seconds)")
    elapsed_s = float(found[1]) * _SECONDS[found[2]]
    if not 0 < elapsed_s < 1e10:
        raise typer.BadParameter("it must be more than 0, and less than 300 years")
    return elapsed_s


def time_limit(text: str) -> float:
    """As ``time_span``, or ``none``, which is infinity."""
    return math.inf if text == "none" else time_span(text)


def of_variable(name: str, parse: Callable[[str], Value]) -> Value | None:
    """What an environment variable says; None if it is not set.

    Raises:
        UsageError: it cannot be parsed.
    """
    text = config.variable(name)
    try:
        return None if text is None else parse(text)
    except typer.BadParameter as error:
        raise UsageError(f"{name}: {error}", name=name) from error


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser that takes only these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def offers(*choices: str) -> Callable[[str], list[str]]:
    """What the shell offers for an option with choices."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def bias(text: str) -> str:
    """Check ``TOKEN_ID=BIAS``."""
    token, equals, amount = text.partition("=")
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if not equals or not token.isdecimal() or math.isnan(value) or value == math.inf:
        raise typer.BadParameter(f"{text!r} is not TOKEN_ID=BIAS (such as 13=-inf or 42=1.5)")
    return text


def lora(text: str) -> str:
    """Check ``PATH`` or ``PATH=SCALE``."""
    split_lora(text)
    return text


def split_lora(text: str) -> tuple[Path, float]:
    """``PATH`` or ``PATH=SCALE``; a path may itself contain ``=``."""
    path, equals, scale = text.rpartition("=")
    if not equals:
        return Path(text), 1.0
    try:
        value = float(scale)
    except ValueError:
        return Path(text), 1.0
    if not math.isfinite(value):
        raise typer.BadParameter(f"{scale!r} is not a finite scale")
    return Path(path), value


def not_empty(text: str) -> str:
    """Check that there is any text."""
    if not text:
        raise typer.BadParameter("it must not be empty")
    return text


def split_bias(text: str) -> tuple[int, float]:
    """``TOKEN_ID=BIAS`` as numbers."""
    token, _, bias = text.partition("=")
    return int(token), float(bias)
