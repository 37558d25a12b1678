"""The longest saved prefix, against a look at every session."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamakv.records import Adapter, MemoryKind, SectionKind, SessionRecord
from llamakv.store import reuse
from llamakv.store.cache import PrefixHint, StoreCache, space_of
from llamakv.store.sections import StoredSection, n_cells_held, sections_up_to
from llamakv.store.store_folder import make_store
from tests.store import samples
from tests.store.indexes import cell_rows, row, rows_of, tail_rows, write_index

N_SPACES = 2
BASE = samples.make_record(5)


def in_space(record: SessionRecord, number: int) -> SessionRecord:
    return replace(record, settings=replace(record.settings, rope_freq_base=float(number)))


SPACES = [
    space_of(record.identity, record.settings, record.versions)
    for record in (in_space(BASE, number) for number in range(N_SPACES))
]


@dataclass(frozen=True)
class Saved:
    """A session, and where its state can be cut: ``points`` is None where anywhere up to ``n_held``."""

    record: SessionRecord
    sections: tuple[StoredSection, ...]
    space: int
    is_lost: bool

    def n_reusable(self, prompt: Sequence[int]) -> int:
        """By the rules, written down once more: what ``sections_up_to`` brings back without anything else."""
        tokens, kind = self.record.tokens, self.record.kind
        n_alike = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, prompt, strict=False))
        )
        n_most = min(n_alike, n_cells_held(kind, self.sections), len(prompt) - 1)
        if all(section.kind is SectionKind.CELLS for section in self.sections):
            return max(0, n_most)
        fits = (n_cells_held(kind, sections_up_to(kind, self.sections, n)) == n for n in range(n_most + 1))
        return max((n for n, does in enumerate(fits) if does), default=0)


@st.composite
def sessions(draw: st.DrawFn) -> Saved:
    """Few tokens and short sessions, so that they begin alike."""
    tokens = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
    kind = draw(st.sampled_from(list(MemoryKind)))
    n_cells, is_lost = len(tokens) - 1, False
    points = draw(st.lists(st.integers(1, max(1, n_cells)), max_size=3))
    sections = rows_of(kind, n_cells, [point for point in points if point <= n_cells])
    may_be_whole = kind in (MemoryKind.WINDOWED, MemoryKind.HYBRID)
    if may_be_whole and n_cells and draw(st.booleans()):
        sections = [row(SectionKind.WHOLE, 0, n_cells)]
    elif n_cells > 1 and draw(st.booleans()):
        is_lost = True
        sections = rows_of(kind, draw(st.integers(0, n_cells - 1)))
    space = draw(st.integers(0, N_SPACES - 1))
    record = in_space(replace(BASE, tokens=tokens, kind=kind, chat=None, text=""), space)
    return Saved(record=record, sections=tuple(sections), space=space, is_lost=is_lost)


PROMPTS = st.lists(st.integers(0, 2), max_size=10)
STEPS = st.lists(st.tuples(st.sampled_from("abcd"), st.none() | sessions(), PROMPTS), min_size=1, max_size=8)


def check(saved: dict[str, Saved], space: int, prompt: Sequence[int], hint: PrefixHint | None) -> None:
    reusable = {name: found.n_reusable(prompt) for name, found in saved.items() if found.space == space}
    best = max(reusable.values(), default=0)
    if best == 0:
        assert hint is None
    else:
        assert hint is not None
        assert (hint.n_cells, reusable[hint.name]) == (best, best)


@settings(max_examples=60)
@given(steps=STEPS)
@pytest.mark.slow
def test_the_hint_is_as_good_as_the_best_session(steps: list[tuple[str, Saved | None, list[int]]]) -> None:
    saved: dict[str, Saved] = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        root = Path(folder)
        make_store(root)
        with StoreCache(root) as cache:
            for name, session, prompt in steps:
                path = root / f"{name}.bin"
                if session is not None:
                    write_index(path, session.record, session.sections, lost=session.is_lost)
                    saved[name] = session
                elif saved.pop(name, None) is not None:
                    path.unlink()
                for space in range(N_SPACES):
                    check(saved, space, prompt, cache.longest_prefix(SPACES[space], prompt))
        with StoreCache(root) as cache:
            for _, _, prompt in steps:
                check(saved, 0, prompt, cache.longest_prefix(SPACES[0], prompt))


# ---------------------------------------------------------------- by hand


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_store(tmp_path)
    return tmp_path


def save(root: Path, name: str, tokens: Sequence[int], kind: MemoryKind, sections: Sequence[StoredSection]) -> None:
    write_index(root / f"{name}.bin", in_space(replace(BASE, tokens=tuple(tokens), kind=kind), 0), sections)


def look_up(root: Path, tokens: Sequence[int], space: int = 0) -> tuple[str, int] | None:
    with StoreCache(root) as cache:
        hint = cache.longest_prefix(SPACES[space], tokens)
    return None if hint is None else (hint.name, hint.n_cells)


def test_cells_can_be_cut_anywhere(root: Path) -> None:
    for kind in (MemoryKind.DENSE, MemoryKind.WINDOWED):
        save(root, "s", range(1000), kind, cell_rows(999))
        assert look_up(root, range(2000)) == ("s", 999)
        assert look_up(root, range(700)) == ("s", 699)
        assert look_up(root, [*range(300), 5, 6]) == ("s", 300)
        assert look_up(root, [1, 0]) is None
        assert look_up(root, [0]) is None
        assert look_up(root, []) is None
        assert look_up(root, range(2000), space=1) is None


def test_recurrent_state_only_where_it_was_taken(root: Path) -> None:
    save(root, "r", range(100), MemoryKind.RECURRENT, tail_rows([40, 80, 99]))
    assert look_up(root, range(200)) == ("r", 99)
    assert look_up(root, range(100)) == ("r", 99)
    assert look_up(root, range(99)) == ("r", 80)
    assert look_up(root, [*range(79), 5]) == ("r", 40)
    assert look_up(root, range(40)) is None
    assert look_up(root, range(41)) == ("r", 40)


def test_a_whole_state_only_as_it_is(root: Path) -> None:
    save(root, "w", range(100), MemoryKind.WINDOWED, [row(SectionKind.WHOLE, 0, 99)])
    assert look_up(root, range(100)) == ("w", 99)
    assert look_up(root, range(99)) is None


def test_an_earlier_point_is_found_behind_branches_that_sort_between(root: Path) -> None:
    """Each branch differs from the prompt a little later, by a smaller token, and has no point before that."""
    prompt = [9] * 60
    save(root, "root", prompt[:11], MemoryKind.RECURRENT, tail_rows([10]))
    for n in range(12, 50):
        tokens = [*prompt[:n], 1, 2, 3]
        save(root, f"branch-{n}", tokens, MemoryKind.RECURRENT, tail_rows([n + 2]))
    assert look_up(root, prompt) == ("root", 10)
    save(root, "better", prompt[:31], MemoryKind.RECURRENT, tail_rows([30]))
    assert look_up(root, prompt) == ("better", 30)


def test_token_ids_sort_by_value_and_not_by_their_bytes(root: Path) -> None:
    for name, token in (("x", 255), ("y", 256), ("z", 2**31 - 1)):
        save(root, name, [7, token, 1], MemoryKind.DENSE, cell_rows(2))
    assert look_up(root, [7, 256, 4]) == ("y", 2)
    assert look_up(root, [7, 2**31 - 1, 4]) == ("z", 2)


def test_only_the_latest_points_of_a_session_that_has_very_many(root: Path) -> None:
    save(root, "r", range(2000), MemoryKind.RECURRENT, tail_rows(range(1, 2000)))
    assert look_up(root, range(3000)) == ("r", 1999)
    assert look_up(root, range(2000 - reuse._MAX_POINTS + 1)) == ("r", 2000 - reuse._MAX_POINTS)
    assert look_up(root, range(2000 - reuse._MAX_POINTS)) is None


def test_state_is_of_use_where_model_settings_and_engine_are_the_same() -> None:
    identity, memory, versions = BASE.identity, BASE.settings, BASE.versions
    same = space_of(identity, memory, versions)
    assert len(same) == 64
    assert space_of(replace(identity, name="x", n_bytes=1), memory, replace(versions, backend="cuda")) == same
    assert space_of(identity, memory, replace(versions, binding="9")) == same
    others = {
        space_of(replace(identity, digest="00" * 32), memory, versions),
        space_of(replace(identity, adapters=()), memory, versions),
        space_of(replace(identity, adapters=(Adapter(digest="ef" * 32, scale=0.25),)), memory, versions),
        *(
            space_of(identity, replace(memory, **{name: value}), versions)
            for name, value in {
                "type_k": "q8_0",
                "type_v": "f16",
                "flash_attn": True,
                "swa_full": False,
                "rope_freq_base": 5.0,
                "rope_freq_scale": 5.0,
                "attn_rot": False,
            }.items()
        ),
        space_of(identity, memory, replace(versions, llama_cpp="x")),
        space_of(identity, memory, replace(versions, commit="x")),
        space_of(identity, memory, replace(versions, state_version=9)),
    }
    assert len(others - {same}) == 13


@given(one=st.lists(st.integers(0, 2**31 - 1)), other=st.lists(st.integers(0, 2**31 - 1)), n=st.integers(0, 9))
@example(one=[0, 0], other=[0, 0, 0], n=2)
def test_packed_tokens_compare_as_tokens_do(one: list[int], other: list[int], n: int) -> None:
    other = one[:n] + other
    packed = reuse.pack_tokens(one), reuse.pack_tokens(other)
    assert (packed[0] < packed[1]) is (one < other)
    n_alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    assert reuse.n_packed_common(*packed) == n_alike
    assert reuse.cut_packed(packed[0], n_alike) == reuse.cut_packed(packed[1], n_alike)
    assert reuse.n_packed(packed[0]) == len(one)
