"""Prefixes read before they are needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamakv.errors import ExistsError
from llamakv.ops.requests import SaveRequest
from llamakv.ops.sessions import resolve_for_writing
from llamakv.ops.warm import TAG, Warmed, warm_prefixes
from llamakv.store.session_file import change_lineage, read_session
from tests.ops.driver import GREEDY, Driver, Heard

RULES = "Answer in the words of the sea, and never say more than you must. " * 6
DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(params=["M", "MS", "MR", "MH"])
def driver(request: pytest.FixtureRequest, models, tmp_path: Path) -> Driver:
    return Driver(models(request.param), tmp_path)


@pytest.fixture
def dense(models, tmp_path: Path) -> Driver:
    return Driver(models("M"), tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def wanted(driver: Driver, root: Path, name: str, *, system: str | None = None, text: str | None = None, **more):
    path = resolve_for_writing(root, name)
    return SaveRequest(model=driver.request(), path=path, name=name, system=system, text=text, reuse_from=root, **more)


def warm(*requests: SaveRequest, heard: Heard | None = None) -> tuple[list[Warmed], bool]:
    results: list[Warmed] = []
    is_done = warm_prefixes(requests, (heard or Heard()).reporter, on_result=results.append)
    return results, is_done


def test_each_prefix_is_read_once_pinned_and_begun_with(driver: Driver, root: Path) -> None:
    asked = [wanted(driver, root, "rules", system=RULES), wanted(driver, root, "fox", text=DOCUMENT)]
    results, is_done = warm(*asked)
    assert is_done
    assert [result.error for result in results] == [None, None]
    assert all(result.result is not None and result.result.evaluated > 50 for result in results)
    for name in ("rules", "fox"):
        lineage = read_session(root / f"{name}.bin").record.lineage
        assert (lineage.name, lineage.pinned, lineage.tags) == (name, True, (TAG,))
    again, _ = warm(*asked)
    assert [result.result for result in again] == [None, None]
    answer = driver.load(None, "Who?", system=RULES, reuse_from=root, sampling=GREEDY)
    cold = driver.load(None, "Who?", system=RULES, sampling=GREEDY)
    assert answer.reused >= len(read_session(root / "rules.bin").record.tokens) - 2
    assert (answer.text, cold.reused) == (cold.text, 0)


def test_a_text_that_has_changed_is_read_from_where_it_differs(dense: Driver, root: Path) -> None:
    warm(wanted(dense, root, "fox", text=DOCUMENT))
    (result,), _ = warm(wanted(dense, root, "fox", text=DOCUMENT + "And then it slept."))
    assert result.result is not None
    assert result.result.reused > 100
    assert result.info is not None
    assert result.info.record.chat is not None
    assert result.info.record.chat.messages[-1].content.endswith("slept.")
    assert result.info.record.lineage.pinned


def test_a_session_that_warm_did_not_make_is_left_alone(dense: Driver, root: Path) -> None:
    path = resolve_for_writing(root, "fox")
    dense.save(path, "My own text. " * 20, name="fox")
    before = path.read_bytes()
    results, is_done = warm(wanted(dense, root, "fox", text=DOCUMENT), wanted(dense, root, "other", text=DOCUMENT))
    assert is_done
    assert isinstance(results[0].error, ExistsError)
    assert results[1].error is None
    assert path.read_bytes() == before
    (forced,), _ = warm(wanted(dense, root, "fox", text=DOCUMENT, overwrite=True))
    assert forced.error is None


def test_the_same_text_saved_by_hand_is_taken_as_it_is(dense: Driver, root: Path) -> None:
    path = resolve_for_writing(root, "fox")
    dense.save(path, DOCUMENT, name="fox")
    change_lineage(path, lambda lineage: lineage)
    (result,), _ = warm(wanted(dense, root, "fox", text=DOCUMENT))
    assert result.result is None
    assert read_session(path).record.lineage.pinned


def test_stopped_in_the_middle_it_keeps_what_was_read(dense: Driver, root: Path) -> None:
    long = DOCUMENT * 10
    results, is_done = warm(wanted(dense, root, "fox", text=long), heard=Heard(abort_at=512))
    assert not is_done
    assert len(results) <= 1
    (again,), is_done = warm(wanted(dense, root, "fox", text=long))
    assert is_done
    assert again.error is None
    assert read_session(root / "fox.bin").record.lineage.note == ""
