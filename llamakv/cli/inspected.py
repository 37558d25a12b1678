"""What ``inspect`` tells of a session beyond its index, in words and as JSON: sharing, resuming, layers and cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llamakv.cli.output import Json

if TYPE_CHECKING:
    from llamakv.cli.plots import SectionMap
    from llamakv.ops.inspect import SectionFile, Sharing
    from llamakv.ops.resume_cost import ResumeCost, ResumeMemory
    from llamakv.ops.session_layers import Inside, LayerSize
    from llamakv.store.session_file import SessionInfo, StoredSection

BAR_COLUMNS = 8


def sharing_text(sharing: Sharing | None) -> str:
    """What a session shares, on one line; None: that was not found out."""
    from llamakv.cli.render import size

    if sharing is None:
        return "not known: the store's cache is out of date (--sections looks at all sessions)"
    if not sharing.sharers:
        return "nothing: no other session has any of its sections"
    names = few_names([sharer.name for sharer in sharing.sharers])
    return f"{sharing.n_sections:,} of {len(sharing.info.sections):,} sections ({size(sharing.n_bytes)}) with {names}"


def few_names(names: Sequence[str]) -> str:
    """The first two of some names, and how many more there are."""
    n_more = len(names) - 2
    return ", ".join(names[:2]) + (f" and {n_more:,} more" if n_more > 0 else "")


def sharing_json(sharing: Sharing) -> Json:
    """The sessions that share sections, as data."""
    return [
        {"session": sharer.name, "sections": len(sharer.digests), "stored_bytes": sharing.n_bytes_with(sharer)}
        for sharer in sharing.sharers
    ]


def memory_json(memory: ResumeMemory) -> Json:
    """What resuming takes in memory, as data."""
    return {
        "n_ctx": memory.n_ctx,
        "cells": memory.n_cells,
        "bytes": memory.n_bytes,
        "state_bytes": memory.n_state_bytes,
        "model_bytes": memory.n_model_bytes,
        "reading_bytes": memory.n_reading_bytes,
    }


def memory_text(memory: ResumeMemory) -> str:
    """What resuming takes in memory, on one line."""
    from llamakv.cli.render import count, size

    state = f"{size(memory.n_state_bytes)} of state ({count(memory.n_cells, 'cell')})"
    reading = f"up to {size(memory.n_reading_bytes)} while reading"
    parts = f"{state} · {size(memory.n_model_bytes)} model file · {reading}"
    context = f"a context has more cells (n_ctx {memory.n_ctx:,} when it was saved)"
    return f"at least {size(memory.n_bytes)} in all: {parts}; {context}, and the program comes on top"


def cost_json(cost: ResumeCost) -> Json:
    """What reading took, as data."""
    return {
        "sections": cost.n_sections,
        "raw_bytes": cost.n_raw_bytes,
        "stored_bytes": cost.n_stored_bytes,
        "file_bytes": cost.n_file_bytes,
        "resident_bytes": cost.n_resident_bytes,
        "threads": cost.n_threads,
        "elapsed_s": cost.elapsed_s,
        "raw_bytes_per_s": cost.raw_bytes_per_s,
    }


def cost_rows(cost: ResumeCost) -> list[tuple[str, str]]:
    """What reading took, and what it leaves out, for people."""
    from llamakv.cli.render import count, size

    if cost.n_sections == 0:
        return [("read", "nothing: there are no sections")]
    speed = f", {size(int(cost.raw_bytes_per_s))}/s" if cost.raw_bytes_per_s is not None else ""
    if cost.n_resident_bytes is None:
        before = "not known: this system does not tell"
    else:
        before = f"{cost.n_resident_bytes / max(cost.n_file_bytes, 1):.0%} of {size(cost.n_file_bytes)}"
    return [
        ("read", f"{count(cost.n_sections, 'section')}, {size(cost.n_stored_bytes)} for {size(cost.n_raw_bytes)} "
                 "of state, decompressed and checked"),
        ("time", f"{1000 * cost.elapsed_s:,.1f} ms on {count(cost.n_threads, 'thread')}{speed}"),
        ("in memory", f"{before} of the files, before they were read"),
        ("not in it", "loading the model, setting the state, decoding the pending token: not measured"),
    ]  # fmt: skip


def inside_json(inside: Inside, *, layers: bool, cells: bool) -> dict[str, Json]:
    """What is inside a session's sections, as data."""
    data: dict[str, Json] = {}
    if layers:
        data["layers"] = [
            {
                "kind": layer.kind.value,
                "index": layer.index,
                "cells": layer.n_cells,
                "type_k": layer.type_k,
                "type_v": layer.type_v,
                "k_raw_bytes": layer.k_raw,
                "v_raw_bytes": layer.v_raw,
                "k_stored_bytes": layer.k_stored,
                "v_stored_bytes": layer.v_stored,
            }
            for layer in inside.layers
        ]
        data["layers_other_raw_bytes"] = inside.n_other
    if cells:
        data["section_cells"] = [
            {
                "section": part.section,
                "kind": part.kind.value,
                "cells": part.n_cells,
                "positions": [list(found) for found in part.positions],
                "k_raw_bytes": part.k_raw,
                "v_raw_bytes": part.v_raw,
            }
            for part in inside.parts
        ]
    data["unknown_sections"] = [
        {"section": found.section, "raw_bytes": found.n_raw, "reason": found.reason} for found in inside.unknown
    ]
    return data


def encoding_text(file: SectionFile) -> str:
    """How a section is stored, in a word."""
    if file.is_missing:
        return "missing"
    return "unreadable" if file.encoding is None else str(file.encoding)


def place_rows(sections: Sequence[StoredSection], files: Sequence[SectionFile]) -> list[tuple[str, str]]:
    """Where the sections lie, and which of them are missing or cannot be read."""
    from llamakv.cli.render import count

    if not sections:
        return []
    n_inside = sum(not section.in_store for section in sections)
    n_objects = sum(section.in_store and not file.is_missing for section, file in zip(sections, files, strict=True))
    places = [
        f"{n_objects:,} in the store's objects" if n_objects else "",
        f"{n_inside:,} in the file" if n_inside else "",
    ]
    rows = [("sections", " · ".join(place for place in places if place) or "all missing")]
    missing = [number for number, file in enumerate(files) if file.is_missing]
    if missing:
        which = f"{len(missing):,} of {count(len(sections), 'section')} not in the store: {numbers_text(missing)}"
        rows.append(("missing", f"{which} · this session cannot be resumed as it is"))
    troubled = [(number, file.trouble) for number, file in enumerate(files) if file.trouble is not None]
    if troubled:
        which = numbers_text([number for number, _ in troubled])
        rows.append(("unreadable", f"{len(troubled):,} of {len(sections):,} sections: {which} ({troubled[0][1]})"))
    return rows


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers of sections: the first few, and how many more there are."""
    more = f" and {len(numbers) - 8:,} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more


def with_sharing(
    headings: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    sections: Sequence[StoredSection],
    sharing: Sharing | None,
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of sections with a bar for each in a terminal, and who shares it instead of its encoding if that is
    known and anybody does."""
    from llamakv.cli.render.bars import share_bar

    if sharing is not None and not sharing.sharers:
        sharing = None
    most = max((section.n_stored for section in sections), default=1)
    found = []
    for row, section in zip(rows, sections, strict=True):
        bar = (share_bar(section.n_stored / most, BAR_COLUMNS),) if _has_bars() else ()
        others = row[4]
        if sharing is not None and others not in ("missing", "unreadable"):
            others = few_names(sharing.names.get(section.digest, []))
        found.append((*row[:4], *bar, others, row[5]))
    fifth = headings[4] if sharing is None else "SHARED WITH"
    return (*headings[:4], *(("SIZE",) if _has_bars() else ()), fifth, headings[5]), found


def layer_table(inside: Inside) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows: a row for each layer, and their sum; in a terminal with a bar."""
    from llamakv.cli.render import size
    from llamakv.cli.render.bars import share_bar

    def row(name: str, n_cells: str, layers: Sequence[LayerSize]) -> tuple[str, ...]:
        k, v = sum(layer.k_raw for layer in layers), sum(layer.v_raw for layer in layers)
        k_stored, v_stored = sum(layer.k_stored or 0 for layer in layers), sum(layer.v_stored or 0 for layer in layers)
        return name, n_cells, size(k), size(k_stored), size(v), size(v_stored)

    headings: tuple[str, ...] = ("LAYER", "CELLS", "KEYS", "STORED", "VALUES", "STORED")
    rows = [row(f"{layer.kind} {layer.index}", f"{layer.n_cells:,}", [layer]) for layer in inside.layers]
    rows.append(row("all", "", inside.layers))
    if _has_bars():
        most = max(layer.n_raw for layer in inside.layers) or 1
        bars = [share_bar(layer.n_raw / most, BAR_COLUMNS) for layer in inside.layers]
        headings, rows = (*headings, "SIZE"), [(*r, bar) for r, bar in zip(rows, [*bars, ""], strict=True)]
    return headings, rows


def layer_notes(inside: Inside) -> list[tuple[str, str]]:
    """What the table of layers means, and how it adds up."""
    from llamakv.cli.render import size

    kinds = {layer.kind.value for layer in inside.layers}
    n_layers = sum(layer.n_raw for layer in inside.layers)
    n_stored = sum(layer.n_stored or 0 for layer in inside.layers)
    rows = [
        ("raw", f"{size(n_layers)} in layers and {size(inside.n_other)} that say what is where, of "
                f"{size(inside.n_raw)}"),
        ("stored", f"each layer's keys and values compressed alone: {size(n_stored)} in all; as sections they are "
                   f"{size(inside.n_stored)}"),
        ("layers", "numbered within their cache; llamakv inspect MODEL.gguf --layers tells those of the model"),
    ]  # fmt: skip
    if "recurrent" in kinds:
        rows.append(("recurrent", "KEYS is the part R (the last inputs), VALUES the part S; CELLS counts states"))
    if any(layer.type_v is None for layer in inside.layers):
        rows.append(("values", "there are none: latent attention keeps one row for both"))
    return rows


def cell_table(inside: Inside, n_positions: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows: a row for each cache's part of a section; in a terminal with a map of its positions."""
    from llamakv.cli.render import size
    from llamakv.cli.render.bars import position_bar

    headings: tuple[str, ...] = ("SECTION", "CELLS", "POSITIONS", "KEYS", "VALUES")
    rows: list[tuple[str, ...]] = []
    for part in inside.parts:
        is_state = part.kind.value == "recurrent"
        where = f"at {part.positions[-1][1]}" if is_state else ranges_text(part.positions)
        row = (f"{part.section} {part.kind}", f"{part.n_cells:,}", where, size(part.k_raw), size(part.v_raw))
        bar = (position_bar(part.positions, n_positions, 2 * BAR_COLUMNS),) if _has_bars() else ()
        rows.append((*row, *bar))
    return (*headings, *((f"0 TO {n_positions:,}",) if _has_bars() else ())), rows


def held_rows(inside: Inside, n_positions: int) -> list[tuple[str, str]]:
    """Of each cache, which of the session's positions it holds cells of, all sections together, and which not."""
    from llamakv.cli.render import count

    rows: list[tuple[str, str]] = []
    for kind in dict.fromkeys(part.kind for part in inside.parts):
        held = merged(found for part in inside.parts if part.kind is kind for found in part.positions)
        if kind.value == "recurrent":
            states = ", ".join(str(p1) for part in inside.parts if part.kind is kind for _, p1 in part.positions)
            rows.append((kind.value, f"the state after {states} tokens"))
            continue
        n_held = sum(p1 - p0 for p0, p1 in held)
        gaps = [found for found in _between(held, n_positions) if found[0] < found[1]]
        missing = f"missing {ranges_text(gaps)}" if gaps else "none missing"
        rows.append((kind.value, f"{count(n_held, 'position')} of {n_positions:,}, {missing}"))
    return rows


def unknown_rows(inside: Inside) -> list[tuple[str, str]]:
    """Sections that nothing can be said of."""
    from llamakv.cli.render import count, size

    first = inside.unknown[0]
    n_bytes = sum(found.n_raw for found in inside.unknown)
    what = f"{count(len(inside.unknown), 'section')}, {size(n_bytes)}, of a layout this llamakv does not know"
    return [("unknown", f"{what} ({first.section}: {first.reason})")]


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for p0, p1 in sorted(ranges):
        if found and p0 <= found[-1][1]:
            found[-1] = found[-1][0], max(p1, found[-1][1])
        else:
            found.append((p0, p1))
    return found


def _between(ranges: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    starts = [0, *(p1 for _, p1 in ranges)]
    ends = [*(p0 for p0, _ in ranges), end]
    return list(zip(starts, ends, strict=True))


def _has_bars() -> bool:
    from llamakv.cli.render import WIDE, width

    return width() < WIDE


def ranges_text(ranges: Sequence[tuple[int, int]], n_most: int = 3) -> str:
    """Ranges of positions: the first few, and how many more there are."""
    if not ranges:
        return "none"
    shown = " ".join(f"[{p0}, {p1})" for p0, p1 in ranges[:n_most])
    return shown if len(ranges) <= n_most else f"{shown} and {len(ranges) - n_most:,} more"


def section_map(title: str, info: SessionInfo, sharing: Sharing | None) -> SectionMap:
    """A session's sections as they are drawn."""
    from llamakv.cli.plots import MapRow, SectionMap

    names = sharing.names if sharing is not None else {}
    return SectionMap(
        title=title,
        sections=[
            MapRow(
                p0=section.p0,
                p1=section.p1,
                kind=section.kind.value,
                raw_bytes=section.n_raw,
                stored_bytes=section.n_stored,
                is_shared=section.digest in names,
            )
            for section in info.sections
        ],
    )
