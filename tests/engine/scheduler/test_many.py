"""Many users: what a run begins with, who goes when cells run short, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from llamakv.engine.contract import Shortage
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.errors import EngineError, NoRoomError
from llamakv.records import Sampling
from tests.engine.scheduler.cases import check_close, cold, drive, request, watching, written
from tests.engine.scheduler.many import ask, check_account, check_answers, open_many, run_one
from tests.engine.scheduler.test_cells import engine_cells
from tests.engine.test_sequence import tokens_of


@pytest.fixture(scope="module", params=["MR", "MH", "MH2"])
def recurrent(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    with LlamaModel(models(request.param)) as model:
        yield model


# ---------------------------------------------------------------- what a run begins with


def test_a_run_begins_with_the_longest_live_prefix_be_it_the_roots_a_kept_or_an_active_run(dense: LlamaModel) -> None:
    text = tokens_of(dense, 300)
    scheduler = open_many(dense)
    scheduler.root.extend(text[:101])
    kept = run_one(scheduler, [*text[:180], 400], 1)
    assert (kept.n_reused, kept.n_evaluated) == (100, 81)
    active = scheduler.submit(ask([*text[:250], 401], 100))
    while not active.n_generated:
        scheduler.step()
    assert active.n_reused == 180
    with watching() as seen:
        runs = [run_one(scheduler, [*text[:n], 402], 3) for n in (60, 150, 240, 300)]
    assert [run.n_reused for run in runs] == [60, 150, 240, 250]
    assert check_answers(dense, runs, seen) == 0
    check_account(scheduler)


def test_nothing_is_shared_with_another_space(dense: LlamaModel) -> None:
    text = tokens_of(dense, 200)
    scheduler = open_many(dense)
    scheduler.root.extend(text)
    of_one = [run_one(scheduler, [*text, 400 + i], 1, space="one") for i in range(2)]
    of_two = [run_one(scheduler, [*text, 500 + i], 1, space="two") for i in range(2)]
    nobodys = run_one(scheduler, [*text, 600], 1)
    assert [run.n_reused for run in (*of_one, *of_two, nobodys)] == [0, 200, 0, 200, 199]
    together = [scheduler.submit(ask([*text, 700], 2, space=space)) for space in ("three", "four")]
    drive(scheduler, together)
    assert [run.n_reused for run in together] == [0, 0]
    check_account(scheduler)


def test_each_turn_of_a_conversation_begins_with_all_of_the_one_before(recurrent: LlamaModel) -> None:
    scheduler = open_many(recurrent, n_kept=4)
    tokens, parts = tokens_of(recurrent, 80), []
    for turn in range(4):
        parts.append(tokens_of(recurrent, 20, seed=turn))
        with watching() as seen:
            run = run_one(scheduler, [*tokens, *parts[-1]], 6)
        assert run.n_reused == (0 if turn == 0 else len(tokens) - 1)
        check_close(written(run, seen), cold(recurrent, [*tokens, *parts[-1]], n=6))
        tokens = list(run.tokens)
        check_account(scheduler)
    other = run_one(scheduler, [*tokens[:-30], *tokens_of(recurrent, 5, seed=50)], 1)
    assert other.n_reused in [run.cells.n_cells for run in scheduler.kept] + [0]


def test_a_conversation_takes_over_its_own_last_turn_when_all_sequences_are_in_use(recurrent: LlamaModel) -> None:
    scheduler = open_many(recurrent, 1, n_kept=1)
    first = run_one(scheduler, tokens_of(recurrent, 60), 4)
    pinned = run_one(scheduler, tokens_of(recurrent, 60, seed=1), 4)
    scheduler.let_go(first)
    scheduler.pin(pinned, is_pinned=True)
    tokens = [*first.tokens, *tokens_of(recurrent, 9, seed=2)]
    with watching() as seen:
        run = run_one(scheduler, tokens, 4)
    assert (run.n_reused, scheduler.has_cells(first), scheduler.has_cells(pinned)) == (63, False, True)
    check_close(written(run, seen), cold(recurrent, tokens, n=4))
    check_account(scheduler)


@pytest.mark.slow
def test_looking_for_the_beginning_among_128_kept_runs_is_cheap(dense: LlamaModel) -> None:
    """Most of the time goes into the runs that really have something in common."""
    text = tokens_of(dense, 2000)
    scheduler = open_many(dense, 1, n_kept=140, n_cells_max=16384)
    for i in range(128):
        run_one(scheduler, [*text[:1000], *tokens_of(dense, 20, seed=i)], 1)
    for run in scheduler.kept:  # as if they were longer
        run.tokens = [*run.tokens[:1020], *text[1020:]]
        run._ids = None
    waiting = LlamaRun([*text[:1000], *text[500:]], owner=scheduler, request=ask([1]), n_ctx_max=4096, number=0)
    times_s = []
    for _ in range(20):
        start = time.perf_counter()
        beginning = scheduler._kept.beginning_of(waiting, scheduler.root)
        times_s.append(time.perf_counter() - start)
    print(f"beginning among 128 kept runs of 2,000 tokens: {1e3 * min(times_s):.2f} to {1e3 * max(times_s):.2f} ms")
    assert beginning.n_shared == 1000
    assert beginning.owner is scheduler.kept[-1]


# ---------------------------------------------------------------- reading what several begin with


def test_16_runs_with_one_prefix_read_it_once(dense: LlamaModel) -> None:
    prefix = tokens_of(dense, 300)
    scheduler = open_many(dense, 16, n_kept=16)
    with watching() as seen:
        runs = [scheduler.submit(ask([*prefix, *tokens_of(dense, 10, seed=i)], 4)) for i in range(16)]
        drive(scheduler, runs)
    assert sorted(run.n_reused for run in runs) == [0] + [300] * 15
    assert sum(run.n_evaluated for run in runs) == 300 + 16 * 10
    assert check_answers(dense, runs, seen) <= 2
    check_account(scheduler)


@pytest.mark.parametrize("end", ["cancelled", "sent back", "timed out"])
def test_when_the_reader_goes_the_next_one_takes_over(dense: LlamaModel, end: str) -> None:
    prefix = tokens_of(dense, 600)
    scheduler = open_many(dense, 8, n_kept=16)
    with watching() as seen:
        runs = [scheduler.submit(ask([*prefix, *tokens_of(dense, 10, seed=i)], 4)) for i in range(8)]
        scheduler.step()
        assert (scheduler.counts.n_active, scheduler.counts.n_waiting) == (1, 7)
        if end == "cancelled":
            scheduler.cancel(runs[0])
        elif end == "sent back":
            scheduler._send_back(runs[0])
        else:
            runs[0].end("timeout")
        drive(scheduler, runs)
    done = [run for run in runs if run.finish_reason == "length"]
    assert len(done) == (8 if end == "sent back" else 7)
    assert sum(run.n_evaluated for run in done) <= 600 + 256 + len(done) * 10 + 8 * 32
    assert check_answers(dense, done, seen) <= 2
    check_account(scheduler)


def test_runs_that_share_nothing_with_the_reader_do_not_wait_for_it(dense: LlamaModel) -> None:
    prefix = tokens_of(dense, 2000)
    scheduler = open_many(dense, 4)
    reader, follower, elsewhere = (
        scheduler.submit(ask([*prefix, i], 2, space=s)) for i, s in ((1, ""), (2, ""), (3, "x"))
    )
    other = scheduler.submit(ask(tokens_of(dense, 20, seed=1), 2))
    scheduler.step()
    assert [run.started_s > 0 for run in (reader, follower, elsewhere, other)] == [True, False, True, True]
    drive(scheduler, [reader, follower, elsewhere, other])
    assert [run.n_reused for run in (reader, elsewhere, other)] == [0, 0, 0]
    assert 2000 - 32 <= follower.n_reused <= 2000


# ---------------------------------------------------------------- when cells run short


def kept_runs(scheduler, model: LlamaModel, n: int, length: int = 100) -> list[LlamaRun]:
    """Kept runs of ``length`` cells that have nothing in common."""
    return [run_one(scheduler, tokens_of(model, length, seed=100 + i), 1) for i in range(n)]


def test_the_one_used_longest_ago_goes_first_and_pinned_ones_stay(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 2, n_cells_max=512)
    runs = kept_runs(scheduler, dense, 4)
    assert scheduler.counts.n_cells == 400
    for run in runs:
        scheduler.let_go(run)
    scheduler.pin(runs[1], is_pinned=True)
    run_one(scheduler, [*runs[0].tokens[:-1], *tokens_of(dense, 3, seed=1)], 1, keeps=False)  # that one was used now
    assert list(scheduler.kept) == [runs[1], runs[2], runs[3], runs[0]]
    run_one(scheduler, tokens_of(dense, 150, seed=2), 1, keeps=False)
    assert [scheduler.has_cells(run) for run in runs] == [True, True, False, True]
    run_one(scheduler, tokens_of(dense, 400, seed=3), 1, keeps=False)
    assert [scheduler.has_cells(run) for run in runs] == [False, True, False, False]
    assert (scheduler.counts.n_cells, scheduler.counts.n_kept) == (100, 1)
    check_account(scheduler)


def test_nothing_goes_that_does_not_make_enough_room(dense: LlamaModel) -> None:
    """What is under way will make room soon; what is kept stays meanwhile."""
    scheduler = open_many(dense, 2, n_cells_max=512)
    (kept,) = kept_runs(scheduler, dense, 1)
    scheduler.let_go(kept)
    active = scheduler.submit(ask(tokens_of(dense, 250), 30, keeps=False))
    scheduler.step()
    waiting = scheduler.submit(ask(tokens_of(dense, 300, seed=1), 1, keeps=False))
    while not active.is_over:
        scheduler.step()
        assert waiting.started_s == 0 or active.is_over
        assert scheduler.has_cells(kept)
    drive(scheduler, [waiting])
    assert scheduler.has_cells(kept)


def test_a_kept_run_that_was_not_let_go_is_never_dropped_and_who_waits_goes_on_when_it_is(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 2, n_cells_max=512)
    runs = kept_runs(scheduler, dense, 4)
    waiting = scheduler.submit(ask(tokens_of(dense, 200, seed=1), 11))
    for _ in range(20):
        scheduler.step()
    assert scheduler.shortage == Shortage(n_cells=98, n_sequences=0)
    assert (waiting.is_over, scheduler.counts.n_active, scheduler.counts.n_kept) == (False, 0, 4)
    scheduler.let_go(runs[2])
    scheduler.step()
    assert scheduler.shortage is None
    assert [scheduler.has_cells(run) for run in runs] == [True, True, False, True]
    drive(scheduler, [waiting])
    assert waiting.error is None


def test_a_shortage_of_sequences_is_told(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 1, n_kept=2)
    runs = kept_runs(scheduler, dense, 3)
    waiting = scheduler.submit(ask(tokens_of(dense, 20), 2))
    scheduler.step()
    assert scheduler.shortage == Shortage(n_cells=0, n_sequences=1)
    scheduler.let_go(runs[0])
    drive(scheduler, [waiting])
    assert (scheduler.has_cells(runs[0]), scheduler.shortage) == (False, None)
    for run in scheduler.kept:
        scheduler.pin(run, is_pinned=True)
    refused = scheduler.submit(ask(tokens_of(dense, 20, seed=1), 2))
    drive(scheduler, [refused])  # instead of waiting for ever
    assert isinstance(refused.error, NoRoomError)


def test_a_run_begins_with_a_part_of_what_has_to_go_for_it(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 2, n_cells_max=512)
    (kept,) = kept_runs(scheduler, dense, 1, 400)
    scheduler.let_go(kept)
    tokens = [*kept.tokens[:100], *tokens_of(dense, 300, seed=1)]
    with watching() as seen:
        run = run_one(scheduler, tokens, 8)
    assert (run.n_reused, run.finish_reason, scheduler.has_cells(kept)) == (100, "length", False)
    check_close(written(run, seen), cold(dense, tokens))
    check_account(scheduler)


def test_dropping_a_parent_frees_its_own_cells_only_and_its_branches_share_on(dense: LlamaModel) -> None:
    text = tokens_of(dense, 300)
    scheduler = open_many(dense)
    parent = run_one(scheduler, text, 1)
    branches = [run_one(scheduler, [*text[:n], 400 + n], 1) for n in (100, 200, 150)]
    assert [branch.n_reused for branch in branches] == [100, 200, 150]
    assert scheduler.counts.n_cells == 300 + 3
    scheduler.release(parent)
    check_account(scheduler)
    assert scheduler.counts.n_cells == 200 + 3
    grown = run_one(scheduler, tokens_of(dense, 400, seed=2), 1)
    assert scheduler.root.n_ctx > 512
    check_account(scheduler)
    scheduler.release(grown)
    with watching() as seen:
        runs = [run_one(scheduler, [*branch.tokens[:-1], 450], 4, keeps=False) for branch in branches]
    assert check_answers(dense, runs, seen) == 0
    scheduler.release(branches[1])
    check_account(scheduler)
    assert scheduler.counts.n_cells == 150 + 2
    assert len(engine_cells(scheduler)) == 152


def test_memory_that_is_short_takes_kept_runs_before_it_sends_anybody_back(
    dense: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = open_many(dense, 2)
    runs = kept_runs(scheduler, dense, 4)
    monkeypatch.setattr(scheduler._shared, "_check_memory", _no_memory)
    scheduler.let_go(runs[0])
    with watching() as seen:
        writing = scheduler.submit(ask(tokens_of(dense, 150, seed=1), 20, keeps=False))
        drive(scheduler, [writing])
        assert [scheduler.has_cells(run) for run in runs] == [False, True, True, True]
        waiting = scheduler.submit(ask(tokens_of(dense, 250, seed=2), 20, keeps=False))
        while scheduler.shortage is None:
            scheduler.step()
        assert not waiting.is_over
        scheduler.let_go(runs[1])
        drive(scheduler, [waiting])
    assert check_answers(dense, [writing, waiting], seen) == 0


def _no_memory(n_ctx: int, n_seq_max: int) -> None:
    raise NoRoomError("no memory")


def test_the_root_takes_the_cells_of_kept_runs_that_may_go(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 2, n_cells_max=512)
    runs = kept_runs(scheduler, dense, 4)
    active = scheduler.submit(ask(tokens_of(dense, 20, seed=1), 50, keeps=False))
    scheduler.step()
    with pytest.raises(NoRoomError):
        scheduler.root.extend(tokens_of(dense, 200, seed=2))
    for run in runs:
        scheduler.let_go(run)
    scheduler.root.extend(tokens_of(dense, 200, seed=2))
    assert [scheduler.has_cells(run) for run in runs] == [False, False, True, True]
    drive(scheduler, [active])
    check_account(scheduler)


def test_an_export_ends_with_an_error_when_the_cells_are_freed_under_it(dense: LlamaModel) -> None:
    scheduler = open_many(dense)
    run = run_one(scheduler, tokens_of(dense, 600), 1)
    export = scheduler.export(run)
    next(export)
    scheduler.release(run)
    run_one(scheduler, tokens_of(dense, 600, seed=1), 1)  # in the same sequence
    with pytest.raises(EngineError, match="freed while"):
        next(export)


def test_after_close_nothing_has_cells(dense: LlamaModel) -> None:
    scheduler = open_many(dense)
    kept = run_one(scheduler, tokens_of(dense, 20), 1)
    active, waiting = (scheduler.submit(ask(tokens_of(dense, 20), 8)) for _ in range(2))
    scheduler.step()
    scheduler.close()
    assert [scheduler.has_cells(run) for run in (kept, active, waiting)] == [False] * 3
    assert [run.finish_reason for run in (kept, active, waiting)] == ["length", "interrupted", "interrupted"]
    assert list(scheduler.kept) == []


# ---------------------------------------------------------------- as before, and growing


def test_without_n_kept_a_run_shares_with_the_root_only_and_kept_ones_are_not_awaited(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 2, n_kept=0, n_cells_max=512)
    text = tokens_of(dense, 200)
    scheduler.root.extend(text[:51])
    kept = run_one(scheduler, text, 1)
    assert run_one(scheduler, [*text, 400], 1, keeps=False).n_reused == 50
    late = scheduler.submit(request(tokens_of(dense, 300, seed=1), 200))
    drive(scheduler, [late])
    assert (late.finish_reason, len(late.tokens), scheduler.shortage) == ("context", 512 - 200 + 1, None)
    assert scheduler.has_cells(kept)


def test_a_seeded_run_writes_the_same_whatever_it_begins_with(dense: LlamaModel) -> None:
    text, sampling = tokens_of(dense, 200), {"temperature": 0.8, "seed": 7}
    scheduler = open_many(dense)
    first = run_one(scheduler, text, 12, **sampling)
    again = run_one(scheduler, text, 12, **sampling)
    assert (first.n_reused, again.n_reused) == (0, 199)
    assert list(again.tokens) == list(first.tokens)
    assert Sampling(**sampling).seed == 7
    assert np.array_equal(first.ids, again.ids)


@pytest.mark.usefixtures("unguarded")
def test_sequences_share_on_in_a_larger_context_when_one_has_lost_its_window(models) -> None:
    """The branch has all that the root has lost: there the root shares with the branch."""
    with LlamaModel(models("MS")) as model, watching() as seen:
        root, rest = tokens_of(model, 200, seed=2), tokens_of(model, 5, seed=4)
        scheduler = open_many(model)
        scheduler._n_read_max = 256  # so that the other prompt takes the cells in one call
        first = scheduler.submit(ask(tokens_of(model, 100, seed=1), 100))
        scheduler.step()
        scheduler.root.extend(root)
        branch = scheduler.submit(ask([*root, *rest], 20))
        scheduler.step()
        scheduler.step()
        scheduler.root.extend(tokens_of(model, 60, seed=5))
        scheduler.cancel(first)
        others = [scheduler.submit(ask(tokens_of(model, 150, seed=3), 4))]
        scheduler.step()
        low = [
            scheduler._shared.native.position_range(cells.seq_id)[0] for cells in (scheduler.root.cells, branch.cells)
        ]
        assert low[0] > low[1]
        others.append(scheduler.submit(ask(tokens_of(model, 150, seed=6), 4)))
        scheduler.step()
        assert (scheduler.root.n_ctx, scheduler.root.cells.parent is branch.cells) == (1024, True)
        assert scheduler.root.cells.n_shared == 199
        check_account(scheduler)
        drive(scheduler, [branch, *others])
        check_close(written(branch, seen), cold(model, root, rest, n=20))
        going_on = run_one(scheduler, [*scheduler.root.tokens, 400], 4)
        assert going_on.n_reused == 259
        check_answers(model, [going_on], seen)
        for run in (branch, *others, going_on):
            scheduler.release(run)
        check_account(scheduler)
        assert scheduler.counts.n_cells == 259
