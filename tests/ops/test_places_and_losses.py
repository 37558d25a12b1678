"""Going on from a place inside a session, and from sessions that have lost a part of their state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.engine.prefix import n_common
from llamakv.errors import DamagedError, NotFoundError, UsageError
from llamakv.ops import opening
from llamakv.ops.sessions import remove_sessions, resolve_for_writing
from llamakv.records import MemoryKind, SectionKind
from llamakv.store.objects import Objects
from llamakv.store.session_file import (
    SessionInfo,
    SessionReader,
    create_session,
    extend_session,
    n_cells_held,
    read_session,
    sections_up_to,
)
from tests.ops.driver import GREEDY, RANDOM, Driver, Heard, sha, state_of

KINDS = ["M", "MS", "MR", "MH", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MH2", "ML"))]
TURNS = ["Hello there.", "The quick brown fox jumps over the lazy dog. " * 12, "One more?"]


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest, models, tmp_path: Path) -> Driver:
    return Driver(models(request.param), tmp_path)


@pytest.fixture
def dense(models, tmp_path: Path) -> Driver:
    return Driver(models("M"), tmp_path)


def talked(driver: Driver, path: Path, turns: list[str], sampling=GREEDY) -> None:
    with driver.chat(save=path, sampling=sampling) as live:
        for text in turns:
            live.send(text, Heard().reporter)


# ---------------------------------------------------------------- places


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_going_on_from_an_earlier_turn_says_what_was_said_there(driver: Driver, tmp_path: Path, sampling) -> None:
    path, short = tmp_path / "whole.bin", tmp_path / "short.bin"
    talked(driver, path, TURNS, sampling)
    talked(driver, short, TURNS[:2], sampling)
    before = sha(path)
    with driver.resume(short, save=tmp_path / "expected.bin") as live:
        expected = live.send("And now?", Heard().reporter)
        tokens, logits = state_of(live)
    with driver.resume(path, at="turn2", save=tmp_path / "other.bin") as again:
        assert [m.content for m in again.messages] == [m.content for m in read_session(short).record.chat.messages]
        answer = again.send("And now?", Heard().reporter)
        assert (answer.text, answer.reused, answer.evaluated) == (expected.text, expected.reused, expected.evaluated)
        assert state_of(again)[0] == tokens
        if driver.model.stem in ("M", "MR", "MH"):
            assert state_of(again)[1] == logits
    assert sha(path) == before
    record, parent = read_session(tmp_path / "other.bin").record, read_session(path).record
    assert record.lineage.parent_id == parent.lineage.session_id
    assert record.lineage.parent_position == n_common(record.tokens, parent.tokens)


def test_a_single_answer_at_a_place(dense: Driver, tmp_path: Path) -> None:
    path, short = tmp_path / "whole.bin", tmp_path / "short.bin"
    talked(dense, path, TURNS)
    talked(dense, short, TURNS[:1])
    found = dense.load(path, "And now?", at="turn1")
    assert found.text == dense.load(short, "And now?").text
    raw = tmp_path / "raw.bin"
    dense.save(raw, TURNS[1], raw=True)
    tokens = read_session(raw).record.tokens
    answer = dense.load(raw, " Then", at="40", sampling=GREEDY, save=tmp_path / "kept.bin")
    assert answer.reused == 39
    assert read_session(tmp_path / "kept.bin").record.tokens[:40] == tokens[:40]


@pytest.mark.parametrize(
    ("at", "error"), [("turn9", NotFoundError), ("99999", NotFoundError), ("somewhere", UsageError)]
)
def test_a_place_that_is_none_is_refused(dense: Driver, tmp_path: Path, at: str, error) -> None:
    path = tmp_path / "whole.bin"
    talked(dense, path, TURNS[:1])
    with pytest.raises(error):
        dense.load(path, "And now?", at=at)
    with pytest.raises(error):
        dense.resume(path, at=at, save=tmp_path / "other.bin")
    assert not (tmp_path / "other.bin").exists()


# ---------------------------------------------------------------- losses


def lose(path: Path, n_cells: int) -> int:
    """Leave a session only what it has of its first cells; return how many can be brought back."""
    info = read_session(path)
    kept = sections_up_to(info.record.kind, info.sections, n_cells)
    extend_session(info, info.record, keep=kept, new=(), is_partial=True)
    return n_cells_held(info.record.kind, kept)


@pytest.mark.parametrize("in_store", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["store", "file"])
@pytest.mark.parametrize("n_cells", [0, pytest.param(1, marks=pytest.mark.slow), 100, 300, 10_000])
def test_what_was_lost_is_read_again_and_kept_again(
    driver: Driver, tmp_path: Path, n_cells: int, in_store: bool
) -> None:
    folder = tmp_path / "store"
    path, expected = tmp_path / "lossy.bin", tmp_path / "whole.bin"
    if in_store:
        path = resolve_for_writing(folder, "lossy")
    talked(driver, path, TURNS)
    talked(driver, expected, TURNS)
    n_tokens = len(read_session(path).record.tokens)
    if n_cells > n_tokens:
        n_cells = n_tokens - 2
    held = lose(path, n_cells)
    assert held <= n_cells
    heard = Heard()
    with driver.resume(path, heard) as again, driver.resume(expected) as live:
        assert (again.opened.reused, again.opened.evaluated) == (held, n_tokens - 1 - held)
        assert any(
            f"{n_tokens - 1 - held:,} of {n_tokens - 1:,} tokens is not stored" in text for text in heard.notices
        )
        answer, wanted = again.send("And now?", Heard().reporter), live.send("And now?", Heard().reporter)
        assert answer.text[:16] == wanted.text[:16]  # read again in other batches: near ties may flip later on
        assert [replace(m, time_s=None) for m in again.messages[:-1]] == [
            replace(m, time_s=None) for m in live.messages[:-1]
        ]
        tokens = state_of(again)[0]
    info = read_session(path)
    assert info.n_cells_held == len(info.record.tokens) - 1
    with driver.resume(path) as healed:
        assert (healed.opened.reused, healed.opened.evaluated) == (len(tokens) - 1, 0)
        assert state_of_tokens(healed) == tokens


def test_a_lossy_session_can_be_forked_loaded_and_copied_by_a_branch(dense: Driver, tmp_path: Path) -> None:
    path, whole = resolve_for_writing(tmp_path / "store", "lossy"), tmp_path / "whole.bin"
    talked(dense, path, TURNS)
    talked(dense, whole, TURNS)
    held = lose(path, 100)
    assert dense.load(path, "And now?").text[:16] == dense.load(whole, "And now?").text[:16]
    forked, expected = dense.fork(path, "One?", "Two?"), dense.fork(whole, "One?", "Two?")
    assert [text[:16] for text in forked.texts] == [text[:16] for text in expected.texts]
    with dense.resume(path, save=tmp_path / "store" / "other.bin") as again:
        again.send("And now?", Heard().reporter)
    assert read_session(tmp_path / "store" / "other.bin").n_cells_held > held


def test_a_session_that_lost_an_object_names_it_and_its_tokens_are_whole(dense: Driver, tmp_path: Path) -> None:
    root = tmp_path / "store"
    path = resolve_for_writing(root, "lossy")
    talked(dense, path, TURNS)
    info = read_session(path)
    Objects(root).path_of(info.sections[0].digest).unlink()
    with pytest.raises(DamagedError) as caught:
        dense.resume(path)
    assert info.sections[0].digest[:16] in caught.value.message
    with dense.resume(path, options=opening.ResumeOptions(recompute=True)) as again:
        again.send("And now?", Heard().reporter)
    assert read_session(path).n_cells_held == len(read_session(path).record.tokens) - 1


# ---------------------------------------------------------------- others at work


def test_a_session_saved_and_collected_while_it_is_opened_is_read_again(
    dense: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    path = resolve_for_writing(root, "busy")
    talked(dense, path, TURNS[:1])
    n_before = len(read_session(path).record.tokens)
    real, changed = SessionReader.hold, []

    def hold(self: SessionReader, sections) -> None:
        if not changed:
            changed.append(True)
            _rewritten_from_the_beginning(path)
        real(self, sections)

    monkeypatch.setattr(SessionReader, "hold", hold)
    with dense.resume(path) as again:
        assert len(state_of_tokens(again)) == n_before
        assert (again.opened.reused, again.opened.evaluated) == (n_before - 1, 0)


def _rewritten_from_the_beginning(path: Path) -> SessionInfo:
    """The same session, in sections cut elsewhere, the old ones gone."""
    from llamakv.store.collector import collect

    with SessionReader(path) as reader:
        record, parts = reader.info.record, list(reader.read(reader.info.sections))
    assert record.kind is MemoryKind.DENSE
    assert all(part.kind is SectionKind.CELLS for part in parts)
    changed = [replace(part, data=memoryview(bytes(part.data))) for part in parts]
    lost = read_session(path)
    extend_session(lost, record, keep=(), new=(), is_partial=True)
    collect(path.parent)
    return create_session(path, record, changed, overwrite=True)


def state_of_tokens(conversation) -> list[int]:
    return list(conversation._model.sequence.tokens)


def test_a_chat_whose_session_was_removed_is_saved_whole_again(dense: Driver, tmp_path: Path) -> None:
    root = tmp_path / "store"
    path = resolve_for_writing(root, "gone")
    with dense.chat(save=path) as live:
        live.send(TURNS[0], Heard().reporter)
        remove_sessions(root, ["gone"])
        assert not list((root / ".objects").glob("??/*"))
        answer = live.send(TURNS[1], Heard().reporter)
        tokens = state_of(live)[0]
    assert answer.saved is not None
    with dense.resume(answer.saved.info.path) as again:
        assert state_of_tokens(again) == tokens
        assert again.opened.evaluated == 0
