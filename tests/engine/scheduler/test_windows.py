"""Windowed layers keep all that a sequence has: whoever comes and goes, it is right and can be cut at any place."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.run import LlamaRun
from tests.engine.scheduler.cases import drive, watching
from tests.engine.scheduler.many import ask, check_account, check_answers, open_many, run_one
from tests.engine.test_sequence import open_sequence, tokens_of


@pytest.mark.parametrize("seed", range(4))
def test_what_is_saved_among_others_that_come_and_go_can_be_cut_anywhere(models, seed: int) -> None:
    """Also where several go at once, share what they have, are brought back, and the context grows."""
    rng = random.Random(seed)
    with LlamaModel(models("MS")) as model:
        scheduler = open_many(model, 6, n_kept=10, n_cells_max=2048)
        native = scheduler._shared
        texts = [tokens_of(model, 120, seed=i) for i in range(3)]
        live: list[LlamaRun] = []
        done: list[LlamaRun] = []
        with watching() as seen:
            for _ in range(150):
                if len(live) < 6 and rng.random() < 0.5:
                    n = rng.randrange(1, 120)
                    tokens = [*rng.choice(texts)[:n], *tokens_of(model, rng.randrange(1, 90), seed=rng.randrange(9))]
                    live.append(scheduler.submit(ask(tokens, rng.randrange(1, 60))))
                over = scheduler.step()
                live = [run for run in live if run not in over]
                done += over
                for run in rng.sample(done, min(rng.choice((0, 0, 0, 3)), len(done))):
                    scheduler.release(run)
                for cells in native._live:
                    assert cells.n_cells == 0 or native.native.position_range(cells.seq_id)[0] == 0
                check_account(scheduler)
            drive(scheduler, live)
        kept = [run for run in done if scheduler.has_cells(run) and run.cells.n_cells > 64]
        assert kept
        for run in kept:
            sections = list(scheduler.export(run))
            full = [len(section.data) for section in sections[:-1]]
            assert full == [max(full)] * len(full)
            n = rng.randrange(33, run.cells.n_cells)
            cut = [replace(s, p_used=min(s.p_used, n)) for s in sections if s.p0 < n]
            open_sequence(model).restore(list(run.tokens[: n + 1]), cut)
        check_answers(model, rng.sample(done, 3), seen)


def test_sequences_that_go_together_leave_others_what_they_have(models) -> None:
    """The second goes before anything was decoded since the first one went."""
    with LlamaModel(models("MS")) as model:
        scheduler = open_many(model, 4, n_cells_max=512)
        scheduler._n_read_max = 256
        runs = [run_one(scheduler, tokens_of(model, n, seed=n), 1) for n in (70, 100, 90)]
        scheduler.release(runs[0])
        scheduler.release(runs[1])
        check_account(scheduler)
        run_one(scheduler, tokens_of(model, 250, seed=1), 1)
        assert scheduler._shared.native.position_range(runs[2].cells.seq_id) == (0, 89)
        check_account(scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 12])
def test_answers_are_right_where_copies_of_the_same_answer_are_released(models, seed: int) -> None:
    rng = random.Random(seed)
    with LlamaModel(models("MS")) as model:
        scheduler = open_many(model, 16, n_kept=230, n_ctx=512, n_ctx_max=8192, n_cells_max=100_000)
        common = tokens_of(model, 150, seed=1)
        prompts = []
        for _ in range(40):
            start = common if rng.random() < 0.7 else [*common[:11], *tokens_of(model, 70, seed=rng.randrange(2, 4))]
            middle = tokens_of(model, rng.randrange(4, 12), seed=50 + rng.randrange(6))
            end = tokens_of(model, 3, seed=9) * rng.randrange(1, 30)
            prompts.append(([*start, *middle, *end], rng.choice([1, 4, 16, 40]), rng.choice([1, 1, 1, 3])))
        order = list(range(40)) * 3
        rng.shuffle(order)
        live: list[LlamaRun] = []
        done: list[LlamaRun] = []
        kept: dict[tuple[int, ...], LlamaRun] = {}
        with watching() as seen:
            while order or live:
                while order and len(live) < 16:
                    tokens, n, n_copies = prompts[order.pop()]
                    live += [scheduler.submit(ask(tokens, n)) for _ in range(n_copies)]
                for run in scheduler.step():
                    live.remove(run)
                    done.append(run)
                    known = kept.get(tuple(run.tokens))
                    if known is not None and scheduler.has_cells(known):
                        scheduler.release(run)
                    else:
                        kept[tuple(run.tokens)] = run
        check_answers(model, done, seen)
        assert any(run.n_reused > 100 for run in done)
