"""Which sessions stay and which go, and removing them."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakv.errors import LockedError, NotASessionError
from llamakv.records import Lineage
from llamakv.store import files
from llamakv.store.collector import collect
from llamakv.store.retention import Reason, Rules, is_expired, judge, make_room, names_of, remove_session
from llamakv.store.session_file import change_lineage, verify_session
from llamakv.store.store_folder import make_store
from llamakv.store.survey import Survey, SurveyedSession, n_bytes_on_disk, take_survey
from tests.store import samples, stores
from tests.store.stores import DAY_S, add_session

ROOT = Path(__file__).parents[2]
NOW_S = 1_000_000.0


@pytest.fixture
def root(tmp_path):
    make_store(tmp_path / "store")
    return tmp_path / "store"


# ---------------------------------------------------------------- rules, against a simple model


@st.composite
def surveys(draw):
    sizes = {f"{index:064x}": draw(st.integers(1, 50)) for index in range(draw(st.integers(0, 6)))}
    sessions = []
    for index in range(draw(st.integers(0, 7))):
        digests = draw(st.sets(st.sampled_from(sorted(sizes)))) if sizes else set()
        lineage = Lineage(
            session_id=str(index),
            pinned=draw(st.booleans()),
            tags=tuple(draw(st.sets(st.sampled_from("abc")))),
            ttl_s=draw(st.sampled_from((None, None, 5.0, 50.0))),
        )
        sessions.append(
            SurveyedSession(
                name=f"s{index}",
                path=Path(f"s{index}.bin"),
                used_s=NOW_S - draw(st.integers(0, 60)),
                lineage=lineage,
                identity=samples.make_record().identity,
                n_tokens=5,
                n_cells_held=4,
                n_file_bytes=draw(st.integers(1, 20)),
                n_raw_own=0,
                n_stored_own=0,
                n_object_bytes=sum(sizes[digest] for digest in digests),
                digests=frozenset(digests),
            )
        )
    return Survey(root=Path(), sessions=tuple(sessions), unreadable=(), object_bytes=sizes, object_raw=sizes)


def taken(survey, sessions):
    digests = set().union(*(session.digests for session in sessions))
    return sum(session.n_file_bytes for session in sessions) + sum(survey.object_bytes[digest] for digest in digests)


rules = st.builds(
    Rules,
    last=st.none() | st.integers(1, 4),
    within_s=st.none() | st.integers(1, 60).map(float),
    tags=st.sets(st.sampled_from("abcd")).map(tuple),
    ttl_s=st.none() | st.integers(1, 60).map(float),
)


@given(surveys(), rules, st.sets(st.sampled_from(["s0", "s1", "s9"])))
def test_rules_keep_what_a_simple_reading_of_them_keeps(survey, rules, keep):
    newest_first = sorted(survey.sessions, key=lambda s: (s.used_s, s.name), reverse=True)
    verdicts = judge(survey, rules, now_s=NOW_S, keep=keep)
    assert [verdict.session for verdict in verdicts] == newest_first
    for rank, verdict in enumerate(verdicts):
        session, idle_s = verdict.session, NOW_S - verdict.session.used_s
        lineage = session.lineage
        ttl_s = rules.ttl_s if lineage.ttl_s is None else lineage.ttl_s
        if lineage.pinned or session.name in keep:
            expected = True
        elif rules.last is not None or rules.within_s is not None or rules.tags:
            expected = (
                (rules.last is not None and rank < rules.last)
                or (rules.within_s is not None and idle_s <= rules.within_s)
                or bool(set(rules.tags) & set(lineage.tags))
            )
        else:
            expected = ttl_s is None or idle_s <= ttl_s
        assert verdict.is_kept is expected


@given(surveys(), rules, st.integers(1, 300), st.sets(st.sampled_from(["s0", "s1"])))
def test_a_budget_takes_the_least_recently_used_and_no_more_than_it_must(survey, rules, max_bytes, keep):
    without = [v for v in judge(survey, rules, now_s=NOW_S, keep=keep) if v.is_kept]
    verdicts = judge(survey, replace(rules, max_bytes=max_bytes), now_s=NOW_S, keep=keep)
    left = [verdict.session for verdict in verdicts if verdict.is_kept]
    gone = [verdict.session for verdict in verdicts if verdict.reason is Reason.OVER_BUDGET]
    assert {s.name for s in left} | {s.name for s in gone} == {v.session.name for v in without}
    assert not any(session.lineage.pinned or session.name in keep for session in gone)
    movable = [s for s in left if not s.lineage.pinned and s.name not in keep]
    staying = [v.session for v in without if v.session.lineage.pinned or v.session.name in keep]
    assert (taken(survey, left) <= max_bytes) is (taken(survey, staying) <= max_bytes)
    if gone:
        assert all((s.used_s, s.name) > (gone[0].used_s, gone[0].name) for s in movable)
        assert taken(survey, [*left, gone[0]]) > max_bytes  # the newest of those that went had to


def test_room_for_new_bytes_is_made_too(root):
    for index, name in enumerate("abc"):
        add_session(root, name, text=index, idle_s=100 - index)
    survey = take_survey(root)
    all_of_it = survey.n_bytes_of(survey.sessions)
    assert make_room(survey, survey.sessions, all_of_it) == ()
    assert names_of(make_room(survey, survey.sessions, all_of_it, n_new=1)) == ("a",)
    assert names_of(make_room(survey, survey.sessions, all_of_it, n_new=1, safe={"a"})) == ("b",)
    assert names_of(make_room(survey, survey.sessions, 1, n_new=1)) == ("a", "b", "c")
    assert make_room(survey, survey.sessions, 1, n_new=2) is None
    assert make_room(survey, survey.sessions, all_of_it - 1, safe={"a", "b", "c"}) is None


@pytest.mark.parametrize(
    ("own", "of_the_store", "expired"),
    [(None, None, False), (None, 9.0, True), (None, 11.0, False), (9.0, None, True), (11.0, 1.0, False)],
)
def test_a_session_s_own_time_to_live_comes_first(own, of_the_store, expired):
    lineage = Lineage(session_id="x", ttl_s=own)
    assert is_expired(lineage, NOW_S - 10, of_the_store, NOW_S) is expired
    assert not is_expired(replace(lineage, pinned=True), NOW_S - 10, of_the_store, NOW_S)
    assert not is_expired(lineage, NOW_S + 1e9, of_the_store, NOW_S)  # a clock that went back


# ---------------------------------------------------------------- surveys


def test_a_survey_counts_what_is_shared_once(root):
    one = add_session(root, "one", 513, text=1)
    two = add_session(root, "two", 257, text=1)
    add_session(root, "three", 257, text=2)
    survey = take_survey(root)
    by_name = {session.name: session for session in survey.sessions}
    assert survey.n_bytes == n_bytes_on_disk(root) == stores.n_bytes_on_disk(root)
    assert survey.n_bytes_of(survey.sessions) == survey.n_bytes
    assert survey.n_shared_bytes(by_name["one"]) == two.sections[0].n_stored
    assert survey.n_unique_bytes(by_name["two"]) == two.n_file_bytes
    assert survey.n_unique_bytes(by_name["one"]) == one.n_file_bytes + one.sections[1].n_stored
    assert survey.orphans == ()
    files.remove(root / "three.bin")
    left = take_survey(root)
    assert len(left.orphans) == 1
    assert left.n_bytes - left.n_bytes_of(left.sessions) == left.object_bytes[left.orphans[0]]


def test_a_survey_goes_on_past_a_session_that_cannot_be_read(root):
    add_session(root, "good")
    (root / "bad.bin").write_bytes(b"x" * 3000)
    survey = take_survey(root)
    assert [session.name for session in survey.sessions] == ["good"]
    assert [(s.name, s.error.code, s.n_file_bytes) for s in survey.unreadable] == [("bad", "not_a_session", 3000)]
    files.remove(root / "good.bin")
    assert take_survey(root).orphans == ()  # it cannot be told


# ---------------------------------------------------------------- removing


def test_a_session_is_asked_again_before_it_goes(root):
    info = add_session(root, "one", idle_s=3 * DAY_S)
    path = root / "one.bin"
    asked = []

    def no(found, used_s):
        asked.append((found.record, round(time.time() - used_s)))
        return False

    assert remove_session(path, only_if=no) is None
    assert asked == [(info.record, 3 * DAY_S)]
    assert path.exists()
    removed = remove_session(path, only_if=lambda info, used_s: True)
    assert (removed.name, removed.n_bytes) == ("one", info.n_file_bytes)
    assert removed.digests == {section.digest for section in info.sections}
    assert remove_session(path, only_if=lambda info, used_s: True) is None


def test_a_session_that_is_written_or_damaged_meanwhile_stays(root):
    add_session(root, "one")
    path = root / "one.bin"
    with files.locked(path), pytest.raises(LockedError):
        remove_session(path, only_if=lambda info, used_s: True)
    stores.flip(path, lambda n: n - 20)
    assert remove_session(path, only_if=lambda info, used_s: True) is None
    assert path.exists()


def test_one_pinned_in_time_stays(root):
    add_session(root, "one", idle_s=3 * DAY_S)
    planned = take_survey(root).sessions[0]
    change_lineage(root / "one.bin", lambda lineage: replace(lineage, pinned=True))
    removed = remove_session(planned.path, only_if=lambda info, used_s: info.record.lineage == planned.lineage)
    assert removed is None
    assert verify_session(root / "one.bin").is_sound


def test_nothing_is_collected_while_a_session_cannot_be_read(root):
    add_session(root, "one")
    (root / "bad.bin").write_bytes(b"x" * 3000)
    before = stores.files_of(root)
    files.remove(root / "one.bin")
    with pytest.raises(NotASessionError) as caught:
        collect(root)
    assert "llamakv repair" in caught.value.hint
    assert set(before) - set(stores.files_of(root)) == {"one.bin"}


# ---------------------------------------------------------------- killed

SCRIPT = """
import os, signal, sys
from pathlib import Path
from llamakv.ops.pruning import prune
from llamakv.ops.requests import Reporter
from llamakv.store import files
from llamakv.store.retention import Rules

n_left = int(sys.argv[2])

def wrap(name, real):
    def step(*arguments, **options):
        global n_left
        if n_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        n_left -= 1
        return real(*arguments, **options)
    return step

for name in ("remove", "discard", "sync_folder", "remove_stale_temporaries"):
    setattr(files, name, wrap(name, getattr(files, name)))
prune(Path(sys.argv[1]), Rules(last=2), Reporter())
"""


@pytest.mark.slow
def test_pruning_that_is_killed_leaves_whole_sessions_and_the_next_one_finishes(root):
    names = ["a", "b", "c", "d", "e"]
    seen = set()
    for n_steps in range(0, 60, 4):
        for index, name in enumerate(names):
            add_session(root, name, 300 if name == "c" else 513, text=0 if name in "ae" else index, idle_s=10 - index)
        done = subprocess.run([sys.executable, "-c", SCRIPT, root, str(n_steps)], cwd=ROOT, capture_output=True)
        left = sorted(path.stem for path in root.glob("*.bin"))
        assert set(left) >= {"d", "e"}
        assert all(verify_session(root / f"{name}.bin").is_sound for name in left)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        seen.add(len(left))
    assert done.returncode == 0
    assert {5, 2} <= seen
    subprocess.run([sys.executable, "-c", SCRIPT, root, "10000"], cwd=ROOT, check=True)
    survey = take_survey(root)
    assert (names_of(survey.sessions), survey.orphans) == (("d", "e"), ())
    assert not [name for name in os.listdir(root) if files.is_temporary(name)]


def test_a_name_with_dots_is_removed_under_its_name(root):
    add_session(root, "a.b")
    removed = remove_session(root / "a.b.bin", only_if=lambda info, used_s: True)
    assert removed.name == "a.b"
