"""What a save is estimated to come to is what it comes to, and estimating leaves nothing behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llamakv.engine.llamacpp.unloaded import UnloadedModel
from llamakv.errors import EngineError, ExistsError, ModelFileError, NoRoomError, UsageError, WriteError
from llamakv.ops import estimate as estimate_module
from llamakv.ops.budget import Budget, set_budget
from llamakv.ops.estimate import SaveEstimate, estimate_save
from llamakv.ops.requests import MemoryOptions, Reporter, ResumeOptions, SaveRequest
from llamakv.ops.sessions import resolve_for_writing
from tests.ops.driver import GREEDY, Driver

KINDS = ["M", "MS", "MR", "MH", "MH2", "ML", "MG"]
TEXT = "The quick brown fox jumps over the lazy dog. " * 20
LONGER = TEXT + "And then it slept under the old tree. " * 30


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest, models: Callable[[str], Path], tmp_path: Path) -> Driver:
    return Driver(models(request.param), tmp_path)


@pytest.fixture
def dense(models: Callable[[str], Path], tmp_path: Path) -> Driver:
    return Driver(models("M"), tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def estimate(
    driver: Driver, path: Path, text: str | None, *, store: Path | None = None, **more: object
) -> SaveEstimate:
    more.setdefault("memory", driver.memory)
    request = SaveRequest(model=driver.request(), path=path, text=text, sampling=GREEDY, **more)  # type: ignore[arg-type]
    return estimate_save(request, Reporter(), store=store)


def check_as_saved(driver: Driver, path: Path, text: str, **more: object) -> SaveEstimate:
    """Estimate, save, and compare: all that can be told exactly, and the bytes that are at most."""
    told = estimate(driver, path, text, **more)
    saved = driver.save(path, text, **more)
    info = saved.saved.info
    assert (told.n_tokens, told.reused, told.evaluated) == (
        len(info.record.tokens), saved.reused, saved.evaluated
    )  # fmt: skip
    assert (told.raw_bytes, told.n_sections) == (info.n_raw_bytes, len(info.sections))
    assert told.index_bytes == pytest.approx(info.n_index_bytes, rel=0.05)
    if told.measured is None:
        assert told.stored_bytes is not None
        assert told.stored_bytes >= info.n_stored_bytes
    return told


class TestAsSaved:
    def test_tokens_and_state_of_a_new_session(self, driver: Driver, tmp_path: Path) -> None:
        told = check_as_saved(driver, tmp_path / "a.bin", TEXT, system="Be brief.")
        assert told.new_raw_bytes == told.raw_bytes
        assert told.measured is None

    @pytest.mark.parametrize("driver", KINDS[:4], indirect=True)
    def test_what_a_session_in_the_store_would_give(self, driver: Driver, root: Path) -> None:
        driver.save(resolve_for_writing(root, "first"), TEXT, name="first")
        told = check_as_saved(driver, resolve_for_writing(root, "b"), LONGER, name="b", reuse_from=root)
        assert told.reused > 100
        assert told.reused_from == root / "first.bin"
        assert told.new_raw_bytes is not None
        assert told.raw_bytes is not None
        assert told.new_raw_bytes < told.raw_bytes

    @pytest.mark.parametrize("driver", KINDS[:4], indirect=True)
    def test_what_is_added_to_the_session_that_is_there(self, driver: Driver, tmp_path: Path) -> None:
        driver.save(tmp_path / "a.bin", TEXT)
        told = check_as_saved(driver, tmp_path / "a.bin", LONGER)
        assert told.reused > 100

    @pytest.mark.parametrize(
        ("name", "memory"),
        [
            ("MS", MemoryOptions(swa="window")),
            ("MG", MemoryOptions(swa="window")),
            ("M", MemoryOptions(flash_attn="off")),
            ("M", MemoryOptions(type_k="q8_0", type_v="q4_0")),
            ("MH", MemoryOptions(type_k="q8_0", type_v="q8_0", flash_attn="on")),
            ("ML", MemoryOptions(flash_attn="off")),
        ],
    )
    def test_other_memory_settings(
        self, models: Callable[[str], Path], tmp_path: Path, name: str, memory: MemoryOptions
    ) -> None:
        check_as_saved(Driver(models(name), tmp_path, memory=memory), tmp_path / "a.bin", TEXT)

    @pytest.mark.parametrize("text", ["a", "The", "The quick"])
    def test_texts_of_a_token_or_two(self, dense: Driver, tmp_path: Path, text: str) -> None:
        check_as_saved(dense, tmp_path / "a.bin", text, raw=True)

    @pytest.mark.parametrize("n_words", [260, 420])
    def test_a_section_of_which_little_is_wanted_is_written_again(
        self, dense: Driver, root: Path, n_words: int
    ) -> None:
        words = ("the river is a story about the house " * 100).split(" ")
        dense.save(resolve_for_writing(root, "first"), " ".join(words), name="first", raw=True)
        text = " ".join(words[:n_words]) + " but not here any more." * 20
        told = check_as_saved(dense, resolve_for_writing(root, "b"), text, name="b", reuse_from=root, raw=True)
        assert told.reused >= n_words

    def test_other_settings_than_the_stores_reuse_nothing(self, dense: Driver, root: Path) -> None:
        dense.save(resolve_for_writing(root, "first"), TEXT, name="first")
        other = MemoryOptions(type_k="q8_0", type_v="q8_0")
        told = check_as_saved(dense, resolve_for_writing(root, "b"), LONGER, name="b", reuse_from=root, memory=other)
        assert (told.reused, told.reused_from) == (0, None)

    def test_a_session_that_is_read_again_gives_nothing(self, dense: Driver, tmp_path: Path) -> None:
        dense.save(tmp_path / "a.bin", TEXT)
        told = estimate(dense, tmp_path / "a.bin", LONGER, options=ResumeOptions(recompute=True))
        assert (told.reused, told.new_raw_bytes) == (0, told.raw_bytes)


class TestOnDisk:
    def test_the_sessions_of_the_store_say_how_far_it_compresses(self, dense: Driver, root: Path) -> None:
        saved = [
            dense.save(resolve_for_writing(root, name), text, name=name).saved.info
            for name, text in (("one", TEXT), ("two", "Something else is said here. " * 40))
        ]
        told = estimate(dense, root / "c.bin", LONGER, name="c", store=root)
        assert told.measured is not None
        assert told.measured.n_sessions == 2
        assert told.measured.raw_over_stored == pytest.approx(
            sum(info.n_raw_bytes for info in saved) / sum(info.n_stored_bytes for info in saved)
        )
        assert told.stored_bytes is not None
        assert told.raw_bytes is not None
        assert told.stored_bytes == pytest.approx(told.raw_bytes / told.measured.raw_over_stored, rel=0.001)
        real = dense.save(resolve_for_writing(root, "c"), LONGER, name="c").saved.info
        assert told.stored_bytes == pytest.approx(real.n_stored_bytes, rel=0.1)

    def test_sessions_with_other_settings_say_nothing(self, dense: Driver, root: Path) -> None:
        dense.save(resolve_for_writing(root, "one"), TEXT, name="one", memory=MemoryOptions(type_k="q8_0"))
        assert estimate(dense, root / "c.bin", LONGER, store=root).measured is None

    def test_uncompressed_state_is_not_told_by_compressed_one(self, dense: Driver, root: Path) -> None:
        dense.save(resolve_for_writing(root, "one"), TEXT, name="one")
        told = estimate(dense, root / "c.bin", LONGER, store=root, compress="none")
        assert told.measured is None
        assert told.stored_bytes is not None
        assert told.raw_bytes is not None
        assert told.stored_bytes >= told.raw_bytes

    def test_room_on_the_disk_and_in_the_budget(self, dense: Driver, root: Path) -> None:
        saved = dense.save(resolve_for_writing(root, "one"), TEXT, name="one").saved.info
        set_budget(root, max_bytes=10_000_000, ttl_s=None)
        told = estimate(dense, root / "c.bin", LONGER, name="c", budget=Budget())
        assert told.budget_bytes == 10_000_000
        assert told.store_bytes == saved.n_file_bytes + saved.n_stored_bytes
        assert told.free_bytes > 0
        assert estimate(dense, root.parent / "c.bin", LONGER).budget_bytes is None


class TestRoom:
    def test_a_session_that_is_extended_says_how_far_it_compresses(self, dense: Driver, tmp_path: Path) -> None:
        saved = dense.save(tmp_path / "a.bin", TEXT).saved.info
        told = estimate(dense, tmp_path / "a.bin", LONGER, store=tmp_path / "store")
        assert told.measured is not None
        assert (told.measured.n_sessions, told.measured.stored_bytes) == (1, saved.n_stored_bytes)

    @pytest.mark.parametrize(("compress", "most"), [("auto", "at most "), ("none", "")])
    def test_a_disk_that_is_too_small_is_said_to_be(
        self, dense: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: str, most: str
    ) -> None:
        monkeypatch.setattr(estimate_module, "_free_bytes", lambda folder: 1_000)
        shortage = estimate(dense, tmp_path / "a.bin", TEXT, compress=compress).shortage
        assert isinstance(shortage, WriteError)
        assert re.search(rf"it needs {most}\d+ kB, 1\.0 kB are free", shortage.message)

    def test_a_budget_is_too_small_as_for_the_save(self, dense: Driver, root: Path) -> None:
        dense.save(resolve_for_writing(root, "one"), TEXT, name="one", raw=True)
        set_budget(root, max_bytes=150_000, ttl_s=None)
        more = {"name": "c", "budget": Budget(), "raw": True}
        shortage = estimate(dense, root / "c.bin", "Other. " * 300, **more).shortage
        with pytest.raises(NoRoomError) as refused:
            dense.save(root / "c.bin", "Other. " * 300, **more)
        assert isinstance(shortage, NoRoomError)
        assert shortage.message.split(" for ")[0] == refused.value.message.split(" for ")[0]
        assert estimate(dense, root / "c.bin", "Other.", **more).shortage is None

    def test_a_missing_folder_is_refused_as_the_save_refuses_it(self, dense: Driver, tmp_path: Path) -> None:
        errors = []
        for ask in (estimate, Driver.save):
            with pytest.raises(WriteError) as caught:
                ask(dense, tmp_path / "no" / "a.bin", TEXT)
            errors.append((caught.value.message, caught.value.hint))
        assert errors[0] == errors[1]


class TestMemory:
    def test_the_context_is_the_one_that_the_save_opens(self, dense: Driver, tmp_path: Path) -> None:
        told = estimate(dense, tmp_path / "a.bin", LONGER)
        assert told.context.n_ctx == dense.save(tmp_path / "a.bin", LONGER).saved.info.record.n_ctx
        assert told.memory_bytes == told.own_bytes + told.weights_bytes + told.context.n_bytes
        assert told.weights_bytes > 1_000_000

    def test_a_text_that_does_not_fit_is_refused_as_the_save_refuses_it(
        self, models: Callable[[str], Path], tmp_path: Path
    ) -> None:
        driver = Driver(models("short_ctx"), tmp_path)
        with pytest.raises(NoRoomError) as told:
            estimate(driver, tmp_path / "a.bin", LONGER)
        with pytest.raises(NoRoomError) as saving:
            driver.save(tmp_path / "a.bin", LONGER)
        assert told.value.fields["needed"] == saving.value.fields["needed"]
        assert told.value.hint == saving.value.hint


class TestNothingIsDone:
    def test_no_file_and_no_folder_is_made(self, dense: Driver, root: Path) -> None:
        estimate(dense, root / "a.bin", TEXT, name="a", reuse_from=root, store=root)
        assert not root.exists()

    def test_the_session_that_is_there_stays(self, dense: Driver, tmp_path: Path) -> None:
        dense.save(tmp_path / "a.bin", TEXT)
        before = (tmp_path / "a.bin").read_bytes()
        estimate(dense, tmp_path / "a.bin", LONGER)
        assert (tmp_path / "a.bin").read_bytes() == before

    def test_what_the_save_refuses_is_refused(self, dense: Driver, tmp_path: Path) -> None:
        dense.save(tmp_path / "a.bin", TEXT)
        with pytest.raises(ExistsError):
            estimate(dense, tmp_path / "a.bin", "Something else.")
        with pytest.raises(UsageError, match="the text is empty"):
            estimate(dense, tmp_path / "b.bin", " ")

    def test_a_model_without_its_weights_evaluates_nothing(self, models: Callable[[str], Path]) -> None:
        with UnloadedModel(models("M")) as model:
            assert model.token_bytes(model.tokenize("The", add_special=False, parse_special=False)[-1])
            with pytest.raises(EngineError, match="weights are not loaded"):
                model.open_scheduler()

    def test_a_damaged_model_file_is_refused(self, models: Callable[[str], Path], tmp_path: Path) -> None:
        (tmp_path / "cut.gguf").write_bytes(models("M").read_bytes()[:5000])
        with pytest.raises(ModelFileError):
            UnloadedModel(tmp_path / "cut.gguf")
