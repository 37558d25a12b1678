"""What the store has of a text is not read again, and what comes of it is what the session it came from would say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llamakv.ops import prefixes
from llamakv.ops.keeping import Keeper
from llamakv.ops.matching import find_model, merge_memory
from llamakv.ops.opening import OpenModel, resume
from llamakv.ops.prefixes import begin_with_prefix
from llamakv.ops.requests import MemoryOptions, Reporter, ResumeOptions
from llamakv.ops.sessions import remove_sessions, resolve_for_writing
from llamakv.records import Sampling, SectionKind
from llamakv.store import cache
from llamakv.store.objects import Objects
from llamakv.store.session_file import SessionReader, read_session
from tests.ops.driver import GREEDY, Driver, Heard, state_of

KINDS = ["M", "MS", "MR", "MH", "MH2", "ML"]
CUTTABLE = ["M", "MS"]
TEXT = "The quick brown fox jumps over the lazy dog. " * 16
OTHER = TEXT[:500] + "And then it slept. " * 12


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest, models, tmp_path: Path) -> Driver:
    return Driver(models(request.param), tmp_path)


@pytest.fixture
def dense(models, tmp_path: Path) -> Driver:
    return Driver(models("M"), tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def named(root: Path, name: str) -> Path:
    return resolve_for_writing(root, name)


def open_fresh(driver: Driver, memory: MemoryOptions | None = None) -> OpenModel:
    found = find_model(driver.request(), None, Reporter())
    return OpenModel(
        found,
        driver.request(),
        merge_memory(memory or MemoryOptions(), None, None, may_change=True),
        reporter=Reporter(),
    )


def contents(path: Path) -> list[tuple[object, ...]]:
    with SessionReader(path) as reader:
        sections = reader.info.sections
        return [
            (s.kind, s.p0, s.p_used, bytes(part.data)) for s, part in zip(sections, reader.read(sections), strict=True)
        ]


# ---------------------------------------------------------------- what is reused


@pytest.mark.parametrize("name", CUTTABLE)
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "chat"])
def test_a_text_is_read_from_where_a_saved_one_parts_from_it(models, tmp_path, root, name, raw) -> None:
    driver, heard = Driver(models(name), tmp_path), Heard()
    first = driver.save(named(root, "first"), TEXT, raw=raw, name="first")
    second = driver.save(named(root, "second"), OTHER, heard, raw=raw, name="second", reuse_from=root)
    one, two = first.saved.info.record.tokens, second.saved.info.record.tokens
    common = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert (second.reused, second.evaluated) == (common, len(two) - 1 - common)
    assert any(f"{common:,} of {len(two):,} tokens are in the store, in 'first'" in text for text in heard.notices)
    assert second.saved.info.record.lineage.parent_id is None
    again = driver.save(named(root, "again"), OTHER, raw=raw, reuse_from=root)
    assert (again.reused, again.evaluated) == (len(two) - 1, 0)
    assert {s.digest for s in again.saved.info.sections} == {s.digest for s in second.saved.info.sections}


def test_what_is_reused_is_bit_for_bit_that_session_gone_back_and_read_on(driver: Driver, root: Path) -> None:
    driver.save(named(root, "first"), TEXT[:500], raw=True, name="first")
    with open_fresh(driver) as opened:
        tokens = opened.model.tokenize(TEXT[:500] + " And on it went", add_special=True, parse_special=True)
        opened.open_sequence(len(tokens))
        n_cells = begin_with_prefix(opened, Keeper(opened, None, compress="auto"), root, tokens, Reporter())
        assert n_cells > 100
        sequence = opened.sequence
        sequence.extend(tokens[len(sequence.tokens) :])
        words = [*sequence.generate(Sampling(temperature=0.0), n_max=12)]
        found = list(sequence.tokens), bytes(sequence.logits())
    path = root / "first.bin"
    again, *_ = resume(path, driver.request(), MemoryOptions(), ResumeOptions(), Reporter(), read_session(path))
    with again:
        sequence = again.sequence
        sequence.rewind(n_cells + 1)
        sequence.extend(tokens[n_cells:], replace_pending=True)
        assert [*sequence.generate(Sampling(temperature=0.0), n_max=12)] == words
        assert (list(sequence.tokens), bytes(sequence.logits())) == found


@pytest.mark.parametrize("name", KINDS)
def test_a_chat_and_a_single_answer_begin_with_what_is_there(models, tmp_path, root, name) -> None:
    driver, heard = Driver(models(name), tmp_path), Heard()
    question = TEXT + "Who jumps?"
    with driver.chat(save=named(root, "cold"), name="cold") as cold:
        first = cold.send(question, Heard().reporter)
    with driver.chat(heard, save=named(root, "warm"), name="warm", reuse_from=root) as warm:
        answer = warm.send(question, heard.reporter)
        assert answer.reused + answer.evaluated == first.reused + first.evaluated
        if name in CUTTABLE:
            assert answer.evaluated <= 1
        tokens, _ = state_of(warm)
    assert answer.text == first.text
    assert tuple(tokens) == read_session(root / "cold.bin").record.tokens
    once = driver.load(None, question, reuse_from=root, sampling=GREEDY)
    assert once.text == first.text
    if name in CUTTABLE:
        assert once.reused > 100


def test_recurrent_memory_begins_only_where_its_state_was_kept(models, tmp_path: Path, root: Path) -> None:
    driver = Driver(models("MR"), tmp_path)
    saved = driver.save(named(root, "first"), TEXT, raw=True).saved.info
    longer = driver.save(named(root, "longer"), TEXT + "And more of it.", raw=True, reuse_from=root)
    assert longer.reused == len(saved.record.tokens) - 1
    tails = [s.p1 for s in longer.saved.info.sections if s.kind is SectionKind.TAIL]
    assert len(saved.record.tokens) - 1 in tails, "the place stays one that others can begin at"
    other = driver.save(named(root, "other"), OTHER, raw=True, reuse_from=root)
    assert other.reused == 0


def test_raw_text_goes_on_from_what_is_there(dense: Driver, root: Path) -> None:
    dense.save(named(root, "first"), TEXT, raw=True)
    cold = dense.load(None, TEXT + "It", raw=True, sampling=GREEDY)
    warm = dense.load(None, TEXT + "It", raw=True, sampling=GREEDY, reuse_from=root)
    assert (warm.text, cold.reused) == (cold.text, 0)
    assert warm.reused > 100
    kept = dense.load(None, TEXT + "It", raw=True, sampling=GREEDY, reuse_from=root, save=named(root, "kept"))
    assert read_session(root / "kept.bin").record.text == TEXT + "It" + kept.text


# ---------------------------------------------------------------- what is not


def test_nothing_is_reused_unless_it_is_asked_for(dense: Driver, root: Path) -> None:
    dense.save(named(root, "first"), TEXT, raw=True)
    assert dense.save(named(root, "second"), TEXT, raw=True).reused == 0


@pytest.mark.parametrize(
    "memory", [MemoryOptions(type_k="q8_0", type_v="q8_0"), MemoryOptions(flash_attn="off")], ids=["q8_0", "no-fa"]
)
def test_other_memory_settings_and_other_models_share_nothing(models, tmp_path, root, memory) -> None:
    Driver(models("M"), tmp_path).save(named(root, "first"), TEXT, raw=True)
    other = Driver(models("M"), tmp_path, memory=memory)
    assert other.save(named(root, "second"), TEXT, raw=True, reuse_from=root).reused == 0
    twin = Driver(models("M2"), tmp_path)
    assert twin.save(named(root, "third"), TEXT, raw=True, reuse_from=root).reused == 0


@pytest.mark.parametrize("what", ["lost", "damaged", "index", "not a store"])
def test_what_cannot_be_used_is_read_like_all_else(dense: Driver, root: Path, what: str) -> None:
    first = dense.save(named(root, "first"), TEXT, raw=True).saved.info
    place = Objects(root).path_of(first.sections[0].digest)
    if what == "lost":
        place.unlink()
    elif what == "damaged":
        data = bytearray(place.read_bytes())
        data[len(data) // 2] ^= 1
        place.write_bytes(data)
    elif what == "index":
        (root / "first.bin").write_bytes(b"nonsense")
    else:
        shutil.rmtree(root)
        root.write_text("a file")
    second = dense.save(root.with_name("second.bin"), OTHER, raw=True, reuse_from=root)
    assert second.reused == 0
    assert contents(second.saved.info.path) == contents(
        dense.save(root.with_name("cold.bin"), OTHER, raw=True).saved.info.path
    )


def test_a_wrong_hint_is_found_out(dense: Driver, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense.save(named(root, "first"), TEXT, raw=True)
    dense.save(named(root, "other"), "Something else altogether, and rather long. " * 9, raw=True)
    hint = cache.PrefixHint(name="other", path=root / "other.bin", n_cells=100)
    monkeypatch.setattr(cache.StoreCache, "longest_prefix", lambda self, space, tokens: hint)
    second = dense.save(named(root, "second"), TEXT, raw=True, reuse_from=root)
    assert second.reused == 0


# ---------------------------------------------------------------- what is kept


def test_a_session_keeps_what_it_began_with_when_the_other_goes(dense: Driver, root: Path) -> None:
    dense.save(named(root, "first"), TEXT, raw=True)
    dense.save(named(root, "second"), OTHER, raw=True, reuse_from=root)
    before = contents(root / "second.bin")
    remove_sessions(root, ["first"])
    assert contents(root / "second.bin") == before
    answer = dense.load(root / "second.bin", " Then", sampling=GREEDY)
    assert answer.reused == len(read_session(root / "second.bin").record.tokens) - 1


def test_a_scrap_of_a_long_section_does_not_keep_it_alive(dense: Driver, root: Path) -> None:
    first = dense.save(named(root, "first"), TEXT, raw=True).saved.info
    second = dense.save(named(root, "second"), TEXT[:120] + "Zebra. " * 9, raw=True, reuse_from=root)
    assert second.reused > prefixes.N_WORTH
    assert not {s.digest for s in second.saved.info.sections} & {s.digest for s in first.sections}


def test_a_file_of_its_own_begins_with_what_the_store_has(dense: Driver, root: Path, tmp_path: Path) -> None:
    dense.save(named(root, "first"), TEXT, raw=True)
    saved = dense.save(tmp_path / "out.bin", OTHER, raw=True, reuse_from=root)
    assert saved.reused > 100
    shutil.rmtree(root)
    assert not saved.saved.info.in_store
    assert dense.load(tmp_path / "out.bin", " Then", sampling=GREEDY).reused > 100
