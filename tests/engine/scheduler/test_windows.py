"""Windowed layers lose cells out of a sequence's window, from the middle too; nobody may begin with such a gap."""

from __future__ import annotations

import random

import pytest

from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.run import LlamaRun
from tests.engine.scheduler.cases import watching
from tests.engine.scheduler.many import ask, check_answers, open_many
from tests.engine.test_sequence import tokens_of

pytestmark = pytest.mark.slow


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
