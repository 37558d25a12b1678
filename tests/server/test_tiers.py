"""Between memory and the store: what is written, dropped and brought back, and what a crash leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llamakv.errors import NoRoomError, UsageError, WriteError
from llamakv.ops.checking import verify_store
from llamakv.ops.prefixes import N_WORTH
from llamakv.server.service import LlamaService
from llamakv.server.sizes import Room, choose_room, n_cells_first, n_to_pin
from llamakv.store.session_file import read_session
from tests.server.service_driver import AT_ONCE_S, LONG, Heard, answer_to, chat, open_for
from tests.server.test_service import run, until


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def system(n: int) -> str:
    return f"{n} {LONG}"


@pytest.mark.parametrize("name", ["M", "MS", "MR", "MH"])
def test_a_conversation_that_was_dropped_comes_back_as_it_was(
    models: Callable[[str], Path], name: str, store: Path
) -> None:
    texts: list[str] = []

    async def roomy(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there", system=system(0)))
        texts.extend(
            [one.text, (await answer_to(service, chat("hello there", one.text, "and then?", system=system(0)))).text]
        )

    async def tight(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there", system=system(0)))
        assert one.text == texts[0]
        for n in range(1, 4):
            await answer_to(service, chat("hello there", system=system(n)))
        await until(lambda: service.counts.n_dropped > 0)
        assert service.counts.n_cells <= 800
        two = await answer_to(service, chat("hello there", one.text, "and then?", system=system(0)))
        assert (two.text, two.usage.source) == (texts[1], "store")
        assert two.usage.n_cached == one.usage.n_prompt + one.usage.n_generated - 1
        assert len(await service.sessions("")) == 4

    with open_for(models(name), None) as service:
        run(service, roomy)
    with open_for(models(name), store, n_cells=800) as service:
        run(service, tight)


def test_idle_conversations_are_saved_and_only_what_is_new(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there", session="notes"))
        await until(lambda: service.counts.n_saves == 1)
        n_before = n_bytes(store)
        await answer_to(service, chat("hello there", one.text, "and then?", session="notes"))
        await until(lambda: service.counts.n_saves == 2)
        assert n_bytes(store) - n_before < n_before / 4
        assert service.counts.n_live == 1

    with open_for(model_path, store, save_delay_s=AT_ONCE_S) as service:
        run(service, act)


def test_a_clock_that_is_set_back_keeps_nothing_from_being_saved(
    model_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamakv.server.saver._IDLE_S", 0.01)
    real = time.time

    async def act(service: LlamaService) -> None:
        await answer_to(service, chat("hello there"))
        monkeypatch.setattr(time, "time", lambda: real() - 60.0)
        await until(lambda: service.counts.n_saves == 1)

    with open_for(model_path, store) as service:
        run(service, act)


def test_a_prefix_of_many_is_written_once(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        await asyncio.gather(*(answer_to(service, chat(f"question {n}", session=f"s{n}")) for n in range(4)))

    with open_for(model_path, store) as service:
        run(service, act)
    first = [read_session(store / f"s{n}.bin").sections[0].digest for n in range(4)]
    assert len(set(first)) == 1


def test_no_section_is_shared_for_the_sake_of_a_few_of_its_cells(model_path: Path, store: Path) -> None:
    """Each has a few cells more in common with the one before than the beginning of all."""

    async def act(service: LlamaService) -> None:
        for n in range(1, 5):
            await answer_to(service, chat("go on " * n + f"to the station number {n}", session=f"s{n}"))
            await service.save(f"s{n}", None, "")

    with open_for(model_path, store) as service:
        run(service, act)
    sections = [section for n in range(1, 5) for section in read_session(store / f"s{n}.bin").sections]
    assert len({section.digest for section in sections}) < len(sections)  # some are shared
    assert min(section.p_used - section.p0 for section in sections if section.p_used < section.p1) >= N_WORTH


def test_a_quick_next_turn_is_saved_once(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there"))
        await answer_to(service, chat("hello there", one.text, "and then?"))
        assert service.counts.n_saves == 0
        await service.stop(1.0)
        assert service.counts.n_saves == 1

    with open_for(model_path, store) as service:
        run(service, act)
    assert len(list(store.glob("*.bin"))) == 1


def test_many_that_want_the_same_from_the_store_wait_for_one_load(model_path: Path, store: Path) -> None:
    async def before(service: LlamaService) -> None:
        await answer_to(service, chat("hello there"))

    async def after(service: LlamaService) -> None:
        answers = await asyncio.gather(*(answer_to(service, chat(f"question {n}")) for n in range(6)))
        assert {one.usage.source for one in answers} <= {"store", "memory"}
        assert "store" in {one.usage.source for one in answers}
        assert service.counts.n_evaluated < 6 * 40
        assert all(one.usage.n_cached > 250 for one in answers)

    with open_for(model_path, store) as service:
        run(service, before)
    with open_for(model_path, store) as service:
        run(service, after)


def test_what_was_brought_back_stays_until_who_wants_it_has_begun(model_path: Path, store: Path) -> None:
    """Each wants a conversation of its own from the store, and all others are in the way."""
    n_talks = 6

    async def before(service: LlamaService) -> None:
        for n in range(n_talks):
            await answer_to(service, chat("hello there", system=system(n)))

    async def after(service: LlamaService) -> None:
        in_the_way = [answer_to(service, chat(f"question {n}", system=None)) for n in range(20)]
        wanted = [answer_to(service, chat("hello there", system=system(n), user=str(n))) for n in range(n_talks)]
        mixed = [one for both in zip(in_the_way, wanted, strict=False) for one in both] + in_the_way[n_talks:]
        answers = await asyncio.gather(*mixed)
        back = answers[1 : 2 * n_talks : 2]
        assert [one.usage.source for one in back] == ["store"] * n_talks
        assert [one.usage.n_prompt - one.usage.n_cached for one in back] == [1] * n_talks

    with open_for(model_path, store) as service:
        run(service, before)
    with open_for(model_path, store, n_sequences=6, n_cells=2048) as service:
        run(service, after)


def test_without_a_store_conversations_go_when_cells_are_short(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        for n in range(5):
            assert (await answer_to(service, chat("hello there", system=system(n)))).finish == "length"
        await until(lambda: service.counts.n_dropped > 0)
        assert service.counts.n_saves == 0
        assert len(await service.sessions("")) < 5

    with open_for(model_path, None, n_cells=800) as service:
        run(service, act)


def test_when_all_is_pinned_a_request_is_refused_and_nothing_hangs(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        await answer_to(service, chat("hello there", session="notes", system=system(0)))
        await service.pin("notes", "", pinned=True)
        with pytest.raises(NoRoomError):
            await answer_to(service, chat("hello there", system=system(1)))
        await service.pin("notes", "", pinned=False)
        assert (await answer_to(service, chat("hello there", system=system(1)))).finish == "length"

    with open_for(model_path, store, n_cells=400, prefix_share=1.0) as service:
        run(service, act)


# ---------------------------------------------------------------- what goes wrong


def test_a_failed_save_is_counted_told_once_and_harms_no_answer(
    model_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()

    def full(*_: object, **__: object) -> None:
        raise WriteError("cannot write: no space left on device")

    async def act(service: LlamaService) -> None:
        with monkeypatch.context() as broken:
            broken.setattr("llamakv.ops.keeping.create_session", full)
            for n in range(4):
                await answer_to(service, chat("hello there", system=system(n)))
            await until(lambda: service.counts.n_dropped > 0)
            with pytest.raises(WriteError):
                await service.save((await service.sessions(""))[0].name, None, "")
        assert service.counts.n_save_failures >= 2
        assert service.counts.n_saves == 0
        left = await service.sessions("")
        await service.stop(1.0)
        assert service.counts.n_saves == len(left)

    with open_for(model_path, store, heard, n_cells=800, save_delay_s=AT_ONCE_S) as service:
        run(service, act)
    assert len(heard.warnings) == 2
    assert "no space left on device" in heard.warnings[0]


@pytest.mark.parametrize("place", ["store", "store/below/it"])
def test_a_store_that_cannot_be_written_is_told_at_the_start(
    model_path: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    (tmp_path / "store").mkdir()
    checked: list[Path] = []

    def refuse(folder: Path) -> None:
        checked.append(folder)
        raise WriteError(f"cannot write '{folder}': read-only file system")

    monkeypatch.setattr("llamakv.server.service.check_folder", refuse)
    with open_for(model_path, tmp_path / place, heard):
        assert checked == [tmp_path / "store"]
        assert heard.warnings == [
            f"cannot write '{tmp_path / 'store'}': read-only file system: conversations stay in memory while there is "
            "room, and are lost after that or at the end"
        ]
    assert list((tmp_path / "store").iterdir()) == []


def test_a_store_that_can_be_written_or_made_is_no_matter(model_path: Path, tmp_path: Path) -> None:
    heard = Heard()
    with open_for(model_path, tmp_path / "new" / "store", heard):
        assert heard.warnings == []
    assert list(tmp_path.glob("new*")) == []


def test_a_damaged_section_is_read_again_and_written_again(model_path: Path, store: Path) -> None:
    """Two conversations have it in common: it is told once, and after a restart it comes from the store."""
    heard, sources = Heard(), []

    async def ask_both(service: LlamaService) -> None:
        for n in range(2):
            one = await answer_to(service, chat(f"hello there {n}", session=f"notes-{n}"))
            sources.append(one.usage.source)
        await until(lambda: all(one.is_saved for one in service._conversations.live()))

    for number in range(3):
        with open_for(model_path, store, heard, save_delay_s=AT_ONCE_S) as service:
            run(service, ask_both)
        if number == 0:
            _spoil(max((store / ".objects").rglob("*"), key=lambda path: path.stat().st_size))
    assert sources == ["none", "memory", "none", "memory", "store", "memory"]
    (warning,) = heard.warnings
    assert warning.startswith("notes-")
    assert "could not be brought back and is read again: " in warning
    assert verify_store(store, heard.reporter).n_wrong == 0


def _spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


WORKER = """
import asyncio, sys
from pathlib import Path
from llamakv.cli.config import prepare_engine
prepare_engine()
from tests.server.service_driver import *

async def act(service):
    for n in range(1000):
        one = await answer_to(service, chat("hello there", system=f"{n} {LONG}", session=f"s{n}"))
        print(n, one.text.encode().hex(), service.counts.n_saves, flush=True)

with open_for(Path(sys.argv[1]), Path(sys.argv[2]), save_delay_s=0.0, n_cells=2048) as service:
    asyncio.run(act(service))
"""


def test_after_a_kill_what_was_saved_is_there_and_the_store_is_sound(model_path: Path, store: Path) -> None:
    root = Path(__file__).parents[2]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(model_path), str(store)],
        stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    texts: dict[int, str] = {}
    n_saves, heard = 0, Heard()
    assert worker.stdout is not None
    try:
        for line in worker.stdout:
            number, text, saves = line.split(" ")
            texts[int(number)], n_saves = bytes.fromhex(text).decode(), int(saves)
            if n_saves >= 3 or len(texts) == 400:
                break
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
    saved = sorted(path.stem for path in store.glob("*.bin"))
    assert len(saved) >= n_saves >= 3
    assert verify_store(store, heard.reporter).n_wrong == 0

    async def after(service: LlamaService) -> None:
        assert sorted(line.name for line in await service.sessions("")) == saved
        number = int(saved[0][1:])
        two = await answer_to(service, chat("hello there", texts[number], "and then?", system=system(number)))
        assert two.usage.source == "store"
        assert two.usage.n_prompt - two.usage.n_cached < 40

    with open_for(model_path, store) as service:
        run(service, after)


# ---------------------------------------------------------------- how much there is


def room(**more: object) -> Room:
    known: dict[str, object] = {
        "n_ctx_max": 8192, "n_cells": None, "n_sequences": None, "bytes_per_cell": 0, "bytes_per_sequence": 0,
        "free_bytes": 1 << 30,
    }  # fmt: skip
    return choose_room(**{**known, **more})  # type: ignore[arg-type]


def test_room_is_what_the_owner_allows() -> None:
    few = room(n_cells=4096, n_sequences=10)
    assert few == Room(n_cells_max=4096, n_ctx_max=4096, n_parallel=5, n_kept=5, n_pinned=5)
    assert room(n_cells=100_000).n_sequences == 254
    assert room(n_sequences=1) == Room(n_cells_max=16384, n_ctx_max=8192, n_parallel=1, n_kept=1, n_pinned=1)
    assert room(n_sequences=1000).n_sequences == 254
    assert room().n_parallel == 16
    with pytest.raises(UsageError):
        room(n_cells=1)


def test_a_conversation_may_have_what_memory_holds_and_all_together_what_the_owner_allows() -> None:
    one = room(bytes_per_cell=1 << 16, n_ctx_max=1 << 17)
    free = (1 << 30) - (one.n_ctx_max // 2 << 16)
    assert one.n_ctx_max << 16 <= 0.9 * free
    assert 1.05 * (one.n_ctx_max << 16) > 0.9 * free
    assert one.n_cells_max == 254 << 17
    assert room(bytes_per_cell=1 << 16, n_cells=20_000).n_cells_max == 20_000
    assert room(bytes_per_cell=1 << 30).n_ctx_max == 512


def test_a_server_opens_with_a_few_thousand_cells_where_they_take_little() -> None:
    one = room()
    assert n_cells_first(one, bytes_per_cell=0, free_bytes=1) == 4096
    assert n_cells_first(one, bytes_per_cell=1 << 13, free_bytes=1 << 30) == 4096
    assert n_cells_first(one, bytes_per_cell=1 << 15, free_bytes=1 << 30) == 1638
    assert n_cells_first(one, bytes_per_cell=1 << 30, free_bytes=1 << 30) == 1
    assert n_cells_first(room(n_cells=1000), bytes_per_cell=1, free_bytes=1 << 30) == 1000
    assert n_cells_first(room(n_ctx_max=2048), bytes_per_cell=1, free_bytes=1 << 30) == 2048


def test_recurrent_states_limit_how_many_answer_at_once_and_how_many_may_be_pinned() -> None:
    def sizes(**more: object) -> tuple[int, int, int]:
        one = room(**more)
        return one.n_parallel, one.n_pinned, one.n_sequences

    assert sizes(bytes_per_sequence=1 << 25) == (4, 4, 254)
    assert sizes(bytes_per_sequence=1 << 23) == (16, 16, 254)
    assert sizes(bytes_per_sequence=1 << 30) == (1, 1, 254)
    assert sizes(bytes_per_sequence=1 << 23, n_sequences=100) == (16, 84, 100)


def test_a_share_of_the_room_may_be_pinned() -> None:
    assert n_to_pin(1000, 0.5) == 500
    assert n_to_pin(1000, 0.0) == 0


def n_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / ".objects").rglob("*") if path.is_file())


def test_an_idle_server_gives_back_cells_that_it_does_not_need(model_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("llamakv.server.engine_thread._IDLE_S", AT_ONCE_S)
    monkeypatch.setattr("llamakv.engine.llamacpp.admission._REVIEW_S", 0.0)

    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there"))
        for _ in range(2):  # as more conversations would have done
            service._engine.call(service._scheduler.root._shared.enlarge).result()
        await until(lambda: service.counts.n_ctx == 16384)
        monkeypatch.setattr("llamakv.engine.llamacpp.admission._IDLE_S", 0.0)
        await until(lambda: service.counts.n_ctx == 4096)
        two = await answer_to(service, chat("hello there", one.text, "and then?"))
        assert two.usage.n_cached == one.usage.n_prompt + one.usage.n_generated - 1

    with open_for(model_path, None, n_cells=1 << 16) as service:
        assert service.counts.n_ctx == 4096
        run(service, act)
