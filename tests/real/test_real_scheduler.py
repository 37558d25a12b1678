"""Real models decoded for many: what is shared with a live run, and what comes back from a store, is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.records import StateSection
from tests.engine.scheduler.cases import Written, check_close, is_same, watching, written
from tests.engine.scheduler.many import check_account, run_one
from tests.real.test_real_serve import NOISE
from tests.real.text import story

pytestmark = pytest.mark.real

N_WRITTEN = 12


def open_many(model: LlamaModel, **memory: object) -> LlamaScheduler:
    return model.open_scheduler(
        MemoryRequest(**memory),  # type: ignore[arg-type]
        n_parallel=4,
        n_kept=8,
        n_ctx_min=4096,
        n_ctx_max=4096,
        n_threads=2,
    )


def ask_one(scheduler: LlamaScheduler, tokens: list[int], n: int, n_vocab: int) -> tuple[int, Written]:
    with watching(n_vocab) as seen:
        run = run_one(scheduler, tokens, n)
        return run.n_reused, written(run, seen)


@pytest.mark.parametrize(
    ("name", "memory"),
    [("smollm2", {}), ("smollm2", {"type_k": "q8_0", "type_v": "q8_0"}), ("gemma", {}), ("gemma", {"swa_full": False})],
    ids=["dense", "dense q8_0", "windowed", "windowed, window only"],
)
def test_shared_and_restored_cells_give_the_same_logits(
    name: str, memory: dict[str, object], request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(f"{name}_path")
    with LlamaModel(path) as model:
        n_vocab = model.info.n_vocab
        text = model.tokenize(story(30), add_special=True, parse_special=False)
        one = [*text, *model.tokenize(" Who painted the gate?", add_special=False, parse_special=False)]
        two = [*text, *model.tokenize(" And where was the storm?", add_special=False, parse_special=False)]

        scheduler = open_many(model, **memory)
        first = run_one(scheduler, one, 4)
        sections: list[StateSection] = list(scheduler.export(first))
        n_live, live = ask_one(scheduler, two, N_WRITTEN, n_vocab)
        n_again, again = ask_one(scheduler, two, N_WRITTEN, n_vocab)
        n_live_whole, whole_live = ask_one(scheduler, [*first.tokens, *two[-4:]], N_WRITTEN, n_vocab)
        check_account(scheduler)
        scheduler.close()

        other = open_many(model, **memory)
        back = other.adopt(first.tokens, lambda n: sections)
        n_restored, restored = ask_one(other, two, N_WRITTEN, n_vocab)
        n_restored_whole, whole_restored = ask_one(other, [*back.tokens, *two[-4:]], N_WRITTEN, n_vocab)
        other.close()

        alone = open_many(model, **memory)
        _, cold = ask_one(alone, two, N_WRITTEN, n_vocab)
        alone.close()
    n_whole = len(first.tokens) - 1
    assert (n_live, n_live_whole) == (n_restored, n_restored_whole)
    assert n_live_whole == n_whole
    assert n_again >= n_live
    if memory.get("swa_full", True):
        assert n_live >= len(text)
        assert is_same(restored, live)
        assert is_same(whole_restored, whole_live)
    else:  # in which cells windows lie depends on what was there before, and in what order is summed on that
        check_close(restored, live, NOISE)
        check_close(whole_restored, whole_live, NOISE)
    check_close(live, cold, NOISE)
    check_close(again, cold, NOISE)
