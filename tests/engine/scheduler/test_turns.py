"""Whose turn it is: of runs in a call, and of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.turns import TurnLock
from tests.engine.scheduler.cases import check_close, cold, watching, written
from tests.engine.scheduler.many import ask, open_many, run_one
from tests.engine.test_sequence import tokens_of


@pytest.fixture(scope="module", params=["MR", "MH", "MH2"])
def recurrent(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    with LlamaModel(models(request.param)) as model:
        yield model


def test_a_long_prompt_keeps_neither_short_ones_nor_streams_waiting(dense: LlamaModel) -> None:
    scheduler = open_many(dense, 8)
    streams = [scheduler.submit(ask(tokens_of(dense, 20, seed=i), 400)) for i in range(2)]
    while not all(run.n_generated for run in streams):
        scheduler.step()
    long = scheduler.submit(ask(tokens_of(dense, 3000, seed=10), 4))
    scheduler.step()
    short = [scheduler.submit(ask(tokens_of(dense, 30, seed=20 + i), 4)) for i in range(3)]
    n_steps = 0
    while not all(run.is_over for run in (long, *short)):
        n_before, n_read = [run.n_generated for run in streams], long.n_evaluated
        scheduler.step()
        n_steps += 1
        assert [run.n_generated for run in streams] == [n + 1 for n in n_before]
        assert long.n_unread == 0 or long.n_evaluated - n_read >= 31  # half of what a call reads
        if n_steps == 4:  # 31 tokens of the short ones in each: 90 tokens and their first ones
            assert all(run.n_generated for run in short)
    assert long.n_evaluated == 3000
    assert n_steps < 3000 // 31


def test_a_recurrent_model_reads_a_little_at_a_time_where_others_write(recurrent: LlamaModel) -> None:
    scheduler = open_many(recurrent, 2)
    stream = scheduler.submit(ask(tokens_of(recurrent, 5), 60))
    while not stream.n_generated:
        scheduler.step()
    long = scheduler.submit(ask(tokens_of(recurrent, 600, seed=1), 1))
    with watching() as seen:
        while not long.is_over:
            n_read, n_generated = long.n_evaluated, stream.n_generated
            scheduler.step()
            scheduler.step()
            assert long.n_evaluated - n_read <= 64
            assert stream.n_generated == n_generated + 1
    check_close(written(long, seen), cold(recurrent, tokens_of(recurrent, 600, seed=1), n=1))


def test_threads_get_their_turn_in_the_order_they_came() -> None:
    lock, order = TurnLock(), []
    started = [threading.Event() for _ in range(4)]

    def take(i: int) -> None:
        started[i].set()
        with lock, lock:
            order.append(i)

    threads = [threading.Thread(target=take, args=(i,)) for i in range(4)]
    with lock:
        assert lock.acquire(blocking=False)
        lock.release()
        for i, thread in enumerate(threads):
            thread.start()
            while len(lock._waiting) <= i:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]
    assert lock._owner is None


def test_counts_do_not_wait_for_the_call_under_way(dense: LlamaModel) -> None:
    scheduler = open_many(dense)
    run_one(scheduler, tokens_of(dense, 50), 1)
    before, seen = scheduler.counts, []
    with scheduler.lock:
        scheduler._n_steps += 1  # not told before the call is over
        other = threading.Thread(target=lambda: seen.append(scheduler.counts))
        other.start()
        other.join()
    assert seen == [before]
    assert scheduler.counts.n_steps == before.n_steps + 1
