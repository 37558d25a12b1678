"""Places where others may begin with recurrent states: what is kept there, what that gives, and that it goes again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from llamakv.engine.contract import RunRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.records import SectionKind
from tests.engine.scheduler.cases import cold, drive, is_same, watching, written
from tests.engine.scheduler.many import ask, check_account, check_answers, open_many
from tests.engine.test_sequence import tokens_of


@pytest.fixture(scope="module", params=["MH", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MR", "MH2"))])
def recurrent(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    with LlamaModel(models(request.param)) as model:
        yield model


def ask_at(tokens: Sequence[int], places: Sequence[int], n: int = 4, **more) -> RunRequest:
    return replace(ask(tokens, n, **more), places=tuple(places))


def run_at(scheduler: LlamaScheduler, tokens: Sequence[int], places: Sequence[int], n: int = 4, **more) -> LlamaRun:
    run = scheduler.submit(ask_at(tokens, places, n, **more))
    drive(scheduler, [run])
    assert run.error is None
    return run


def copies(scheduler: LlamaScheduler) -> list[int]:
    """How many cells each copy has."""
    return [run.cells.n_cells for run in scheduler.kept if run.finish_reason == "copied"]


# ---------------------------------------------------------------- what others begin with


def test_who_begins_with_the_same_tokens_begins_at_the_last_place_and_answers_as_alone(recurrent: LlamaModel) -> None:
    prefix = tokens_of(recurrent, 300)
    scheduler = open_many(recurrent, 4, n_kept=12)
    runs = []
    with watching() as seen:
        for i in range(3):
            tokens = [*prefix, *tokens_of(recurrent, 20 + i, seed=i + 1)]
            runs.append(run_at(scheduler, tokens, (120, 300)))
            check_account(scheduler)
    assert [run.n_reused for run in runs] == [0, 300, 300]
    assert [run.n_evaluated for run in runs] == [320, 21, 22]
    assert sorted(copies(scheduler)) == [120, 300]
    for run in runs:
        prompt = run.tokens[: run.n_prompt]
        parts = prompt[:121], prompt[121:301], prompt[301:]
        assert is_same(written(run, seen), cold(recurrent, *parts, n=4))


def test_the_same_prompt_again_reads_nothing_but_its_pending_token(recurrent: LlamaModel) -> None:
    tokens = tokens_of(recurrent, 90)
    scheduler = open_many(recurrent)
    with watching() as seen:
        runs = [run_at(scheduler, tokens, (89,), seed=i, temperature=0.0) for i in range(3)]
    assert [run.n_reused for run in runs] == [0, 89, 89]
    assert [written(run, seen).ids for run in runs] == [written(runs[0], seen).ids] * 3
    assert all(is_same(written(run, seen), cold(recurrent, tokens, n=4)) for run in runs)


def test_16_runs_with_one_prefix_read_it_once(recurrent: LlamaModel) -> None:
    prefix = tokens_of(recurrent, 300)
    scheduler = open_many(recurrent, 16, n_kept=16)
    with watching() as seen:
        runs = [scheduler.submit(ask_at([*prefix, *tokens_of(recurrent, 10, seed=i)], (300,))) for i in range(16)]
        drive(scheduler, runs)
    assert sorted(run.n_reused for run in runs) == [0] + [300] * 15
    assert sum(run.n_evaluated for run in runs) == 300 + 16 * 10
    for run in runs:
        prompt = run.tokens[: run.n_prompt]
        assert is_same(written(run, seen), cold(recurrent, prompt[:301], prompt[301:], n=4))
    check_account(scheduler)


def test_who_comes_while_another_reads_the_same_makes_a_place_of_where_they_part(recurrent: LlamaModel) -> None:
    prefix = tokens_of(recurrent, 600)
    scheduler = open_many(recurrent, 4, n_kept=8)
    with watching() as seen:
        runs = [scheduler.submit(ask([*prefix, *tokens_of(recurrent, 40, seed=i)])) for i in range(4)]
        drive(scheduler, runs)
    assert sorted(run.n_reused for run in runs) == [0, 600, 600, 600]
    assert check_answers(recurrent, runs, seen) <= 1
    check_account(scheduler)


def test_nothing_is_begun_with_in_another_space_and_nobody_waits_there(recurrent: LlamaModel) -> None:
    prefix = tokens_of(recurrent, 200)
    scheduler = open_many(recurrent)
    run_at(scheduler, [*prefix, 400], (200,), space="one")
    runs = [scheduler.submit(ask_at([*prefix, 500], (200,), space=space)) for space in ("two", "three")]
    scheduler.step()
    assert scheduler.counts.n_active == 2
    drive(scheduler, runs)
    assert [run.n_reused for run in runs] == [0, 0]
    assert copies(scheduler) == [200] * 3


def test_a_place_that_two_come_to_is_kept_once(recurrent: LlamaModel) -> None:
    prefix = tokens_of(recurrent, 20)  # too short to be waited for
    scheduler = open_many(recurrent)
    runs = [scheduler.submit(ask_at([*prefix, *tokens_of(recurrent, 30, seed=i)], (20,))) for i in range(2)]
    scheduler.step()
    assert scheduler.counts.n_active == 2
    drive(scheduler, runs)
    assert [run.n_evaluated for run in runs] == [50, 50]
    assert copies(scheduler) == [20]


@pytest.mark.parametrize("name", ["M", "MS"])
def test_memory_that_is_shared_anywhere_keeps_no_copies(models, name: str) -> None:
    with LlamaModel(models(name)) as model:
        prefix = tokens_of(model, 300)
        scheduler = open_many(model)
        with watching() as seen:
            runs = [run_at(scheduler, [*prefix, 400 + i], places) for i, places in enumerate([(120, 300), ()])]
        assert copies(scheduler) == []
        assert runs[1].n_reused == 300
        for run in runs:
            assert is_same(written(run, seen), cold(model, run.tokens[: run.n_prompt][:301], n=4))


@pytest.mark.parametrize("places", [(0,), (5, 5), (7, 3), (-1, 2), (10,), (3, 11)])
def test_what_is_no_ascending_place_of_the_tokens_is_refused(recurrent: LlamaModel, places: tuple[int, ...]) -> None:
    scheduler = open_many(recurrent)
    with pytest.raises(ValueError, match="no ascending places of 10 tokens"):
        scheduler.submit(ask_at(tokens_of(recurrent, 10), places))


def test_what_came_from_a_store_for_a_place_may_go_and_leaves_a_copy(recurrent: LlamaModel) -> None:
    prefix = tokens_of(recurrent, 150)
    scheduler = open_many(recurrent)
    one = run_at(scheduler, prefix, (), n=1)
    sections = list(scheduler.export(one))
    scheduler.release(one)
    brought = scheduler.adopt(one.tokens, lambda n: sections)
    runs = [run_at(scheduler, [*prefix, 500, 501], (150,))]
    scheduler.release(brought)
    runs.append(run_at(scheduler, [*prefix, 600], (150,)))
    assert [run.n_reused for run in runs] == [150, 150]
    assert copies(scheduler) == [150]


def test_the_state_at_the_first_place_is_exported_with_what_follows(recurrent: LlamaModel) -> None:
    scheduler = open_many(recurrent, 4, n_kept=12)
    run = run_at(scheduler, tokens_of(recurrent, 150), (60, 120, 149))
    n_cells = run.cells.n_cells

    def tails(p0: int) -> list[int]:
        return [section.p1 for section in scheduler.export(run, p0) if section.kind is SectionKind.TAIL]

    assert (tails(0), tails(60), tails(100)) == ([60, n_cells], [n_cells], [n_cells])
    end = run_at(scheduler, tokens_of(recurrent, 80, seed=1), (79,))
    assert [section.p1 for section in scheduler.export(end) if section.kind is SectionKind.TAIL] == [end.cells.n_cells]


def test_the_exported_state_of_a_place_goes_on_as_it_did(recurrent: LlamaModel) -> None:
    scheduler = open_many(recurrent)
    run = run_at(scheduler, tokens_of(recurrent, 150), (60,))
    sections = [replace(one, p_used=min(one.p_used, 60)) for one in scheduler.export(run) if one.p0 <= 60]
    other = open_many(recurrent)
    other.adopt(run.tokens[:61], lambda n: sections)
    with watching() as seen:
        again = run_at(other, run.tokens[: run.n_prompt], ())
    assert again.n_reused == 60
    prompt = run.tokens[: run.n_prompt]
    assert is_same(written(again, seen), cold(recurrent, prompt[:61], prompt[61:], n=4))


# ---------------------------------------------------------------- room


def test_without_a_sequence_for_a_copy_nothing_is_kept_and_nobody_waits_in_vain(recurrent: LlamaModel) -> None:
    prefix = tokens_of(recurrent, 200)
    scheduler = open_many(recurrent, 1, n_kept=1)
    pinned = run_at(scheduler, tokens_of(recurrent, 20, seed=50), ())
    scheduler.pin(pinned, is_pinned=True)
    runs = [
        scheduler.submit(ask_at([*prefix, *tokens_of(recurrent, 10, seed=i)], (200,), keeps=False)) for i in range(4)
    ]
    with watching() as seen:
        drive(scheduler, runs)
    assert copies(scheduler) == []
    assert [run.n_reused for run in runs] == [0] * 4
    assert check_answers(recurrent, runs, seen) <= 1
    assert scheduler.has_cells(pinned)


def test_copies_take_a_quarter_of_the_sequences_and_those_never_begun_with_go_first(recurrent: LlamaModel) -> None:
    scheduler = open_many(recurrent, 2, n_kept=9)  # and the root: 12
    first, second = tokens_of(recurrent, 120), tokens_of(recurrent, 120, seed=1)
    run_at(scheduler, [*first, 400], (50,), n=1)
    run_at(scheduler, [*first[:50], 401], (), n=1)
    run_at(scheduler, second, (40, 60, 80, 119), n=1)
    assert copies(scheduler) == [50, 60, 80]
    check_account(scheduler)


def test_the_end_of_a_prompt_takes_only_a_free_sequence_or_another_ones_like_it(recurrent: LlamaModel) -> None:
    scheduler = open_many(recurrent, 2, n_kept=9)
    texts = [tokens_of(recurrent, 60 + i, seed=i) for i in range(4)]
    run_at(scheduler, texts[0], (20, 59), n=1)
    run_at(scheduler, texts[1], (30, 60), n=1)
    assert copies(scheduler) == [20, 30, 60]
    run_at(scheduler, texts[2], (61,), n=1)
    assert copies(scheduler) == [20, 30, 61]
    run_at(scheduler, texts[3], (40, 62), n=1)
    assert copies(scheduler) == [20, 30, 40]


def test_a_place_that_others_read_past_counts_as_begun_with(recurrent: LlamaModel) -> None:
    """They began before it with a run that was just there, to which less than a call was missing."""
    scheduler = open_many(recurrent, 4, n_kept=7)
    prefix = tokens_of(recurrent, 270)
    one = scheduler.submit(ask_at([*prefix, *tokens_of(recurrent, 9, seed=1)], (270,), n=1))
    scheduler.step()
    other = scheduler.submit(ask_at([*prefix, *tokens_of(recurrent, 9, seed=2)], (270, 278), n=1))
    drive(scheduler, [one, other])
    assert other.n_reused == 256
    run_at(scheduler, tokens_of(recurrent, 50, seed=3), (10, 20, 30, 40), n=1)
    assert 270 in copies(scheduler)


def test_copies_make_room_for_others(recurrent: LlamaModel) -> None:
    scheduler = open_many(recurrent, 1, n_kept=7)
    for i in range(6):
        run_at(scheduler, tokens_of(recurrent, 60, seed=i), (20, 40), n=1)
    assert (len(copies(scheduler)), len(scheduler.kept)) == (2, 8)
    for i in range(2):
        run_at(scheduler, tokens_of(recurrent, 60, seed=10 + i), (), n=1)
    assert copies(scheduler) == []
    assert len(scheduler.kept) == 8


def test_copies_outlive_a_growing_context(recurrent: LlamaModel) -> None:
    prefix = tokens_of(recurrent, 400)
    scheduler = open_many(recurrent, 4, n_kept=12)
    n_ctx = scheduler.root.n_ctx
    with watching() as seen:
        runs = [run_at(scheduler, [*prefix, *tokens_of(recurrent, 30, seed=1)], (100, 400))]
        scheduler._shared.enlarge()
        check_account(scheduler)
        runs += [run_at(scheduler, [*prefix[:n], *tokens_of(recurrent, 30, seed=n)], ()) for n in (100, 400)]
    assert scheduler.root.n_ctx > n_ctx
    assert [run.n_reused for run in runs] == [0, 100, 400]
    for run, parts in zip(runs, [(101, 401), (101,), (101, 401)], strict=True):
        prompt = run.tokens[: run.n_prompt]
        pieces = [prompt[a:b] for a, b in zip((0, *parts), (*parts, len(prompt)), strict=True)]
        assert is_same(written(run, seen), cold(recurrent, *pieces, n=4))


# ---------------------------------------------------------------- and they go again


def test_what_is_released_takes_the_copies_along_that_nobody_else_begins_with(recurrent: LlamaModel) -> None:
    prefix = tokens_of(recurrent, 100)
    scheduler = open_many(recurrent, 2, n_kept=14)
    one = run_at(scheduler, [*prefix, *tokens_of(recurrent, 40, seed=1)], (100, 120))
    other = run_at(scheduler, [*prefix, *tokens_of(recurrent, 40, seed=2)], (100, 130))
    elsewhere = run_at(scheduler, tokens_of(recurrent, 40, seed=3), (20,), space="other")
    assert sorted(copies(scheduler)) == [20, 100, 120, 130]
    scheduler.release(one)
    assert sorted(copies(scheduler)) == [20, 100, 130]
    scheduler.release(other)
    assert copies(scheduler) == [20]
    scheduler.release(elsewhere)
    check_account(scheduler)
    assert (scheduler.counts.n_cells, scheduler.counts.n_kept) == (0, 0)


def test_copies_of_a_run_that_was_cancelled_go_when_nobody_began_with_them_for_some_time(recurrent: LlamaModel) -> None:
    scheduler = open_many(recurrent)
    run = scheduler.submit(ask_at(tokens_of(recurrent, 300), (50, 200)))
    waiting = scheduler.submit(ask_at([*tokens_of(recurrent, 60), 400], (), n=1))
    while copies(scheduler) != [50]:
        scheduler.step()
    scheduler.cancel(run)
    scheduler.release_copies(0.0)
    assert copies(scheduler) == [50]  # somebody begins with it
    drive(scheduler, [waiting])
    assert waiting.n_reused >= 50
    scheduler.cancel(waiting)
    scheduler.release_copies(3600.0)
    assert scheduler.counts.n_kept > 0
    scheduler.release_copies(0.0)
    assert (scheduler.counts.n_cells, scheduler.counts.n_kept) == (0, 0)
