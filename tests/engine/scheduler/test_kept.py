"""The order in which kept runs go: what others begin with goes last, as far as its share goes."""

from __future__ import annotations

import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.run import LlamaRun
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from tests.engine.scheduler.cases import drive
from tests.engine.scheduler.many import ask, check_account, run_one
from tests.engine.test_sequence import tokens_of

N_BEGINNING = 100


def open_sharing(model: LlamaModel, share: float = 0.5, *, n_cells_max: int = 4096) -> LlamaScheduler:
    return model.open_scheduler(
        MemoryRequest(),
        n_parallel=2,
        n_kept=22,
        n_ctx_min=512,
        n_ctx_max=4096,
        n_cells_max=n_cells_max,
        later_share=share,
        n_threads=1,
    )


def sharing(
    scheduler: LlamaScheduler, model: LlamaModel, n: int = 3, *, text: int = 90, space: str = ""
) -> list[LlamaRun]:
    """Conversations that begin alike."""
    beginning = tokens_of(model, N_BEGINNING, seed=text)
    return [
        run_one(scheduler, [*beginning, *tokens_of(model, 20, seed=10 * text + i)], 1, space=space) for i in range(n)
    ]


def others(scheduler: LlamaScheduler, model: LlamaModel, n: int = 3) -> list[LlamaRun]:
    """Conversations that nobody begins as."""
    return [run_one(scheduler, tokens_of(model, 60, seed=i), 1) for i in range(n)]


def test_the_last_of_those_that_begin_alike_goes_after_all_others(dense: LlamaModel) -> None:
    scheduler = open_sharing(dense)
    alike, unlike = sharing(scheduler, dense), others(scheduler, dense)
    assert [run.n_reused for run in alike] == [0, N_BEGINNING, N_BEGINNING]
    assert scheduler.kept == [*alike[:2], *unlike, alike[2]]


def test_what_one_other_began_with_goes_in_its_turn(dense: LlamaModel) -> None:
    scheduler = open_sharing(dense)
    alike, unlike = sharing(scheduler, dense, 2), others(scheduler, dense)
    assert scheduler.kept == [*alike, *unlike]


def test_a_conversation_that_goes_on_is_nobody_else(dense: LlamaModel) -> None:
    scheduler = open_sharing(dense)
    run, turns = others(scheduler, dense, 1)[0], []
    for i in range(4):
        run = run_one(scheduler, [*run.tokens, *tokens_of(dense, 10, seed=70 + i)], 2)
        turns.append(run)
    unlike = [run_one(scheduler, tokens_of(dense, 60, seed=80 + i), 1) for i in range(3)]
    assert scheduler.kept[-4:] == [turns[-1], *unlike]


def test_of_each_beginning_one_goes_later_and_each_space_has_its_own(dense: LlamaModel) -> None:
    scheduler = open_sharing(dense)
    one, two, apart = (sharing(scheduler, dense, **settings) for settings in ({}, {"text": 91}, {"space": "other"}))
    unlike = others(scheduler, dense)
    assert scheduler.kept == [*one[:2], *two[:2], *apart[:2], *unlike, one[2], two[2], apart[2]]


@pytest.mark.parametrize(
    ("n_cells_max", "share", "n_later"),
    [(4096, 0.0, 0), (4096, 0.03, 0), (4096, 0.04, 1), (4096, 0.08, 2), (512, 0.2, 0), (512, 0.3, 1), (512, 0.5, 2)],
)
def test_beyond_the_share_of_cells_and_sequences_the_one_used_longest_ago_goes_first(
    dense: LlamaModel, n_cells_max: int, share: float, n_later: int
) -> None:
    """Each has 120 cells, and one of 25 sequences."""
    scheduler = open_sharing(dense, share, n_cells_max=n_cells_max)
    one, two = sharing(scheduler, dense), sharing(scheduler, dense, text=91)
    unlike = others(scheduler, dense)
    later = [one[2], two[2]][2 - n_later :]
    assert scheduler.kept == [*(run for run in (*one, *two) if run not in later), *unlike, *later]


@pytest.mark.parametrize("lengths", [(60, 60), (290,)], ids=["sequences", "cells"])
def test_pinned_runs_take_their_part_of_the_share(dense: LlamaModel, lengths: tuple[int, ...]) -> None:
    scheduler = open_sharing(dense, 0.1)  # 409 cells, 2 sequences
    alike = sharing(scheduler, dense)
    unlike = [run_one(scheduler, tokens_of(dense, n, seed=i), 1) for i, n in enumerate(lengths)]
    assert scheduler.kept == [*alike[:2], *unlike, alike[2]]
    for run in unlike:
        scheduler.pin(run, is_pinned=True)
    assert scheduler.kept == [*alike, *unlike]
    scheduler.pin(unlike[0], is_pinned=False)
    assert scheduler.kept == [*alike[:2], *unlike, alike[2]]


def test_what_was_begun_with_long_ago_goes_in_its_turn(dense: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamakv.engine.llamacpp.kept.N_SEQ_MAX", 3)
    scheduler = open_sharing(dense)
    alike, unlike = sharing(scheduler, dense), others(scheduler, dense)
    assert scheduler.kept == [*alike[:2], *unlike, alike[2]]
    last = run_one(scheduler, tokens_of(dense, 60, seed=50), 1)
    assert scheduler.kept == [*alike, *unlike, last]
    assert sharing(scheduler, dense, 1)[0].begun.n_others == 1


def test_when_cells_are_short_a_beginning_outlives_what_was_used_later(dense: LlamaModel) -> None:
    scheduler = open_sharing(dense, n_cells_max=512)
    alike, unlike = sharing(scheduler, dense), others(scheduler, dense)
    for run in (*alike, *unlike):
        scheduler.let_go(run)
    run = scheduler.submit(ask(tokens_of(dense, 300, seed=60), 4, keeps=False))
    drive(scheduler, [run])
    assert run.error is None
    assert [scheduler.has_cells(one) for one in (*alike, *unlike)] == [False, False, True, False, False, True]
    check_account(scheduler)
    assert sharing(scheduler, dense, 4)[3].n_reused == N_BEGINNING
