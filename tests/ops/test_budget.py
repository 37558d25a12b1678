"""A store is kept to its budget by every save; and B77: what is in use is never what goes."""

import time
from dataclasses import replace

import pytest

from llamakv.errors import DamagedError, NewerFormatError, NoRoomError
from llamakv.ops.budget import UNLIMITED, Budget, budget_report, rules_of, set_budget
from llamakv.ops.pruning import gc, prune
from llamakv.ops.requests import Reporter
from llamakv.records import Lineage
from llamakv.store import files
from llamakv.store.retention import Rules, names_of
from llamakv.store.session_file import change_lineage, verify_session
from llamakv.store.store_folder import StoreBudget, make_store, read_budget
from llamakv.store.survey import take_survey
from tests.store import stores
from tests.store.stores import DAY_S, add_session, set_idle

QUIET = Reporter()
KB45 = {"n_tokens": 257, "bytes_per_cell": 200}
"""A session of about 45 kB."""


@pytest.fixture
def root(tmp_path):
    make_store(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def told():
    return []


@pytest.fixture
def reporter(told):
    return Reporter(notice=told.append, warning=told.append)


def names(root):
    return sorted(path.stem for path in root.glob("*.bin"))


# ---------------------------------------------------------------- B77


def test_the_session_unused_for_longest_goes_and_the_one_in_use_stays(root, reporter, told):
    # B77, with kilobytes for megabytes
    budget = Budget(max_bytes=110_000)
    for index, name in enumerate(("oldest", "older", "now")):
        budget.before_save(root, 50_000, keep=[name], reporter=reporter)
        add_session(root, name, text=index, idle_s=(2 - index) * 1000.0, **KB45)
        budget.after_save(root, keep=[name], reporter=reporter)
        assert stores.n_bytes_on_disk(root) <= 110_000
    assert names(root) == ["now", "older"]
    assert told == ["removed oldest: unused for longest, and the store's budget is 110 kB"]
    set_idle(root / "now.bin", 10 * DAY_S)  # in use, however long ago it was saved
    budget.before_save(root, 50_000, keep=["now"], reporter=reporter)
    assert names(root) == ["now"]
    assert take_survey(root).orphans == ()
    assert verify_session(root / "now.bin").is_sound


def test_what_alone_is_too_large_is_refused_before_anything_is_written_or_removed(root):
    # B77
    for index, name in enumerate(("one", "two")):
        add_session(root, name, text=index, idle_s=100.0, **KB45)
    before = stores.files_of(root)
    with pytest.raises(NoRoomError) as caught:
        Budget(max_bytes=100_000).before_save(root, 150_000, keep=["new"])
    assert caught.value.exit_status == 15
    assert caught.value.message == "the store's budget of 100 kB is too small for 150 kB to save"
    assert "--max-bytes" in caught.value.hint
    assert "llamakv unpin" in caught.value.hint
    assert stores.files_of(root) == before


def test_pinned_sessions_count_and_are_never_removed(root):
    add_session(root, "pinned", text=1, idle_s=99 * DAY_S, pinned=True, **KB45)
    add_session(root, "free", text=2, **KB45)
    before = stores.files_of(root)
    with pytest.raises(NoRoomError, match=r"60.0 kB to save and the 4\d.\d kB that must stay \(pinned\)"):
        Budget(max_bytes=100_000).before_save(root, 60_000, keep=["new"])
    assert stores.files_of(root) == before
    Budget(max_bytes=100_000).before_save(root, 50_000, keep=["new"])
    assert names(root) == ["pinned"]


def test_a_session_being_written_is_not_removed_nor_another_in_its_place_if_that_is_no_use(root):
    for index, name in enumerate(("written", "free")):
        add_session(root, name, text=index, idle_s=100.0 - index, **KB45)
    with files.locked(root / "written.bin"):
        before = stores.files_of(root)
        with pytest.raises(NoRoomError):
            Budget(max_bytes=100_000).before_save(root, 60_000, keep=["new"])
        assert stores.files_of(root) == before
        Budget(max_bytes=100_000).before_save(root, 50_000, keep=["new"])
    assert names(root) == ["written"]


def test_saving_anew_what_is_there_needs_no_room_for_both(root):
    add_session(root, "one", text=1, **KB45)
    budget = Budget(max_bytes=60_000)
    with pytest.raises(NoRoomError):
        budget.before_save(root, 50_000, keep=["one"])
    budget.before_save(root, 50_000, keep=["one"], replaces="one")
    assert names(root) == ["one"]


def test_too_much_that_was_saved_stays_with_one_warning(root, reporter, told):
    add_session(root, "other", text=1, **KB45)
    add_session(root, "new", text=2, **KB45)
    budget = Budget(max_bytes=10_000)
    for _ in range(3):
        budget.after_save(root, keep=["new"], reporter=reporter)
    assert names(root) == ["new", "other"]  # removing it would not have been enough
    assert len(told) == 1
    assert "more than its budget of 10.0 kB" in told[0]


def test_sessions_that_share_are_counted_once(root):
    for name in ("one", "two", "three"):
        add_session(root, name, text=1, **KB45)
    Budget(max_bytes=100_000).before_save(root, 30_000, keep=["new"])
    assert names(root) == ["one", "three", "two"]


def test_orphans_go_before_sessions(root):
    add_session(root, "gone", text=1, **KB45)
    files.remove(root / "gone.bin")
    add_session(root, "old", text=2, idle_s=DAY_S, **KB45)
    Budget(max_bytes=100_000).before_save(root, 50_000, keep=["new"])
    assert names(root) == ["old"]
    assert stores.n_bytes_on_disk(root) < 50_000


def test_nothing_is_removed_while_a_session_cannot_be_read(root, reporter, told):
    add_session(root, "one", text=1, **KB45)
    (root / "bad.bin").write_bytes(b"x" * 3000)
    before = stores.files_of(root)
    budget = Budget(max_bytes=50_000)
    budget.before_save(root, 10_000, keep=["new"], reporter=reporter)
    budget.after_save(root, keep=["new"], reporter=reporter)
    assert stores.files_of(root) == before
    assert len(told) == 1
    assert "llamakv repair" in told[0]


# ---------------------------------------------------------------- time to live


def test_expired_sessions_go_with_the_next_save(root, reporter, told):
    for name, idle_s, ttl_s in (
        ("expired", 9.0, None),
        ("own", 5.0, 2.0),
        ("longer", 99.0, 100.0),
        ("fresh", 1.0, None),
    ):
        add_session(root, name, text=ord(name[0]), idle_s=idle_s * DAY_S, ttl_s=ttl_s and ttl_s * DAY_S)
    add_session(root, "pinned", idle_s=99 * DAY_S, pinned=True, ttl_s=1.0)
    add_session(root, "resumed", idle_s=99 * DAY_S)
    set_budget(root, max_bytes=None, ttl_s=7 * DAY_S)
    files.set_time(root / "resumed.bin")
    Budget().before_save(root, None, keep=["new"], reporter=reporter)
    assert names(root) == ["fresh", "longer", "pinned", "resumed"]
    assert told == ["removed expired and own: unused for longer than the time to live"]
    assert take_survey(root).orphans == ()


def test_one_that_is_in_use_or_was_pinned_since_it_was_listed_does_not_expire(root, monkeypatch):
    for name in ("kept", "changed", "used"):
        add_session(root, name, idle_s=9 * DAY_S)
    listing = [(name, root / f"{name}.bin") for name in ("kept", "changed", "used")]
    change_lineage(root / "changed.bin", lambda lineage: replace(lineage, pinned=True))
    files.set_time(root / "used.bin")
    monkeypatch.setattr("llamakv.ops.budget._expired", lambda *_: listing)
    Budget(store_ttl_s=DAY_S).before_save(root, None, keep=["kept"])
    assert names(root) == ["changed", "kept", "used"]


def test_a_command_looks_for_expired_sessions_only_now_and_then(root, monkeypatch):
    budget = Budget(store_ttl_s=DAY_S)
    budget.before_save(root, None, keep=["new"])
    add_session(root, "one", idle_s=9 * DAY_S)
    budget.before_save(root, None, keep=["new"])
    assert names(root) == ["one"]
    now_s = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: now_s)
    budget.before_save(root, None, keep=["new"])
    assert names(root) == []


def test_a_session_gets_and_loses_a_time_of_its_own():
    lineage = Lineage(session_id="x", ttl_s=5.0)
    assert Budget().apply_to(lineage) == lineage
    assert Budget(ttl_s=7.0).apply_to(lineage).ttl_s == 7.0
    assert Budget(ttl_s=UNLIMITED).apply_to(lineage).ttl_s is None


# ---------------------------------------------------------------- the store's own budget


def test_a_budget_is_set_a_part_at_a_time(tmp_path):
    root = tmp_path / "new"
    set_budget(root, max_bytes=1000, ttl_s=None)
    set_budget(root, max_bytes=None, ttl_s=60.0)
    assert read_budget(root) == StoreBudget(max_bytes=1000, ttl_s=60.0)
    set_budget(root, max_bytes=UNLIMITED, ttl_s=None)
    assert read_budget(root) == StoreBudget(ttl_s=60.0)
    report = budget_report(root, max_bytes=10.0, ttl_s=UNLIMITED)
    assert (report.budget.max_bytes, report.max_bytes, report.ttl_s, report.n_over) == (None, 10, None, 0)


def test_a_command_s_own_limit_comes_before_the_store_s(root):
    set_budget(root, max_bytes=50_000, ttl_s=None)
    for index, name in enumerate(("one", "two")):
        add_session(root, name, text=index, **KB45)
    Budget(max_bytes=UNLIMITED).after_save(root, keep=["two"])
    assert names(root) == ["one", "two"]
    Budget().after_save(root, keep=["two"])
    assert names(root) == ["two"]


def test_where_no_limit_is_set_no_session_is_read(root, monkeypatch):
    add_session(root, "one")
    monkeypatch.setattr("llamakv.ops.budget.take_survey", None)
    monkeypatch.setattr("llamakv.ops.budget.n_bytes_on_disk", None)
    budget = Budget()
    budget.before_save(root, 1000, keep=["new"])
    budget.after_save(root, keep=["new"])
    Budget(max_bytes=1).before_save(root.parent, 1000, keep=["new"])  # no store


def test_a_store_that_cannot_be_trusted_is_refused(root):
    (root / ".store").write_text('{"llamakv_store": 9}')
    for work in (
        lambda: Budget().before_save(root, 1, keep=["new"]),
        lambda: prune(root, Rules(), QUIET),
        lambda: gc(root, QUIET),
        lambda: set_budget(root, max_bytes=1, ttl_s=None),
    ):
        with pytest.raises(NewerFormatError):
            work()
    (root / ".store").write_text("{")
    with pytest.raises(DamagedError):
        gc(root, QUIET)


# ---------------------------------------------------------------- pruning


def small_store(root):
    for index, name in enumerate(("a", "b", "c", "d")):
        add_session(root, name, 513 if name != "d" else 600, text=index // 2, idle_s=(10 - index) * DAY_S)
    add_session(root, "e", 300, text=9)
    files.remove(root / "e.bin")


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        (Rules(), []),
        (Rules(last=2), ["a", "b"]),
        (Rules(last=3), ["a"]),
        (Rules(within_s=8.5 * DAY_S), ["a", "b"]),
        (Rules(ttl_s=9.5 * DAY_S), ["a"]),
        (Rules(max_bytes=50_000), ["a", "b"]),
    ],
)
def test_a_dry_run_says_exactly_what_a_real_one_does(root, rules, gone):
    small_store(root)
    before, n_before = stores.files_of(root), stores.n_bytes_on_disk(root)
    dry = prune(root, rules, QUIET, is_dry_run=True)
    assert stores.files_of(root) == before
    real = prune(root, rules, QUIET)
    assert sorted(names_of(v.session for v in real.removed)) == gone
    assert real.n_bytes_freed == dry.n_bytes_freed == n_before - stores.n_bytes_on_disk(root)
    assert real.n_bytes_left == dry.n_bytes_left == stores.n_bytes_on_disk(root)
    assert real.n_orphan_bytes > 0
    assert dry.verdicts == real.verdicts
    assert take_survey(root).orphans == ()
    assert all(verify_session(path).is_sound for path in root.glob("*.bin"))


def test_a_session_being_written_is_skipped_and_told(root):
    small_store(root)
    with files.locked(root / "a.bin"):
        assert prune(root, Rules(last=2), QUIET, is_dry_run=True).skipped == ("a",)
        report = prune(root, Rules(last=2), QUIET)
    assert (report.skipped, [v.session.name for v in report.removed]) == (("a",), ["b"])
    assert names(root) == ["a", "c", "d"]
    assert verify_session(root / "a.bin").is_sound


def test_one_used_after_the_rules_were_applied_stays(root, monkeypatch):
    small_store(root)
    real = prune.__globals__["judge"]

    def judge_and_use(*arguments, **options):
        verdicts = real(*arguments, **options)
        files.set_time(root / "a.bin")
        return verdicts

    monkeypatch.setattr("llamakv.ops.pruning.judge", judge_and_use)
    report = prune(root, Rules(last=1), QUIET)
    assert report.skipped == ("a",)
    assert names(root) == ["a", "d"]


def test_pruning_is_refused_while_a_session_cannot_be_read(root):
    small_store(root)
    (root / "bad.bin").write_bytes(b"x" * 3000)
    before = stores.files_of(root)
    with pytest.raises(Exception, match="not a llamakv session") as caught:
        prune(root, Rules(last=1), QUIET)
    assert (caught.value.exit_status, caught.value.hint.split(": ")[1]) == (13, "llamakv repair bad")
    assert stores.files_of(root) == before


def test_pruning_to_less_than_what_is_pinned_is_refused(root):
    small_store(root)
    change_lineage(root / "d.bin", lambda lineage: replace(lineage, pinned=True))
    before = stores.files_of(root)
    with pytest.raises(NoRoomError, match=r"must stay \(d\)"):
        prune(root, Rules(max_bytes=1000), QUIET)
    assert stores.files_of(root) == before


def test_rules_that_say_what_to_keep_come_before_the_store_s_budget(root):
    set_budget(root, max_bytes=1000, ttl_s=60.0)
    none = dict.fromkeys(("last", "within_s", "max_bytes", "ttl_s", "default_max_bytes", "default_ttl_s"))
    assert rules_of(root, **{**none, "tags": ()}) == Rules(max_bytes=1000, ttl_s=60.0)
    assert rules_of(root, **{**none, "tags": (), "max_bytes": UNLIMITED}) == Rules(ttl_s=60.0)
    assert rules_of(root, **{**none, "tags": (), "default_ttl_s": 5.0}) == Rules(max_bytes=1000, ttl_s=5.0)
    assert rules_of(root, **{**none, "tags": ("x",)}) == Rules(tags=("x",))
    assert rules_of(root, **{**none, "tags": ("x",), "max_bytes": 7.0}) == Rules(tags=("x",), max_bytes=7)
