"""``log`` and ``diff``: what was said in a session, and where two of them part. Neither needs the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, describe
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import StoreGroup, complete_session
from llamakv.cli.output import Json, Output, to_json

if TYPE_CHECKING:
    from llamakv.ops.comparing import Comparison, Difference, Side
    from llamakv.ops.history import LogEntry, Parent, SessionLog
    from llamakv.records import Message

_N_COLUMNS = 78
_N_VALUE = 24

PlacedRef = Annotated[
    str,
    typer.Argument(metavar="REF", autocompletion=complete_session, show_default=False,
                   help="Session: a name in the store, or a path; REF@turn2 and REF@1200 are places in it."),
]  # fmt: skip
Other = Annotated[
    str,
    typer.Argument(metavar="OTHER", autocompletion=complete_session, show_default=False,
                   help="The session to compare it with, as REF."),
]  # fmt: skip


# ---------------------------------------------------------------- log


@takes_options
def log(output: Output, ref: PlacedRef, store: StoreGroup) -> None:
    """Tell a session turn by turn: what was asked and answered, when, and what each turn takes.

    Example: llamakv log plan
    """
    from llamakv.cli import refs
    from llamakv.ops.history import log_session

    root = config.store_dir(store.store)
    found, at = refs.existing_at(root, ref)
    told = log_session(found.path, root, at=at)
    if output.json:
        output.document({"session": refs.shown(found), "path": str(found.path), "at": at, **_log_json(told)})
        return
    from llamakv.cli import render

    output.write_styled(render.report(_facts(refs.shown(found, at), told)))
    if told.info.record.chat is None:
        _write_sections(output, told)
    for entry in told.entries if told.info.record.chat is not None else ():
        output.write_styled("\n" + render.heading(" · ".join(_entry_facts(entry))))
        lines = [f"{_speaker(message)}: {message.content}" for message in entry.messages]
        output.write("".join(f"  {render.fitted(line, _N_COLUMNS)}\n" for line in lines))


def _log_json(told: SessionLog) -> dict[str, Json]:
    from llamakv.ops.lineage import split_note

    lineage = told.info.record.lineage
    mark, note = split_note(lineage.note)
    return {
        **describe.summary_json(told.info),
        "name": lineage.name,
        "parent": to_json(told.parent),
        "tags": list(lineage.tags),
        "note": note,
        "incomplete": mark or None,
        "pinned": lineage.pinned,
        "entries": [_entry_json(entry) for entry in told.entries],
    }


def _entry_json(entry: LogEntry) -> Json:
    return {
        "kind": entry.kind.value,
        "turn": entry.turn,
        "p0": entry.p0,
        "p1": entry.p1,
        "tokens": entry.p1 - entry.p0,
        "stored_bytes": entry.n_bytes,
        "time_s": entry.time_s,
        "messages": to_json(entry.messages),
        "section": None if entry.section is None else describe.section_json(entry.section),
    }


def _facts(shown: str, told: SessionLog) -> list[tuple[str, str]]:
    from llamakv.cli import render
    from llamakv.ops.inspect import report_of
    from llamakv.ops.lineage import split_note

    record, report = told.info.record, report_of(told.info)
    lineage = record.lineage
    mark, note = split_note(lineage.note)
    kind = "raw text" if record.chat is None else render.count(report.turns, "turn")
    tokens = render.count(report.tokens, "token")
    rows = [
        ("session", shown),
        ("id", lineage.session_id),
        *([("parent", _parent_text(told.parent))] if told.parent is not None else []),
        *([("tags", ", ".join(lineage.tags))] if lineage.tags else []),
        *([("note", note)] if note else []),
        *([("state", mark)] if mark else []),
        *([("pinned", "yes")] if lineage.pinned else []),
        ("size", f"{kind} · {tokens} · {render.size(report.stored_bytes)} stored"),
        ("saved", f"{render.moment(lineage.updated_s)} · {render.count(lineage.n_saves, 'save')}"),
    ]
    if record.chat is None:
        rows.append(("first text", render.fitted(report.first_text, _N_COLUMNS - 12)))
        rows.append(("last text", _last_columns(report.last_text)))
    return rows


def _parent_text(parent: Parent) -> str:
    if parent.name is None:
        where = "" if parent.position is None else f" at position {parent.position:,}"
        return f"{parent.session_id}{where} (not in this store)"
    if parent.place is not None:
        return f"{parent.name}@{parent.place} ({parent.position:,} tokens)"
    return parent.name if parent.position is None else f"{parent.name} at position {parent.position:,}"


def _entry_facts(entry: LogEntry) -> list[str]:
    from llamakv.cli import render
    from llamakv.ops.history import EntryKind

    title = {EntryKind.SYSTEM: "system", EntryKind.OPEN: "not answered yet"}.get(entry.kind, f"turn{entry.turn}")
    parts = [title]
    if entry.time_s is not None:
        parts.append(render.moment(entry.time_s))
    if entry.p0 == entry.p1:
        parts.append("read with what follows")
    else:
        parts.append(render.count(entry.p1 - entry.p0, "token"))
        parts.append(render.size(entry.n_bytes))
    return parts


def _speaker(message: Message) -> str:
    if message.finish in ("interrupted", "length", "timeout"):
        return f"{message.role} ({message.finish})"
    return f"{message.role} (goes on)" if message.is_open else message.role


def _write_sections(output: Output, told: SessionLog) -> None:
    from llamakv.cli import render

    sections = [(entry, entry.section) for entry in told.entries if entry.section is not None]
    if not sections:
        return
    rows = []
    for entry, section in sections:
        positions = f"[{entry.p0}, {entry.p1})" if entry.p0 < entry.p1 else f"at {entry.p1}"
        tokens = f"{entry.p1 - entry.p0:,}"
        rows.append((section.kind.value, positions, tokens, render.size(entry.n_bytes), section.digest[:12]))
    headings = ("SECTION", "POSITIONS", "TOKENS", "STORED", "DIGEST")
    output.write_styled("\n" + render.table(headings, rows, right=(2, 3)))


# ---------------------------------------------------------------- diff


@takes_options
def diff(output: Output, ref: PlacedRef, other: Other, store: StoreGroup) -> None:
    """Show where two sessions part, and what each stores for itself; the exit status is 0 either way.

    Example: llamakv diff plan plan-rain
    """
    from llamakv.cli import refs
    from llamakv.ops.comparing import compare_sessions

    root = config.store_dir(store.store)
    (a, at_a), (b, at_b) = refs.existing_at(root, ref), refs.existing_at(root, other)
    found = compare_sessions(a.path, b.path, at_a=at_a, at_b=at_b)
    if output.json:
        output.document(
            {
                "a": {"session": refs.shown(a), "path": str(a.path), "at": at_a, **_side_json(found.a)},
                "b": {"session": refs.shown(b), "path": str(b.path), "at": at_b, **_side_json(found.b)},
                **_diff_json(found),
            }
        )
        return
    from llamakv.cli import render

    output.write_styled(render.report(_diff_rows(refs.shown(a, at_a), refs.shown(b, at_b), found)))


def _diff_json(found: Comparison) -> dict[str, Json]:
    return {
        "relation": found.relation.value,
        "common_tokens": found.n_common,
        "same_model": found.agrees_on("identity", "kind"),
        "same_settings": found.agrees_on("settings"),
        "differences": to_json(found.differences),
        "shared_sections": [section.digest for section in found.shared_sections],
        "shared_bytes": found.n_shared_bytes,
        "stored_once": found.stored_once,
    }


def _side_json(side: Side) -> dict[str, Json]:
    record = side.info.record
    return {
        "id": record.lineage.session_id,
        "tokens": len(record.tokens),
        "own_tokens": side.n_own_tokens,
        "turn": side.turn,
        "role": side.role,
        "text_before": side.text_before,
        "text_after": side.text_after,
        "own_sections": [section.digest for section in side.own_sections],
        "own_bytes": side.n_own_bytes,
    }


def _diff_rows(a: str, b: str, found: Comparison) -> list[tuple[str, str]]:
    from llamakv.cli import render
    from llamakv.ops.comparing import Relation

    rows = [
        (label, f"{name} · {render.count(len(side.info.record.tokens), 'token')}")
        for label, name, side in (("first", a, found.a), ("second", b, found.b))
    ]
    if found.relation is Relation.SAME:
        rows.append(("in common", "all tokens"))
    else:
        common = "the first token" if found.n_common == 1 else f"the first {found.n_common:,} tokens"
        rows.append(("in common", common if found.n_common else "nothing"))
        rows.append(("they part", _parting_text(found)))
        before = found.a.text_before or found.b.text_before
        if before:
            rows.append(("  after", _last_columns(before)))
        rows.append(("  first", _next_text(found.a)))
        rows.append(("  second", _next_text(found.b)))
    rows += _difference_rows(found)
    rows.append(("only first", _own_text(found.a)))
    rows.append(("only second", _own_text(found.b)))
    shared = f"{render.count(len(found.shared_sections), 'section')}, {render.size(found.n_shared_bytes)}"
    once = ", stored once" if found.stored_once and found.shared_sections else ""
    rows.append(("in both", shared + once))
    return rows


def _parting_text(found: Comparison) -> str:
    from llamakv.ops.comparing import Relation

    if found.relation is Relation.BEGINNING:
        return "the second goes on where the first ends"
    if found.relation is Relation.CONTINUATION:
        return "the first goes on where the second ends"
    first, second = _place_text(found.a), _place_text(found.b)
    return first if first == second else f"first {first}, second {second}"


def _place_text(side: Side) -> str:
    if side.info.record.chat is None:
        return "in the text"
    if side.role is None:
        return "at its end"
    return "in the system prompt" if side.role == "system" else f"in turn {side.turn}, in the {side.role}'s words"


def _last_columns(text: str) -> str:
    from llamakv.cli import render

    line = render.excerpt(text)
    return line if len(line) <= _N_COLUMNS - 15 else "…" + line[-(_N_COLUMNS - 16) :]


def _next_text(side: Side) -> str:
    from llamakv.cli import render

    if not side.text_after:
        return "(ends here)"
    return render.fitted(side.text_after, _N_COLUMNS - 14)


def _own_text(side: Side) -> str:
    from llamakv.cli import render

    sections = f"{render.count(len(side.own_sections), 'section')}, {render.size(side.n_own_bytes)}"
    return f"{render.count(side.n_own_tokens, 'token')} · {sections}"


def _difference_rows(found: Comparison) -> list[tuple[str, str]]:
    rows = []
    for label, groups, always in (
        ("model", ("kind", "identity"), True),
        ("settings", ("settings",), True),
        ("engine", ("versions",), False),
        ("sampling", ("sampling",), False),
        ("chat", ("form", "chat"), False),
    ):
        here = [difference for difference in found.differences if difference.field.split(".")[0] in groups]
        if here:
            rows.append((label, "; ".join(_difference_text(difference) for difference in here)))
        elif always:
            rows.append((label, "the same"))
    return rows


def _difference_text(difference: Difference) -> str:
    from llamakv.cli import render

    name = difference.field.split(".")[-1]
    values = [render.excerpt(str(to_json(value)), _N_VALUE) for value in (difference.a, difference.b)]
    return f"{name} {values[0]} and {values[1]}"
