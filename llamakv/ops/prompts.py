"""Prompts of a batch: plain lines, JSON lines or a table, made out before anything is run."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from llamakv.errors import UsageError
from llamakv.ops.requests import SamplingOptions
from llamakv.ops.templates import TextTemplate

PromptFormat = Literal["auto", "text", "jsonl", "csv"]
PromptId = int | str

_T = TypeVar("_T")
_ROLES = ("user", "assistant", "system")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_CSV_SUFFIXES = (".csv", ".tsv")
_MAX_DIGITS = 10  # of a token id
_MAX_CELL_CHARACTERS = 1 << 27  # of a table's cell; the csv module's own limit is 131,072


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one branch is asked. ``text`` None goes on from where the session stopped; ``messages`` (role, content) are
    more than one turn, the last a user's, and take the place of ``text``. ``where`` says where it was read.

    ``sampling`` holds what this prompt changes; ``system`` takes the place of the session's system prompt.
    """

    id: PromptId
    text: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    system: str | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    timeout_s: float | None = None
    where: str = ""


def read_prompts(text: str, *, name: str, kind: PromptFormat = "auto", template: str | None = None) -> list[Prompt]:
    """The prompts of a text called ``name``: one for each line that is not blank, for each JSON object on a line, or
    for each row of a table (comma- or, with a name in ``.tsv``, tab-separated).

    ``template`` makes the prompt: ``{column}`` is a table's column or a JSON object's key, ``{prompt}`` the line
    itself; ``{{`` and ``}}`` are braces. Without an id of its own a prompt's is its number, from 0.

    Raises:
        UsageError: names the line and what is wrong there.
    """
    text = text.removeprefix("\ufeff")
    kind = _kind_of(text, name) if kind == "auto" else kind
    form = None if template is None else TextTemplate(template)
    if kind == "csv":
        return _number(_from_table(text, name, form))
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    if kind == "jsonl":
        return _number(_from_json(f"{name} line {number}", line, form) for number, line in lines)
    return _number(_from_line(f"{name} line {number}", line, form) for number, line in lines)


def given_prompts(texts: Sequence[str], *, template: str | None = None) -> list[Prompt]:
    """Prompts that were given one by one.

    Raises:
        UsageError: a template that cannot be used.
    """
    form = None if template is None else TextTemplate(template)
    return _number(_from_line(f"prompt {i}", text, form) for i, text in enumerate(texts))


def _kind_of(text: str, name: str) -> PromptFormat:
    if name.lower().endswith(_CSV_SUFFIXES):
        return "csv"
    if name.lower().endswith(_JSON_SUFFIXES):
        return "jsonl"
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    try:
        is_object = first.startswith("{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        is_object = False
    return "jsonl" if is_object else "text"


def _number(prompts: Iterator[tuple[PromptId | None, Prompt]]) -> list[Prompt]:
    """Give those without an id their number, and refuse an id that is there twice."""
    found: dict[str, Prompt] = {}
    for index, (given, prompt) in enumerate(prompts):
        numbered = Prompt(
            id=index if given is None else given,
            text=prompt.text,
            messages=prompt.messages,
            system=prompt.system,
            sampling=prompt.sampling,
            timeout_s=prompt.timeout_s,
            where=prompt.where,
        )
        before = found.setdefault(str(numbered.id), numbered)
        if before is not numbered:
            raise UsageError(f"{prompt.where}: id {numbered.id!r} is that of {before.where} already")
    return list(found.values())


# ---------------------------------------------------------------- lines


def _from_line(where: str, line: str, template: TextTemplate | None) -> tuple[PromptId | None, Prompt]:
    if not _is_unicode(line):
        raise UsageError(f"{where} is not UTF-8 text")
    return None, Prompt(id="", text=template.fill({"prompt": line}, where) if template else line, where=where)


# ---------------------------------------------------------------- tables


def _from_table(text: str, name: str, template: TextTemplate | None) -> Iterator[tuple[PromptId | None, Prompt]]:
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    delimiter = "\t" if name.lower().endswith(".tsv") else ","
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        columns = next(rows, None)
        if not columns:
            if text.strip():
                raise UsageError(f"{name} line 1: expected the names of columns, found an empty line")
            return
        if len(set(columns)) < len(columns):
            twice = next(column for column in columns if columns.count(column) > 1)
            raise UsageError(f"{name} line 1: column {twice!r} is there twice")
        if template is None and "prompt" not in columns:
            raise UsageError(
                f"{name} has no column 'prompt', but {', '.join(columns)}",
                hint=f"say what to ask: --template 'Summarise: {{{columns[-1]}}}'",
            )
        while True:
            where = f"{name} line {rows.line_num + 1}"  # where it begins: cells may hold line breaks
            row = next(rows, None)
            if row is None:
                return
            if not row:
                continue
            if len(row) != len(columns):
                raise UsageError(f"{where}: {len(row)} cells, there are {len(columns)} columns")
            values = dict(zip(columns, row, strict=True))
            asked = values["prompt"] if template is None else template.fill(values, where)
            yield values.get("id") or None, Prompt(id="", text=asked, where=where)
    except csv.Error as error:
        raise UsageError(f"{name} line {rows.line_num}: {error}") from error


# ---------------------------------------------------------------- JSON lines


def _from_json(where: str, line: str, template: TextTemplate | None) -> tuple[PromptId | None, Prompt]:
    try:
        found = json.loads(line, object_pairs_hook=lambda pairs: _without_doubles(pairs, where))
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{where}: not JSON: {what}", hint="JSON lines hold one object on each line") from error
    if not isinstance(found, dict):
        raise UsageError(
            f"{where}: expected an object, found {_kind(found)}", hint="JSON lines hold one object on each line"
        )
    fields = Fields(found, where)
    texts = {} if template is None else fields.texts(template.names)
    identity = fields.take("id", _identity)
    text = fields.take("prompt", _text)
    messages = fields.take("messages", _messages)
    system = fields.take("system", _text)
    timeout_s = fields.take("timeout_s", lambda value: _number_in(value, 0.0, math.inf))
    sampling = take_sampling(fields)
    if template is not None:
        if messages:
            raise UsageError(f"{where}: 'messages' and a template cannot go together")
        for name in template.names:
            fields.take(name, _any_text)  # unknown otherwise
        text = template.fill(texts, where, (name for name, value in found.items() if value is not None))
    fields.check_empty(_KNOWN)
    if text is not None and messages:
        raise UsageError(f"{where}: 'prompt' and 'messages' cannot go together")
    prompt = Prompt(
        id="",
        text=text,
        messages=messages or (),
        system=system,
        sampling=sampling,
        timeout_s=timeout_s,
        where=where,
    )
    return identity, prompt


class Fields:
    """A JSON object's members, taken one by one; what is left over is unknown."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = dict(values)
        self._where = where

    def take(self, name: str, convert: Callable[[object], _T]) -> _T | None:
        """A member, converted; None where it is absent or null.

        Raises:
            UsageError: names the place, the member and what is wrong.
        """
        value = self._values.pop(name, None)
        if value is None:
            return None
        try:
            return convert(value)
        except ValueError as error:
            raise UsageError(f"{self._where}: {name!r} {error}") from error

    def texts(self, names: Iterable[str]) -> dict[str, str]:
        """The members of these names that are there, as texts; they stay to be taken.

        Raises:
            UsageError: one is no text that could be read.
        """
        found = {}
        for name in names:
            before = self._values.get(name)
            text = self.take(name, _any_text)
            if text is not None:
                found[name], self._values[name] = text, before
        return found

    def check_empty(self, known: Sequence[str]) -> None:
        """Refuse what nobody asked for.

        Raises:
            UsageError: names the unknown member and those that exist.
        """
        if self._values:
            unknown = next(iter(self._values))
            raise UsageError(f"{self._where}: unknown key {unknown!r}", hint=f"the keys are {', '.join(known)}")


def take_sampling(fields: Fields) -> SamplingOptions:
    """The sampling parameters among the members of a JSON object."""
    return SamplingOptions(
        temperature=fields.take("temperature", lambda value: _number_in(value, 0.0, 100.0)),
        top_k=fields.take("top_k", lambda value: _whole_in(value, 0, 2**31 - 1)),
        top_p=fields.take("top_p", lambda value: _number_in(value, 0.0, 1.0)),
        min_p=fields.take("min_p", lambda value: _number_in(value, 0.0, 1.0)),
        repeat_penalty=fields.take("repeat_penalty", lambda value: _number_in(value, 0.01, 100.0)),
        frequency_penalty=fields.take("frequency_penalty", lambda value: _number_in(value, -100.0, 100.0)),
        presence_penalty=fields.take("presence_penalty", lambda value: _number_in(value, -100.0, 100.0)),
        penalty_last_n=fields.take("penalty_last_n", lambda value: _whole_in(value, 0, 2**31 - 1)),
        seed=fields.take("seed", lambda value: _whole_in(value, -1, 2**32 - 1)),
        logit_bias=fields.take("logit_bias", _biases),
        grammar=fields.take("grammar", _not_empty),
        max_tokens=fields.take("max_tokens", _n_tokens),
        stop=fields.take("stop", _stops),
    )


_KNOWN = ("id", "prompt", "messages", "system", "timeout_s", *SamplingOptions.__dataclass_fields__)


def _without_doubles(pairs: Sequence[tuple[str, object]], where: str) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise UsageError(f"{where}: {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _kind(value: object) -> str:
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")


def _identity(value: object) -> PromptId:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError(f"must be a text or a whole number, not {_kind(value) if value != '' else 'empty'}")
    return _text(value) if isinstance(value, str) else value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a text, not {_kind(value)}")
    if not _is_unicode(value):
        raise ValueError("has half a surrogate pair, which is no character")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _any_text(value: object) -> str:
    """What a template puts into a prompt: texts as they are, numbers and the rest as JSON writes them."""
    return _text(value) if isinstance(value, str) else _text(json.dumps(value, ensure_ascii=False))


def _not_empty(value: object) -> str:
    text = _text(value)
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _whole_in(value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, not {_kind(value)}")
    if not low <= value <= high:
        raise ValueError(f"must be one of {low} ... {high}, not {value}")
    return value


def _n_tokens(value: object) -> int:
    number = _whole_in(value, -1, 2**31 - 1)
    if number == 0:
        raise ValueError("must be at least 1, or -1 for no limit")
    return number


def _number_in(value: object, low: float, high: float) -> float:
    number = _float(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"must be a finite number, not {_kind(value) if number is None else number}")
    if not low <= number <= high:
        raise ValueError(f"must be between {low:g} and {high:g}, not {number:g}")
    return number


def _float(value: object) -> float | None:
    """A JSON number; infinite where it is too large; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _stops(value: object) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(_not_blank(item) for item in values)


def _not_blank(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text or a list of texts, none of them empty")
    return _text(value)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object of token ids and biases, not {_kind(value)}")
    found = []
    for token, bias in value.items():
        amount = -math.inf if bias in ("-inf", "-Infinity") else _float(bias)
        if not (token.isascii() and token.isdecimal()) or len(token) > _MAX_DIGITS or amount is None:
            raise ValueError("must be an object of token ids and biases (numbers, or '-inf')")
        if math.isnan(amount) or amount == math.inf:
            raise ValueError("cannot make a token certain: a bias is a finite number or '-inf'")
        found.append((int(token), amount))
    return tuple(found)


def _messages(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of messages, with at least one")
    found = []
    for message in value:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError("must be objects with 'role' and 'content', and nothing else")
        role, content = message["role"], message["content"]
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(f"must have a role of {', '.join(_ROLES)}, and a text as content")
        found.append((role, _text(content)))
    if found[-1][0] != "user":
        raise ValueError(f"must end with a user's message, not one of role {found[-1][0]!r}")
    if any(role == "system" for role, _ in found[1:]):
        raise ValueError("may have a system prompt at the beginning only")
    return tuple(found)
