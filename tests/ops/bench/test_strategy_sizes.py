"""The arithmetic of strategies: what each lays out, what it takes, and for how many there is room."""

from __future__ import annotations

import pytest

from llamakv.engine.llamacpp.model import N_PARALLEL_MAX
from llamakv.engine.memory import CacheKind, CachePart, ContextMemory, DeviceBuffer
from llamakv.errors import UsageError
from llamakv.ops.bench.requests import STRATEGIES, StrategiesRequest
from llamakv.ops.bench.strategy_sizes import (
    N_SEQUENCES_MAX,
    Fit,
    Shape,
    cell_bytes,
    growth_of,
    n_ctx_for,
    shape_of,
    users_that_fit,
)
from llamakv.ops.bench.work import Work, check_request, cut, make_work, n_evaluated

TEXT = range(50)
FIRSTS = (3, 60, 61)


def asked(**more) -> StrategiesRequest:
    values = {"n_users": 3, "n_prefix": 100, "n_question": 10, "n_answer": 5, "shares_prefix": True, **more}
    return StrategiesRequest(**values)


def work(**more) -> Work:
    return make_work(TEXT, FIRSTS, (), asked(**more))


def context(*parts: CachePart, n_ctx: int = 1024, n_seq_max: int = 4, output: int = 400) -> ContextMemory:
    return ContextMemory(
        n_ctx=n_ctx,
        n_seq_max=n_seq_max,
        flash_attn=True,
        parts=parts,
        compute=(DeviceBuffer(device="CPU", n_bytes=5000),),
        output=(DeviceBuffer(device="CPU", n_bytes=output),),
    )


def part(kind: CacheKind, n_cells: int, n_bytes: int) -> CachePart:
    half = n_bytes // 2
    return CachePart(
        kind=kind, layers=(0,), n_cells=n_cells, type_k="f16", type_v="f16", k_bytes=half, v_bytes=n_bytes - half
    )


DENSE = context(part(CacheKind.FULL, 1024, 1024 * 100))
HYBRID = context(part(CacheKind.FULL, 1024, 1024 * 100), part(CacheKind.RECURRENT, 4, 4 * 700))

# ---------------------------------------------------------------- work


def test_shared_prefixes_are_one_and_questions_differ_from_their_first_token_on() -> None:
    found = work()
    assert len({user.prefix for user in found.users}) == 1
    assert len({user.question[0] for user in found.users}) == 3
    assert [(len(user.prefix), len(user.question)) for user in found.users] == [(100, 10)] * 3


def test_prefixes_of_their_own_differ_from_the_first_token_on() -> None:
    users = work(shares_prefix=False).users
    assert len({user.prefix[0] for user in users}) == 3
    assert {len(user.prefix) for user in users} == {100}


def test_the_token_before_every_text_is_counted_in() -> None:
    users = make_work(TEXT, FIRSTS, (99,), asked(shares_prefix=False)).users
    assert [user.prefix[0] for user in users] == [99] * 3
    assert len({user.prefix[1] for user in users}) == 3
    assert {len(user.prefix) for user in users} == {100}
    assert make_work(TEXT, FIRSTS, (99,), asked(n_prefix=1)).users[0].prefix == (99,)
    with pytest.raises(UsageError, match="prefixes of 1 tokens cannot differ"):
        make_work(TEXT, FIRSTS, (99,), asked(n_prefix=1, shares_prefix=False))


def test_a_text_that_is_too_short_is_gone_through_again() -> None:
    assert cut((7, 8, 9), 1, 5) == (8, 9, 7, 8, 9)


def test_more_users_than_the_model_has_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="4 users need as many different tokens, the model has 3"):
        work(n_users=4)


@pytest.mark.parametrize("name", ["n_users", "n_prefix", "n_question", "n_answer"])
def test_there_is_no_work_without_users_or_tokens(name: str) -> None:
    with pytest.raises(UsageError, match="must be at least 1, not 0"):
        check_request(asked(**{name: 0}))


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(UsageError, match="no strategy 'best'"):
        check_request(asked(names=("none", "best")))


def test_a_saved_prefix_has_a_cell_for_each_of_its_tokens() -> None:
    found = work()
    assert found.session_tokens(found.users[2]) == (*found.users[2].prefix, found.users[0].question[0])


@pytest.mark.parametrize(
    ("name", "shares", "n"),
    [
        ("none", True, 3 * 110 + 12),
        ("in-process", True, 100 + 30 + 12),
        ("in-process", False, 3 * 110 + 12),
        ("cross-process", True, 30 + 12),
        ("hybrid", False, 30 + 12),
    ],
)
def test_what_a_strategy_evaluates(name: str, shares: bool, n: int) -> None:
    assert n_evaluated(name, work(shares_prefix=shares)) == n


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("name", "shares", "processes", "contexts", "cells", "n_ctx"),
    [
        ("none", True, 1, 1, 3 * 114, 512),
        ("in-process", True, 1, 1, 100 + 3 * 14, 256),
        ("cross-process", True, 3, 3, 3 * 114, 256),
        ("hybrid", True, 1, 1, 100 + 3 * 14, 256),
        ("none", False, 1, 1, 3 * 114, 512),
        ("in-process", False, 1, 1, 3 * 114, 512),
        ("cross-process", False, 3, 3, 3 * 114, 256),
        ("hybrid", False, 1, 3, 3 * 114, 256),
    ],
)
def test_how_a_strategy_lays_users_out(
    name: str, shares: bool, processes: int, contexts: int, cells: int, n_ctx: int
) -> None:
    shape = shape_of(name, work(shares_prefix=shares))
    assert (shape.n_processes, shape.n_contexts, shape.n_cells, shape.n_ctx) == (processes, contexts, cells, n_ctx)


def test_every_strategy_has_a_shape() -> None:
    assert {shape_of(name, work()).n_users for name in STRATEGIES} == {3}


@pytest.mark.parametrize(("n_cells", "n_ctx"), [(1, 256), (255, 256), (256, 512), (511, 512), (512, 768)])
def test_a_context_has_room_for_the_last_token_too(n_cells: int, n_ctx: int) -> None:
    assert n_ctx_for(n_cells) == n_ctx


# ---------------------------------------------------------------- sizes


def test_a_context_grows_by_cells_and_by_sequences() -> None:
    growth = growth_of(HYBRID)
    assert (growth.per_cell, growth.per_sequence) == (100.0, 700.0 + 100.0)
    assert growth.bytes_for(10, 2) == 1000 + 1600


def test_a_window_that_keeps_only_itself_goes_with_the_sequences() -> None:
    memory = context(part(CacheKind.FULL, 1024, 102400), part(CacheKind.WINDOWED, 512, 4000))
    assert (growth_of(memory).per_cell, growth_of(memory).per_sequence) == (100.0, 1000.0 + 100.0)
    both = context(part(CacheKind.FULL, 1024, 102400), part(CacheKind.WINDOWED, 1024, 102400))
    assert growth_of(both).per_cell == 200.0


def test_what_cells_take_is_their_part_of_the_context() -> None:
    assert cell_bytes(DENSE, 142, 3) == 14200
    assert cell_bytes(HYBRID, 142, 3) == 14200 + 3 * 700
    assert cell_bytes(context(part(CacheKind.WINDOWED, 512, 5120)), 600, 3) == 5120


def test_one_process_holds_as_many_as_its_cells_fit() -> None:
    shape = Shape(per_user="cells", n_users=3, n_shared=100, n_own=14)
    peak = 1_000_000 + 102400 + 300  # a process, 1,024 cells, and the outputs of three
    room = (
        1_000_000 + 512 * 100
    )  # for 512 cells: 100 shared, the last one spare, 29 users with 14 each, and their outputs

    def fit(limit_bytes: int) -> Fit:
        return users_that_fit(shape, limit_bytes=limit_bytes, peak_bytes=peak, private_bytes=0, memory=DENSE)

    assert fit(room + 29 * 100) == Fit(n_users=29, limited_by="memory")
    assert fit(room + 29 * 100 - 1) == Fit(n_users=28, limited_by="memory")
    assert fit(999_999) == Fit(n_users=0, limited_by="memory")
    assert fit(10**12) == Fit(n_users=254, limited_by="sequences")


def test_a_context_has_as_many_sequences_as_the_engine_gives() -> None:
    assert N_SEQUENCES_MAX == N_PARALLEL_MAX


def test_of_processes_what_each_has_of_its_own_counts_again() -> None:
    shape = Shape(per_user="process", n_users=4, n_shared=0, n_own=100)

    def fit(limit_bytes: int) -> Fit:
        return users_that_fit(shape, limit_bytes=limit_bytes, peak_bytes=900, private_bytes=100, memory=DENSE)

    assert fit(900) == Fit(n_users=4, limited_by="memory")
    assert fit(500 + 7 * 100 + 99) == Fit(n_users=7, limited_by="memory")
    assert fit(400) == Fit(n_users=0, limited_by="memory")
    assert fit(500 + 300 * 100).n_users == 300


def test_contexts_in_one_process_count_whole() -> None:
    shape = Shape(per_user="context", n_users=2, n_shared=0, n_own=100)
    each = DENSE.n_bytes
    assert each == 102400 + 5000 + 400
    found = users_that_fit(
        shape, limit_bytes=50_000 + 5 * each, peak_bytes=50_000 + 2 * each, private_bytes=0, memory=DENSE
    )
    assert found == Fit(n_users=5, limited_by="memory")
