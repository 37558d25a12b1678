"""save, load and line-by-line chat with the tiny model."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.cli.signals import Interrupts
from llamakv.ops import save as save_op
from llamakv.store.session_file import read_session
from tests.cli.conftest import Ran, make_session

FEW = ("--max-tokens", "4", "--temperature", "0", "-t", "1")


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Put bytes on standard input."""

    def put(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return put


@pytest.fixture
def text_file(home: Path) -> Path:
    path = home / "text.txt"
    path.write_text("the river is a story about the house\n" * 5, encoding="utf-8")
    return path


class TestSave:
    def test_tells_what_was_read_and_what_it_takes(self, run: Callable[..., Ran], model: Path, text_file: Path) -> None:
        ran = run("save", "-f", text_file, "text.bin")
        assert ran.status == 0
        info = read_session("text.bin")
        assert ran.out.startswith(f"saved text.bin: {len(info.record.tokens):,} tokens · 0 reused, ")
        assert f"{info.record.tokens and len(info.record.tokens) - 1} evaluated" in ran.out

    def test_names_go_to_the_store(self, run: Callable[..., Ran], model: Path, text_file: Path, home: Path) -> None:
        assert run("save", "-f", text_file, "text").out.startswith("saved text: ")
        assert run("save", "-f", text_file, "other", "-q").out == ""
        assert (home / "store" / "text.bin").stat().st_mode & 0o777 == 0o600
        assert read_session(home / "store" / "text.bin").record.lineage.name == "text"

    def test_saving_again_reads_nothing_again(self, run: Callable[..., Ran], model: Path, text_file: Path) -> None:
        first = run("save", "-f", text_file, "text.bin", "--json").document["data"]
        second = run("save", "-f", text_file, "text.bin", "--json").document["data"]
        assert (first["reused"], first["evaluated"]) == (0, first["cells"])
        assert (second["reused"], second["evaluated"]) == (first["cells"], 0)
        assert second["complete"] is True
        assert second["saved"]["path"] == "text.bin"

    def test_another_text_needs_force(self, run: Callable[..., Ran], model: Path, text_file: Path) -> None:
        run("save", "-f", text_file, "text.bin")
        text_file.write_text("another thing\n")
        assert run("save", "-f", text_file, "text.bin").status == 11
        assert run("save", "-f", text_file, "text.bin", "--force").status == 0

    def test_reads_standard_input(self, run: Callable[..., Ran], model: Path, type_in: Callable[[bytes], None]) -> None:
        type_in("hello\r\nthere é".encode())
        assert run("save", "-f", "-", "--raw", "in.bin").status == 0
        assert read_session("in.bin").record.text == "hello\r\nthere é"

    def test_an_interrupted_prefill_is_130_and_keeps_what_was_read(
        self, run: Callable[..., Ran], model: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = save_op.save_prefix
        monkeypatch.setattr(save_op, "save_prefix", lambda *given: replace(real(*given), complete=False))
        ran = run("save", "-f", text_file, "text.bin")
        assert ran.status == 130
        assert ran.out.startswith("saved text.bin: ")
        assert ran.err == "interrupted\nhint: run the same command again to go on from there\n"
        document = run("save", "-f", text_file, "text.bin", "--json", "--force").document
        assert (document["status"], document["data"]["complete"]) == ("partial", False)
        assert document["errors"][0]["code"] == "interrupted"

    def test_a_missing_folder_is_found_out_before_reading(
        self, run: Callable[..., Ran], model: Path, text_file: Path
    ) -> None:
        ran = run("save", "-f", text_file, "no/such/folder/text.bin")
        assert ran.status == 16
        assert ran.err.startswith("error: ")


class TestLoad:
    def test_the_answer_is_on_stdout_and_the_session_stays(
        self, run: Callable[..., Ran], model: Path, text_file: Path
    ) -> None:
        run("save", "-f", text_file, "text.bin")
        before = Path("text.bin").read_bytes()
        ran = run("load", "text.bin", "-p", "what is it", *FEW)
        assert (ran.status, ran.out.count("\n")) == (0, 1)
        assert "reused" in ran.err
        data = run("load", "text.bin", "-p", "what is it", *FEW, "--json").document["data"]
        assert data["text"] + "\n" == ran.out
        assert set(data) >= {
            "text", "finish_reason", "reused", "evaluated", "generated", "seed", "elapsed_s", "first_token_s",
        }  # fmt: skip
        assert (data["reused"], data["generated"], data["finish_reason"]) == (
            len(read_session("text.bin").record.tokens) - 1, 4, "length",
        )  # fmt: skip
        assert Path("text.bin").read_bytes() == before

    def test_the_prompt_may_come_from_standard_input(
        self, run: Callable[..., Ran], model: Path, text_file: Path, type_in: Callable[[bytes], None]
    ) -> None:
        run("save", "-f", text_file, "text.bin")
        told = run("load", "text.bin", "-p", "what is it", *FEW).out
        type_in(b"what is it")
        assert run("load", "text.bin", "-p", "-", *FEW).out == told

    def test_the_result_can_be_saved_elsewhere(self, run: Callable[..., Ran], model: Path, text_file: Path) -> None:
        run("save", "-f", text_file, "text.bin")
        data = run("load", "text.bin", "-p", "q", *FEW, "--save", "branch", "--json").document["data"]
        assert data["saved"]["tokens"] == read_session(data["saved"]["path"]).record.tokens.__len__()
        assert run("inspect", "branch", "--json").document["data"]["lineage"]["parent_id"] is not None

    def test_another_model_is_14(
        self, run: Callable[..., Ran], model: Path, text_file: Path, models: Callable[[str], Path]
    ) -> None:
        run("save", "-f", text_file, "text.bin")
        ran = run("load", "text.bin", "-p", "q", "-m", models("M2"))
        assert (ran.status, ran.out) == (14, "")

    def test_a_session_without_its_model_is_10(self, run: Callable[..., Ran], session: Path) -> None:
        ran = run("load", session, "-p", "q")
        assert ran.status == 10
        assert "--model-dir" in ran.err


class TestChatLineByLine:
    def test_each_line_is_a_message_and_empty_ones_are_none(
        self, run: Callable[..., Ran], model: Path, type_in: Callable[[bytes], None]
    ) -> None:
        type_in(b"hi\n\n  \nhow are you\n")
        ran = run("chat", "--save", "s.bin", *FEW)
        assert ran.status == 0
        chat = read_session("s.bin").record.chat
        assert chat is not None
        assert [message.content for message in chat.messages if message.role == "user"] == ["hi", "how are you"]
        assert ran.out == "".join(f"{message.content}\n" for message in chat.messages if message.role == "assistant")

    def test_resuming_says_how_much_was_reused(
        self, run: Callable[..., Ran], model: Path, type_in: Callable[[bytes], None]
    ) -> None:
        run("chat", "--save", "s.bin", "--message", "hi", *FEW)
        n_cells = len(read_session("s.bin").record.tokens) - 1
        ran = run("chat", "--resume", "s.bin", "--message", "yo")
        assert f"resumed s.bin: {n_cells} tokens reused, 0 evaluated, " in ran.err

    def test_json_is_a_line_per_answer_and_a_closing_document(self, run: Callable[..., Ran], model: Path) -> None:
        ran = run("chat", "--message", "hi", "--message", "yo", "--save", "s.bin", "--json", *FEW)
        first, second, done = ran.lines
        assert [line["type"] for line in (first, second, done)] == ["answer", "answer", "done"]
        assert (first["message"], second["message"]) == ("hi", "yo")
        assert (first["reused"], first["generated"], first["saved"]["path"]) == (0, 4, "s.bin")
        assert second["reused"] == first["saved"]["tokens"] - 1
        assert (done["status"], done["data"]["answers"], done["data"]["session"]) == ("ok", 2, "s.bin")
        opened, *_ = run("chat", "--message", "hi", "--resume", "s.bin", "--json").lines
        assert (opened["type"], opened["reused"]) == ("opened", second["saved"]["tokens"] - 1)

    def test_resume_and_save_together_branch(self, run: Callable[..., Ran], model: Path) -> None:
        run("chat", "--save", "s.bin", "--message", "hi", *FEW)
        before = Path("s.bin").read_bytes()
        assert run("chat", "--resume", "s.bin", "--save", "t.bin", "--message", "yo").status == 0
        assert Path("s.bin").read_bytes() == before
        assert read_session("t.bin").record.lineage.parent_id == read_session("s.bin").record.lineage.session_id

    def test_no_message_is_2_without_loading_a_model(
        self, run: Callable[..., Ran], type_in: Callable[[bytes], None], home: Path
    ) -> None:
        type_in(b"\n \n")
        ran = run("chat", "-m", "no/such/model.gguf")
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith("error: no message on standard input\n")

    def test_a_line_that_is_not_utf8_is_2_and_earlier_turns_are_saved(
        self, run: Callable[..., Ran], model: Path, type_in: Callable[[bytes], None]
    ) -> None:
        type_in(b"hi\n\xff\n")
        ran = run("chat", "--save", "s.bin", *FEW)
        assert ran.status == 2
        assert "line 2 of standard input is not UTF-8" in ran.err
        assert read_session("s.bin").record.chat is not None

    def test_what_does_not_fit_is_15_and_the_session_stays(self, run: Callable[..., Ran], model: Path) -> None:
        run("chat", "--save", "s.bin", "--message", "hi", *FEW)
        before = Path("s.bin").read_bytes()
        ran = run("chat", "--resume", "s.bin", "--message", "word " * 500, "-c", "256")
        assert (ran.status, ran.out) == (15, "")
        assert Path("s.bin").read_bytes() == before

    def test_a_missing_model_is_10_and_not_a_gguf_14(self, run: Callable[..., Ran], home: Path) -> None:
        assert run("chat", "-m", "missing.gguf", "--message", "hi").status == 10
        (home / "text.gguf").write_text("not a model")
        assert run("chat", "-m", "text.gguf", "--message", "hi").status == 14
        assert run("chat", "-m", str(home), "--message", "hi").status == 2

    def test_a_damaged_session_is_13(self, run: Callable[..., Ran], home: Path) -> None:
        path = make_session(home / "broken.bin")
        path.write_bytes(path.read_bytes()[:1000])
        assert run("chat", "--resume", path, "--message", "hi").status == 13


def test_ctrl_c_in_an_op_only_sets_a_flag() -> None:
    interrupts = Interrupts()
    with interrupts.op():
        assert not interrupts.should_abort()
        interrupts._on_signal(2, None)
        assert interrupts.should_abort()
    with pytest.raises(KeyboardInterrupt):
        interrupts._on_signal(2, None)
    with interrupts.op():
        assert not interrupts.should_abort()


def test_ctrl_c_is_put_off_while_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr("llamakv.cli.signals.os._exit", left.append)
    interrupts = Interrupts()
    with interrupts.op():
        interrupts.note_phase("save")
        for _ in range(10):
            interrupts._on_signal(2, None)
        assert left == []
        interrupts.note_phase("prefill")
        interrupts._on_signal(2, None)
        assert left == [130]
