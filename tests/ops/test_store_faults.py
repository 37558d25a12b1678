"""What a hostile user did to a store: nothing is lost, nothing wrong is answered, and what to do is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamakv.errors import AbortedError, ExistsError, NoRoomError, ReadError, UsageError, WriteError
from llamakv.ops import budget, save, warm
from llamakv.ops.budget import Budget
from llamakv.ops.copying import move_session
from llamakv.ops.lineage import change_tags
from llamakv.ops.listing import list_sessions
from llamakv.ops.pruning import gc, prune
from llamakv.ops.repair import repair_store
from llamakv.ops.requests import MemoryOptions, Reporter, SaveRequest
from llamakv.ops.sessions import resolve_for_writing
from llamakv.ops.warm import warm_prefixes
from llamakv.store import session_writer
from llamakv.store.collector import collect
from llamakv.store.objects import CLAIMS, Objects
from llamakv.store.retention import Rules
from llamakv.store.session_file import SessionReader, create_session, read_session, verify_session
from llamakv.store.store_folder import make_store
from llamakv.store.usage import names_in_use, using
from tests.ops.driver import Driver, Heard
from tests.store.samples import cells, make_record
from tests.store.stores import DAY_S, add_session, files_of, flip, object_of, set_idle

QUIET = Reporter()
LONG = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_store(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def dense(models, tmp_path: Path) -> Driver:
    return Driver(models("M"), tmp_path)


def names(root: Path) -> list[str]:
    return sorted(path.stem for path in root.glob("*.bin"))


# ---------------------------------------------------------------- moving onto what only looks like it


def test_a_session_is_not_moved_onto_a_bare_copy_of_its_index(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_store(other)
    add_session(root, "plan", 600)
    shutil.copy(root / "plan.bin", other / "plan.bin")
    with pytest.raises(ExistsError):
        move_session(root / "plan.bin", other / "plan.bin", name="plan")
    assert verify_session(root / "plan.bin").is_sound
    move_session(root / "plan.bin", other / "plan.bin", name="plan", overwrite=True)
    assert verify_session(other / "plan.bin").is_sound
    assert not (root / "plan.bin").exists()


def test_a_file_is_not_moved_onto_a_damaged_copy(tmp_path: Path) -> None:
    info = create_session(tmp_path / "a.bin", make_record(9), [cells(0, 8, n_bytes=5000)])
    shutil.copy(info.path, tmp_path / "b.bin")
    flip(tmp_path / "b.bin", lambda n: info.sections[0].offset + 900)
    with pytest.raises(ExistsError):
        move_session(tmp_path / "a.bin", tmp_path / "b.bin", name=None)
    assert verify_session(tmp_path / "a.bin").is_sound


# ---------------------------------------------------------------- warm and what became of it


def _warm(driver: Driver, root: Path, text: str, *, name: str = "support") -> list:
    path = resolve_for_writing(root, name)
    results: list = []
    request = SaveRequest(model=driver.request(), path=path, name=name, system=text, text=None, reuse_from=root)
    warm_prefixes([request], QUIET, on_result=results.append)
    return results


def test_a_conversation_that_went_on_from_a_warmed_prefix_stays(dense: Driver, root: Path) -> None:
    _warm(dense, root, LONG)
    with dense.resume(root / "support.bin") as live:
        live.send("Something important.", Heard().reporter)
    before = (root / "support.bin").read_bytes()
    (same,) = _warm(dense, root, LONG)
    assert (same.result, same.error) == (None, None)
    (other,) = _warm(dense, root, "Another text. " * 20)
    assert isinstance(other.error, ExistsError)
    assert (root / "support.bin").read_bytes() == before


def test_a_branch_of_a_warmed_prefix_is_nobody_elses(dense: Driver, root: Path) -> None:
    _warm(dense, root, LONG)
    with dense.resume(root / "support.bin", save=resolve_for_writing(root, "other")) as live:
        live.send("Something important.", Heard().reporter)
    (result,) = _warm(dense, root, "Another text. " * 20, name="other")
    assert isinstance(result.error, ExistsError)


# ---------------------------------------------------------------- odd times, links, files


def test_a_session_from_the_far_future_is_one_like_others(dense: Driver, root: Path) -> None:
    add_session(root, "plan", 600)
    os.utime(root / "plan.bin", (10_413_792_000, 10_413_792_000))  # the year 2300
    assert [session.name for session in list_sessions(root)] == ["plan"]
    assert dense.save(resolve_for_writing(root, "new"), LONG, reuse_from=root, budget=Budget(ttl_s=60.0)).complete


def test_a_chat_whose_store_is_gone_keeps_all_of_it(dense: Driver, root: Path) -> None:
    path = resolve_for_writing(root, "plan")
    heard = Heard()
    with dense.chat(save=path) as live:
        live.send(LONG, heard.reporter)
        shutil.rmtree(root / ".objects")
        (root / ".store").unlink()
        answer = live.send("And?", heard.reporter)
    kept = answer.saved.info.path
    assert verify_session(kept).is_sound
    assert read_session(kept).n_cells_held == len(read_session(kept).record.tokens) - 1


def test_a_session_of_more_sections_than_open_files_is_read(root: Path) -> None:
    create_session(root / "many.bin", make_record(201), [cells(i, i + 1, n_bytes=400) for i in range(200)])
    script = (
        "import resource, sys\n"
        "from llamakv.store.session_file import SessionReader, create_session\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))\n"
        "with SessionReader(sys.argv[1]) as reader:\n"
        "    print(sum(1 for _ in reader.read(reader.info.sections)))\n"
        "    create_session(sys.argv[2], reader.info.record, [], source=reader, keep=reader.info.sections)\n"
    )
    out = root.parent / "out.bin"
    done = subprocess.run(
        [sys.executable, "-c", script, root / "many.bin", out], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "200"), done.stderr
    assert verify_session(out).is_sound


def test_a_flip_in_an_objects_version_is_damage_that_can_be_repaired(root: Path) -> None:
    add_session(root, "plan", 600)
    data = bytearray((place := object_of(root, "plan", 1)).read_bytes())
    data[17] = 1
    place.write_bytes(data)
    assert repair_store(root, QUIET).is_sound
    assert read_session(root / "plan.bin").n_cells_held == 256


@pytest.mark.parametrize("what", [CLAIMS, ".lock"])
def test_what_cannot_be_claimed_is_refused_before_anything_is_read(dense: Driver, root: Path, what: str) -> None:
    add_session(root, "plan", 600)
    place = Objects(root).folder / what
    if place.is_dir():
        shutil.rmtree(place)
        place.write_text("x")
    else:
        place.unlink(missing_ok=True)
        place.mkdir()
    heard = Heard()
    with pytest.raises(WriteError):
        dense.save(root / "new.bin", LONG, heard)
    assert not [phase for phase, *_ in heard.phases if phase == "prefill"]


def test_a_save_that_fails_leaves_nothing_behind(root: Path) -> None:
    def sections():
        yield cells(0, 4, n_bytes=3000)
        raise WriteError("no more")

    with pytest.raises(WriteError):
        create_session(root / "a.bin", make_record(9), sections())
    assert list(Objects(root).all()) == []
    assert names(root) == []


def test_replacing_a_session_removes_what_only_it_had(dense: Driver, root: Path) -> None:
    path = resolve_for_writing(root, "a")
    dense.save(path, LONG, raw=True)
    dense.save(path, "Quite another text. " * 20, raw=True, overwrite=True)
    assert {digest for digest, _ in Objects(root).all()} == {s.digest for s in read_session(path).sections}


# ---------------------------------------------------------------- open sessions


def test_a_session_that_is_open_stays_whatever_the_rules_say(dense: Driver, root: Path) -> None:
    path = resolve_for_writing(root, "live")
    with dense.chat(save=path) as live:
        live.send("Hello.", Heard().reporter)
        add_session(root, "other", 600, idle_s=9 * DAY_S)
        set_idle(path, 99 * DAY_S)
        assert names_in_use(root) == {"live"}
        report = prune(root, Rules(ttl_s=DAY_S), QUIET)
        assert [v.session.name for v in report.removed] == ["other"]
        Budget(max_bytes=10**9, store_ttl_s=1.0).before_save(root, 0, keep=[])
        assert names(root) == ["live"]
    assert names_in_use(root) == set()
    assert [v.session.name for v in prune(root, Rules(ttl_s=DAY_S), QUIET).removed] == ["live"]


def test_a_session_open_through_a_link_is_in_use_by_its_own_name(root: Path) -> None:
    add_session(root, "plan")
    (root / "link.bin").symlink_to("plan.bin")
    with using(root / "link.bin"):
        assert names_in_use(root) == {"link", "plan"}


def test_idle_sessions_are_pruned_whatever_their_times_look_like_as_floats(root: Path) -> None:
    for index in range(40):
        add_session(root, f"s{index}", text=index)
        os.utime(root / f"s{index}.bin", ns=(1_700_000_000_123_456_789 + 7919 * index,) * 2)
    report = prune(root, Rules(last=1), QUIET)
    assert (len(report.removed), report.skipped) == (39, ())


# ---------------------------------------------------------------- budgets and prefixes


def test_what_a_save_begins_with_is_not_removed_to_make_room_for_it(dense: Driver, root: Path) -> None:
    path = resolve_for_writing(root, "base")
    dense.save(path, LONG, raw=True)
    n_bytes = sum(len(data) for data in files_of(root).values())
    with pytest.raises(NoRoomError):
        dense.save(
            resolve_for_writing(root, "longer"),
            LONG + "And more of it. " * 30,
            raw=True,
            reuse_from=root,
            budget=Budget(max_bytes=n_bytes + 3000),
        )
    assert names(root) == ["base"]
    assert verify_session(path).is_sound


def test_sessions_that_would_free_nothing_go_last(root: Path) -> None:
    add_session(root, "base", 1025, text=1, pinned=True)
    for index in range(5):
        add_session(root, f"copy{index}", 1025, text=1, idle_s=9 * DAY_S)
    add_session(root, "other", 1025, text=2, idle_s=DAY_S)
    n_bytes = sum(len(data) for data in files_of(root).values())
    Budget(max_bytes=n_bytes).before_save(root, 30_000, keep=["new"])
    assert names(root) == ["base", *(f"copy{index}" for index in range(5))]


def test_a_time_to_live_outlasts_labels_given_meanwhile(dense: Driver, root: Path) -> None:
    path = resolve_for_writing(root, "live")
    with dense.chat(save=path) as live:
        live.send("Hello.", Heard().reporter)
    with dense.resume(path, budget=Budget(ttl_s=7 * DAY_S)) as again:
        change_tags(path, add=("draft",), remove=())
        again.send("And?", Heard().reporter)
    lineage = read_session(path).record.lineage
    assert (lineage.tags, lineage.ttl_s) == (("draft",), 7 * DAY_S)


# ---------------------------------------------------------------- prune and what is no store


def test_a_folder_of_session_files_is_not_a_store(tmp_path: Path) -> None:
    create_session(tmp_path / "a.bin", make_record(9), [cells(0, 8)])
    (tmp_path / "b.bin").write_bytes(b"mine")
    before = files_of(tmp_path)
    for act in (lambda: prune(tmp_path, Rules(last=1), QUIET), lambda: gc(tmp_path, QUIET)):
        with pytest.raises(UsageError, match="is not a store"):
            act()
    with pytest.raises(UsageError, match="is not a store"):
        repair_store(tmp_path, QUIET)
    assert files_of(tmp_path) == before


def test_a_tag_that_no_session_has_keeps_nothing_and_removes_nothing(root: Path) -> None:
    add_session(root, "one", tags=("draft",))
    add_session(root, "two")
    with pytest.raises(UsageError, match="no session has the tag 'darft'"):
        prune(root, Rules(tags=("darft",)), QUIET)
    assert names(root) == ["one", "two"]


def test_turns_that_could_not_be_saved_are_counted(dense: Driver, root: Path) -> None:
    path = resolve_for_writing(root, "live")
    with dense.chat(save=path, budget=Budget(max_bytes=1000)) as live:
        with pytest.raises(NoRoomError):
            live.send("Hello.", Heard().reporter)
        assert live.n_unsaved_turns == 1
        live.save(root.parent / "out.bin", Heard().reporter)
        assert live.n_unsaved_turns == 0


def test_collecting_beside_a_reader_that_holds_its_sections(root: Path) -> None:
    info = add_session(root, "one", 600)
    with SessionReader(info.path) as reader:
        reader.hold(reader.info.sections)
        (root / "one.bin").unlink()
        assert collect(root).n_objects == 3
        assert sum(1 for _ in reader.read(reader.info.sections)) == 3


# ---------------------------------------------------------------- what a session began with is not another's


def test_a_saved_chat_given_the_system_prompt_of_a_warmed_prefix_keeps_its_own_state(dense: Driver, root: Path) -> None:
    rules = "Answer in the words of the sea, and never say more than you must. " * 8
    _warm(dense, root, rules, name="rules")
    path, cold = resolve_for_writing(root, "plan"), root.parent / "cold.bin"
    for place, reuse_from in ((path, root), (cold, None)):
        with dense.chat(save=place, system="Be brief, please. " * 30, reuse_from=reuse_from) as live:
            live.send(LONG, Heard().reporter)
            live.set_system(rules, Heard().reporter)
            live.undo(Heard().reporter)
            live.send("Hello there.", Heard().reporter)
    for place in (path, cold):
        assert verify_session(place).is_sound
    with SessionReader(path) as one, SessionReader(cold) as other:
        assert one.info.record.tokens == other.info.record.tokens
    with dense.resume(path) as again, dense.resume(cold) as expected:
        assert again.opened.evaluated == 0
        assert again.send("And?", Heard().reporter).text == expected.send("And?", Heard().reporter).text


def test_a_sequence_that_was_saved_before_is_not_begun_with_another_session(dense: Driver, root: Path) -> None:
    _warm(dense, root, LONG, name="rules")
    path = resolve_for_writing(root, "plan")
    with dense.chat(save=path, reuse_from=root) as live:
        live.send("Something else altogether. " * 30, Heard().reporter)
        heard = Heard()
        live.set_system(LONG, heard.reporter)
        assert not [notice for notice in heard.notices if "in the store" in notice]
        tokens = list(live._model.sequence.tokens)
    with dense.resume(path) as again:
        assert list(again._model.sequence.tokens) == tokens


def test_a_session_made_while_warm_was_reading_is_not_overwritten(
    dense: Driver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = warm.read_and_keep

    def meanwhile(*arguments, **options):
        dense.save(root / "support.bin", "Somebody's own text. " * 20)
        return real(*arguments, **options)

    monkeypatch.setattr(warm, "read_and_keep", meanwhile)
    (result,) = _warm(dense, root, LONG)
    assert result.info is not None
    assert result.info.path != root / "support.bin"
    assert read_session(root / "support.bin").record.chat.messages[-1].content.startswith("Somebody's")
    assert result.info.record.lineage.pinned


def test_labels_given_while_a_session_is_used_do_not_make_it_older(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_session(root, "plan", idle_s=29 * DAY_S)
    idle_ns = (root / "plan.bin").stat().st_mtime_ns
    change_tags(root / "plan.bin", add=("draft",), remove=())
    assert abs((root / "plan.bin").stat().st_mtime_ns - idle_ns) < 1000
    real = session_writer._replace_index

    def used_meanwhile(*arguments, **options):
        info = real(*arguments, **options)
        os.utime(root / "plan.bin")  # somebody resumes it the moment it is there
        return info

    monkeypatch.setattr(session_writer, "_replace_index", used_meanwhile)
    change_tags(root / "plan.bin", add=("other",), remove=())
    assert (root / "plan.bin").stat().st_mtime_ns > idle_ns + DAY_S * 1e9


def test_a_file_nobody_may_read_among_the_open_ones_stops_no_save(
    dense: Driver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(root: Path):
        raise ReadError("cannot read that", path=str(root))

    monkeypatch.setattr(budget, "names_in_use", refused)
    heard = Heard()
    path = resolve_for_writing(root, "plan")
    assert dense.save(path, LONG, heard, budget=Budget(max_bytes=10**9)).complete
    assert [notice for notice in heard.notices if "the store's budget could not be kept to" in notice]


def test_a_chat_with_a_window_only_leaves_no_old_state_behind(models, tmp_path: Path, root: Path) -> None:
    driver = Driver(models("MS"), tmp_path, memory=MemoryOptions(swa="window"))
    path = resolve_for_writing(root, "plan")
    with driver.chat(save=path) as live:
        for text in ("Hello.", LONG, "And?"):
            live.send(text, Heard().reporter)
    assert {digest for digest, _ in Objects(root).all()} == {s.digest for s in read_session(path).sections}


def test_stopped_before_anything_was_read_it_says_how_much_was_to_be_read(
    dense: Driver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(save, "begin_with_prefix", lambda *arguments: begun.append(True))
    request = SaveRequest(model=dense.request(), path=root / "new.bin", text=LONG, raw=True)
    with pytest.raises(AbortedError, match=r"none of \d+ tokens was read, nothing was saved"):
        save.save_prefix(request, Reporter(should_abort=lambda: bool(begun)))
    assert names(root) == []
