"""What options take: parsers that say in one line what is wrong with a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import typer


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
