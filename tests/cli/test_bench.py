"""``bench``: what it is asked, what it shows, and what is left of a run that is stopped."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from llamakv.cli import render
from llamakv.cli.bench import comparison as bench_comparison
from llamakv.cli.bench import rows as bench_rows
from llamakv.cli.bench import tables as bench_tables
from llamakv.errors import EngineError, InterruptedByUser, LlamakvError, NoRoomError
from llamakv.ops.bench import run as bench_run
from llamakv.ops.bench.break_even import break_even_warm
from llamakv.ops.bench.requests import STRATEGIES, BenchRequest
from llamakv.ops.bench.result_file import read_result, write_result
from llamakv.ops.bench.results import BenchResult, BreakEven, LengthTimes, Spread
from tests.cli import bench_samples as samples
from tests.cli.conftest import Ran


class Fake:
    """Measures nothing: tells ``parts`` one after the other, then returns the last or ends with ``error``."""

    def __init__(self) -> None:
        self.parts: list[BenchResult] = [samples.result()]
        self.error: LlamakvError | None = None
        self.failures: list[tuple[str, LlamakvError]] = []
        self.asked: BenchRequest | None = None
        self.on_part: Callable[[], None] = lambda: None

    def __call__(self, request: BenchRequest) -> BenchResult:
        self.asked = request
        for part in self.parts:
            request.on_result(part)
            self.on_part()
        for failure in self.failures:
            request.on_failure(*failure)
        if self.error is not None:
            raise self.error
        return self.parts[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    measures = Fake()
    monkeypatch.setattr(bench_run, "run_bench", measures)
    return measures


PARTIAL = samples.result(types=(samples.type_result(),), strategies=None, interrupted=True)


# ---------------------------------------------------------------- what is asked


def test_without_options_four_cache_types_are_measured(run: Callable[..., Ran], fake: Fake) -> None:
    assert run("bench").status == 0
    asked = fake.asked
    assert asked is not None
    assert asked.types is not None
    assert asked.types.pairs == (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"))
    numbers = (asked.types.n_tokens, asked.types.n_decoded, asked.types.n_branches, asked.types.n_positions)
    assert (numbers, asked.types.compares_output, asked.n_repeats) == ((1000, 32, 64, 64), True, 3)
    assert (asked.strategies, asked.text) == (None, None)
    assert asked.work_dir.is_dir()


def test_with_users_strategies_are_measured_and_types_only_if_named(run: Callable[..., Ran], fake: Fake) -> None:
    run("bench", "--users", 8, "--memory", "16GB", "-ctk", "q8_0")
    asked = fake.asked
    assert asked is not None
    assert asked.strategies is not None
    assert (asked.types, asked.strategies.names, asked.strategies.shares_prefix) == (None, STRATEGIES, True)
    assert (asked.strategies.n_users, asked.strategies.n_prefix, asked.strategies.n_question) == (8, 1000, 32)
    assert (asked.strategies.memory_limit_bytes, asked.memory.type_k) == (16 * 10**9, "q8_0")
    run(
        "bench", "--users", 2, "--no-shared-prefix", "--strategies", "hybrid,none", "--types", "f16/q8_0", "--tokens", 9
    )
    asked = fake.asked
    assert asked.types is not None
    assert asked.strategies is not None
    assert (asked.types.pairs, asked.types.n_tokens) == ((("f16", "q8_0"),), 9)
    assert (asked.strategies.names, asked.strategies.shares_prefix) == (("hybrid", "none"), False)


def test_a_cache_type_for_everything_is_the_one_measured(run: Callable[..., Ran], fake: Fake) -> None:
    run("bench", "-ctv", "q8_0")
    assert fake.asked is not None
    assert fake.asked.types is not None
    assert fake.asked.types.pairs == (("f16", "q8_0"),)


def test_a_text_of_ones_own_is_read(run: Callable[..., Ran], fake: Fake, home: Path) -> None:
    (home / "text.txt").write_text("é text\n")
    run("bench", "-f", "text.txt")
    assert fake.asked is not None
    assert fake.asked.text == "é text\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--types", "f16,q9"), 2, "invalid value for '--types': 'q9' is not one of f16, bf16"),
        (("--types", "f16/"), 2, "invalid value for '--types': '' is not one of"),
        (("--types", "f16,f16/f16"), 2, "invalid value for '--types': 'f16,f16/f16' names one of them twice"),
        (("--tokens", "0"), 2, "invalid value for '--tokens': 0 is less than 2"),
        (("--repeats", "0"), 2, "invalid value for '--repeats': 0 is less than 1"),
        (("--branches", "255"), 2, "invalid value for '--branches': 255 is more than 254"),
        (("--users", "-1"), 2, "invalid value for '--users': -1 is less than 1"),
        (("--users", "2", "--strategies", "all"), 2, "invalid value for '--strategies': 'all' is not one of none"),
        (("--users", "2", "--memory", "none"), 2, "invalid value for '--memory': 'none' is not a size"),
        (("--prefix", "100"), 2, "options of strategies need a number of users"),
        (("--no-shared-prefix",), 2, "options of strategies need a number of users"),
        (("--users", "2", "--tokens", "100"), 2, "with --users, cache types are measured only if --types names them"),
        (("--positions", "9", "--no-output-change"), 2, "--positions and --no-output-change exclude each other"),
        (("--markdown", "--csv"), 2, "--markdown and --csv exclude each other"),
        (("--plot", "-", "--csv"), 2, "standard output cannot take both a plot and --csv"),
        (("--plot", "a.pdf"), 2, "'a.pdf' is neither an .svg nor a .png file"),
        (("--plot", "there.svg"), 11, "'there.svg' already exists"),
        (("--plot", "no/a.svg"), 16, "cannot write 'no': No such file or directory"),
        (("-o", "there.svg"), 11, "'there.svg' already exists"),
        (("-o", "-"), 2, "--output takes a file, '-' is none"),
        (("--dir", "none"), 10, "folder 'none' does not exist"),
        (("--dir", "empty"), 2, "'empty' is not a folder"),
        (("--compare", "a.json", "b.json", "--dir", "."), 2, "--compare reads two results and measures nothing"),
        (("-o", "."), 2, "'.' is a folder, expected a file"),
        (("-o", "no/a.json"), 16, "cannot write 'no': No such file or directory"),
        (("-o", "a.svg", "--plot", "a.svg"), 2, "both the result and the plot would go to 'a.svg'"),
        (("-f", "missing.txt"), 10, "file 'missing.txt' does not exist"),
        (("-f", "empty"), 2, "empty is empty: there is nothing to read"),
        (("--compare", "a.json"), 2, "option '--compare' requires 2 arguments"),
        (("--compare", "a.json", "b.json", "--users", "2"), 2, "--compare reads two results and measures nothing"),
        (("--compare", "a.json", "b.json", "-o", "c.json"), 2, "--compare reads two results and measures nothing"),
        (("--compare", "a.json", "b.json"), 10, "no such file: 'a.json'"),
        (("--compare", "empty", "empty"), 13, "'empty' is not a bench result: it is not JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_measured(
    run: Callable[..., Ran], fake: Fake, home: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    (home / "there.svg").write_text("mine")
    (home / "empty").write_bytes(b"")
    ran = run("bench", *arguments)
    assert (ran.status, ran.out, fake.asked) == (status, "", None)
    error, *hint = ran.err.splitlines()
    assert error.startswith(f"error: {message}")
    assert len(hint) <= 1
    assert sorted(each.name for each in home.iterdir() if each.is_file()) == ["empty", "there.svg"]


# ---------------------------------------------------------------- what is shown


def test_tables_say_from_how_many_tokens_on_it_pays(run: Callable[..., Ran], fake: Fake) -> None:
    never = BreakEven(n_tokens=None, at_most=False)
    fake.parts = [
        samples.result(
            types=(samples.type_result(), samples.type_result("q8_0", break_even_warm=never, break_even_cold=None),
                   samples.refused())
        )
    ]  # fmt: skip
    ran = run("bench")
    assert ran.err == ""
    lines = [line.split() for line in ran.out.splitlines()]
    start = lines.index(["CACHE", "TYPE", "WARM", "COLD"])
    assert [" ".join(line) for line in lines[start + 1 : start + 4]] == [
        "f16 62 or fewer 71",
        "q8_0 never, up to 1,000 not measured",
        "q5_1 not supported not supported",
    ]
    assert "q5_1 is not supported: quantised values need flash attention, which is off" in ran.out


def test_tables_show_memory_speeds_and_change_of_each_type(run: Callable[..., Ran], fake: Fake) -> None:
    rows = {line[:30].strip(): line[30:].split("  ") for line in run("bench").out.splitlines()}
    found = {name: [cell.strip() for cell in cells if cell.strip()] for name, cells in rows.items()}
    assert found["keys and values of a token"] == ["23.0 kB", "12.2 kB", "9.4 kB"]
    assert found["prompt speed, tokens/s"] == ["152", "143", "140"]
    assert found["generation speed, tokens/s"] == ["46.0", "41.8", "40.7"]
    assert found["session file"] == ["19.6 MB", "10.4 MB", "8.0 MB"]
    assert found["output: same top token as f16"] == ["100.0 %", "95.3 %", "94.1 %"]


def test_times_are_shown_with_their_range(run: Callable[..., Ran], fake: Fake) -> None:
    (line,) = [line for line in run("bench").out.splitlines() if line.startswith("f16") and " 1,000 " in line]
    assert " ".join(line.split()) == "f16 1,000 6.60 (6.27–7.26) 62.7 (59.5–68.9) 89.6 (85.1–98.5) 105×"


def test_strategies_are_side_by_side_and_explained(run: Callable[..., Ran], fake: Fake) -> None:
    out = run("bench", "--users", 8).out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "STRATEGY none in-process cross-process hybrid" in lines
    assert "hit rate: prompt tokens not read 0.0 % 84.8 % 96.9 % 96.9 %" in lines
    assert "users in 8.0 GB 252* 252* 36 252*" in lines
    assert "*: no more sequences in a context" in out
    for name in STRATEGIES:
        assert f"\n{name}: " in out


def test_a_strategy_that_failed_is_told_and_3(run: Callable[..., Ran], fake: Fake) -> None:
    failed = samples.strategies(rows=(samples.strategy("none"),), failed=(("hybrid", "out of memory"),))
    fake.parts = [samples.result(strategies=failed)]
    ran = run("bench", "--users", 8)
    assert ran.status == 3
    assert "hybrid could not be run: out of memory" in ran.out
    shown = run("bench", "--users", 8, "--json")
    assert (shown.status, shown.document["status"]) == (3, "partial")


def test_where_nothing_could_be_done_there_are_only_the_errors(run: Callable[..., Ran], fake: Fake) -> None:
    reasons = (("none", "300 users, a context has 254"), ("hybrid", "no room"))
    fake.parts = [samples.result(types=(), strategies=samples.strategies(rows=(), failed=reasons))]
    fake.failures = [("none", NoRoomError(reasons[0][1])), ("hybrid", EngineError(reasons[1][1]))]
    ran = run("bench", "--users", 300)
    assert (ran.status, ran.out) == (15, "")
    assert ran.err.splitlines() == [
        "error: none could not be measured: 300 users, a context has 254",
        "error: hybrid could not be measured: no room",
    ]
    shown = run("bench", "--users", 300, "--json")
    assert (shown.status, shown.document["status"]) == (15, "error")
    assert [error["code"] for error in shown.document["errors"]] == [NoRoomError.code, EngineError.code]


def test_a_type_that_failed_shows_its_finished_lengths_and_3(run: Callable[..., Ran], fake: Fake) -> None:
    nothing = dataclasses.replace(samples.refused("q4_0"), refused=None, failed="ended by SIGABRT")
    fake.parts = [samples.result(types=(samples.type_result(), samples.cut_short(failed="ended by SIGKILL"), nothing))]
    ran = run("bench")
    assert ran.status == 3
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert "q8_0 62 or fewer, measured once not measured" in lines
    assert "q4_0 failed failed" in lines
    assert "q8_0 failed: ended by SIGKILL; what was measured before is shown" in lines
    assert "q4_0 failed: ended by SIGABRT" in lines
    assert sum(line.startswith("q8_0 ") and line.endswith("×") for line in lines) == 2
    assert "save 1,000 tokens 45.3 ms –" in lines
    assert "not supported" not in ran.out
    rows = list(csv.DictReader(io.StringIO(run("bench", "--csv").out)))
    assert [row["note"] for row in rows if row["metric"] == "failed"] == ["ended by SIGKILL", "ended by SIGABRT"]


def length_of(n_tokens: int, read_s: list[float], resume_s: list[float]) -> LengthTimes:
    return dataclasses.replace(
        samples.length(n_tokens), prefill_s=Spread.of(read_s), resume_warm_s=Spread.of(resume_s), resume_cold_s=None
    )


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        (
            (length_of(10, [0.5, 1, 1.5], [2, 2, 2.5]), length_of(20, [2.75, 3, 3.5], [1.5, 2, 2.5])),
            "about 15 (12 – 19)",
        ),
        ((length_of(10, [1.5, 2, 3], [1, 1, 1.75]), length_of(20, [4, 4, 4], [1, 1, 1])), "10 or fewer (perhaps 11)"),
        ((length_of(10, [1, 1, 3], [2, 2, 2]),), "never, up to 10 (perhaps from 10 or fewer)"),
        ((length_of(10, [1, 3, 3], [2, 2, 2]),), "10 or fewer (perhaps never)"),
        ((length_of(10, [1], [2]), length_of(20, [3], [2])), "15, measured once"),
        ((length_of(10, [1, 1], [2, 2]), length_of(20, [3, 3], [2, 2])), "15"),
    ],
)
def test_a_break_even_says_how_certain_it_is(lengths: tuple[LengthTimes, ...], text: str) -> None:
    row = samples.type_result(lengths=lengths, break_even_warm=break_even_warm(lengths), break_even_cold=None)
    assert bench_rows.break_even_texts(row)[0] == text


def test_where_the_files_are_is_asked_for_and_told(run: Callable[..., Ran], fake: Fake, home: Path) -> None:
    (home / "disk").mkdir()
    lines = [" ".join(line.split()) for line in run("bench", "--dir", "disk").out.splitlines()]
    assert "files in /home/user/.cache/llamakv" in lines
    assert fake.asked is not None
    assert fake.asked.work_dir == Path("disk")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(render, "width", lambda: columns)
    many = [
        samples.type_result(name) for name in ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "bf16", "f32")
    ]
    result = samples.result(types=tuple(many))
    text = "".join(map(bench_tables.terminal_text, bench_rows.result_tables(result)))
    assert max(map(len, text.splitlines())) <= columns
    for name in ("f16", "iq4_nl", "f32"):
        assert sum(name in line.split() for line in text.splitlines() if line.startswith("CACHE TYPE")) == 1


def test_markdown_is_tables_with_numbers_to_the_right(run: Callable[..., Ran], fake: Fake) -> None:
    fake.parts = [samples.result(types=(samples.type_result(), samples.refused("q5_1", "a | b")))]
    out = run("bench", "--markdown").out
    assert "| CACHE TYPE | WARM | COLD |\n| --- | ---: | ---: |\n| f16 | 62 or fewer | 71 |\n" in out
    assert "- q5_1 is not supported: a \\| b" in out
    assert "- **machine**: Example CPU 3000 @ 2.60GHz" in out


def test_csv_has_a_line_for_each_number(run: Callable[..., Ran], fake: Fake) -> None:
    rows = list(csv.DictReader(io.StringIO(run("bench", "--csv").out)))
    (found,) = [
        row for row in rows if (row["name"], row["metric"], row["n_tokens"]) == ("q8_0/q4_0", "resume_warm_s", "1000")
    ]
    length = samples.length(1000).resume_warm_s
    assert (found["of"], found["unit"], found["runs"]) == ("type", "s", "3")
    assert (float(found["least"]), float(found["median"]), float(found["most"])) == (
        length.least, length.median, length.most,
    )  # fmt: skip
    assert [row["note"] for row in rows if row["metric"] == "break_even_warm"] == ["or fewer"] * 3
    assert [row["note"] for row in rows if row["metric"] == "break_even_cold"] == [""] * 3
    work = [(row["users"], row["prefix"], row["question"], row["answer"], row["shared_prefix"]) for row in rows]
    assert dict(zip((row["of"] for row in rows), work, strict=True)) == {
        "type": ("",) * 5, "strategy": ("8", "1000", "32", "32", "yes"),
    }  # fmt: skip
    (refused,) = [row for row in rows if row["metric"] == "refused"]
    assert (refused["name"], refused["median"], refused["note"]) == (
        "q5_1", "", "quantised values need flash attention, which is off",
    )  # fmt: skip


def test_json_is_the_result_and_can_be_compared(run: Callable[..., Ran], fake: Fake, home: Path) -> None:
    ran = run("bench", "--json")
    document = ran.document
    assert (document["command"], document["status"], document["errors"]) == ("bench", "ok", [])
    assert document["data"]["types"][0]["break_even_cold"] == {"n_tokens": 71, "at_most": False}
    (home / "printed.json").write_text(ran.out)
    assert read_result(home / "printed.json") == samples.result()


@pytest.mark.slow
def test_a_plot_is_drawn_into_a_file_or_below_the_tables(run: Callable[..., Ran], fake: Fake, home: Path) -> None:
    assert run("bench", "--plot", "a.svg").status == 0
    shown = (home / "a.svg").read_text()
    for text in (
        "f16: read again",
        "q8_0/q4_0: resume, warm",
        "1,000",
        "cross-process",
        "Example CPU 3000",
        "mean KL divergence to f16",
        "q5_1 is not supported",
        "f16 62 or fewer",
    ):
        assert text in shown.replace("\n", " ")
    out = run("bench", "--plot", "-").out
    assert "Does it pay?" in out
    assert out.index("o f16: read again") > out.index("Does it pay?")
    assert "\x1b" not in out


@pytest.mark.slow
def test_a_type_cut_short_is_drawn_without_the_panels_it_has_nothing_for(
    run: Callable[..., Ran], fake: Fake, home: Path
) -> None:
    fake.parts = [samples.result(types=(samples.cut_short("f16", failed="killed"),), strategies=None)]
    assert run("bench", "--plot", "a.svg").status == 3
    shown = (home / "a.svg").read_text()
    assert "Failed before the end: f16." in shown
    assert "f16: resume, warm" in shown
    assert "tokens per second" not in shown
    assert "mean KL" not in shown


# ---------------------------------------------------------------- what is kept


def test_a_result_is_kept_after_each_row(run: Callable[..., Ran], fake: Fake, home: Path) -> None:
    seen: list[BenchResult] = []
    fake.parts = [PARTIAL, samples.result()]
    fake.on_part = lambda: seen.append(read_result(home / "a.json"))
    ran = run("bench", "-o", "a.json")
    assert (ran.status, ran.err) == (0, "kept in a.json\n")
    assert seen == fake.parts
    assert read_result(home / "a.json") == samples.result()


def test_a_result_that_is_there_is_replaced_with_force(run: Callable[..., Ran], fake: Fake, home: Path) -> None:
    (home / "a.json").write_text("mine")
    assert run("bench", "-o", "a.json").status == 11
    assert (home / "a.json").read_text() == "mine"
    assert run("bench", "-o", "a.json", "--force").status == 0
    assert read_result(home / "a.json") == samples.result()


def test_a_result_that_cannot_be_kept_any_more_is_shown_and_16(run: Callable[..., Ran], fake: Fake, home: Path) -> None:
    (home / "d").mkdir()
    fake.parts = [PARTIAL, PARTIAL, samples.result()]

    def folder_goes() -> None:
        if os.path.exists("d"):
            os.rename("d", "e")

    fake.on_part = folder_goes
    ran = run("bench", "-o", "d/a.json")
    assert ran.status == 16
    assert "Does it pay?" in ran.out
    assert ran.err.splitlines() == [
        "warning: cannot write 'd/a.json': No such file or directory; going on",
        "error: cannot write 'd/a.json': No such file or directory",
    ]


def test_another_file_that_came_in_between_is_not_replaced(run: Callable[..., Ran], fake: Fake, home: Path) -> None:
    fake.parts = [samples.result()]

    def somebody_writes() -> None:
        (home / "a.svg").write_text("theirs")

    fake.on_part = somebody_writes
    ran = run("bench", "--plot", "a.svg")
    assert (ran.status, (home / "a.svg").read_text()) == (11, "theirs")
    assert "Does it pay?" in ran.out


def test_a_result_file_that_came_in_between_is_not_replaced_and_nothing_is_lost(
    run: Callable[..., Ran], fake: Fake, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.parts = [PARTIAL, samples.result()]

    def somebody_writes_first(request: BenchRequest) -> BenchResult:
        (home / "a.json").write_text("theirs")
        return fake(request)

    monkeypatch.setattr(bench_run, "run_bench", somebody_writes_first)
    ran = run("bench", "-o", "a.json")
    assert (ran.status, (home / "a.json").read_text()) == (11, "theirs")
    assert "Does it pay?" in ran.out
    assert ran.err.splitlines()[:2] == [
        "warning: 'a.json' already exists; going on",
        "error: 'a.json' already exists",
    ]


def test_what_was_measured_before_an_error_is_shown_with_it(run: Callable[..., Ran], fake: Fake, home: Path) -> None:
    fake.parts = [PARTIAL]
    fake.error = NoRoomError("the disk of the engine is full")
    ran = run("bench", "-o", "a.json")
    assert ran.status == 15
    assert "f16         62 or fewer    71" in ran.out
    assert ran.err.splitlines() == ["error: the disk of the engine is full", "kept in a.json"]
    document = run("bench", "--json").document
    assert (document["status"], [error["exit_status"] for error in document["errors"]]) == ("partial", [15])


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize("raises", [False, True])
def test_ctrl_c_shows_what_was_measured_and_is_130(
    run: Callable[..., Ran], fake: Fake, home: Path, raises: bool
) -> None:
    fake.parts = [PARTIAL]
    fake.on_part = lambda: os.kill(os.getpid(), signal.SIGINT)
    fake.error = InterruptedByUser("interrupted while measuring") if raises else None
    ran = run("bench", "-o", "a.json", "--plot", "a.svg")
    assert ran.status == 130
    assert "interrupted  some of it is missing" in ran.out
    assert "f16         62 or fewer    71" in ran.out
    assert ran.err.splitlines() == ["interrupted; what was measured is shown", "kept in a.json"]
    assert read_result(home / "a.json") == PARTIAL
    assert "Interrupted: some of it is missing." in (home / "a.svg").read_text()


def test_ctrl_c_with_json_is_a_partial_document(run: Callable[..., Ran], fake: Fake) -> None:
    fake.parts = [PARTIAL]
    fake.on_part = lambda: os.kill(os.getpid(), signal.SIGINT)
    ran = run("bench", "--json")
    document = ran.document
    assert (ran.status, document["status"], document["data"]["interrupted"]) == (130, "partial", True)
    assert [(error["code"], error["exit_status"]) for error in document["errors"]] == [("interrupted", 130)]
    assert len(document["data"]["types"]) == 1


def test_sigterm_is_143(run: Callable[..., Ran], fake: Fake) -> None:
    fake.parts = [PARTIAL]
    fake.on_part = lambda: os.kill(os.getpid(), signal.SIGTERM)
    ran = run("bench")
    assert (ran.status, ran.err) == (143, "ended by SIGTERM\n")
    assert "some of it is missing" in ran.out


def test_ctrl_c_before_anything_was_measured_shows_nothing(run: Callable[..., Ran], fake: Fake) -> None:
    fake.parts = []
    fake.error = InterruptedByUser("interrupted while measuring", status=130)
    ran = run("bench")
    assert (ran.status, ran.out, ran.err) == (130, "", "interrupted while measuring\n")


def test_ctrl_c_before_the_first_row_does_not_say_that_something_was_measured(
    run: Callable[..., Ran], fake: Fake
) -> None:
    fake.parts = [samples.result(types=(), strategies=None, interrupted=True)]
    ran = run("bench")
    assert (ran.status, ran.err) == (130, "interrupted; nothing was measured\n")


def test_an_error_is_an_error(run: Callable[..., Ran], fake: Fake, home: Path) -> None:
    fake.parts = []
    fake.error = NoRoomError("the model was trained with 8,192 tokens")
    ran = run("bench", "-o", "a.json", "--json")
    assert (ran.status, ran.document["status"], ran.document["data"]) == (15, "error", None)
    assert not (home / "a.json").exists()


# ---------------------------------------------------------------- compared


@pytest.fixture
def two(home: Path) -> tuple[Path, Path]:
    """Two results: B has a faster prompt speed, a larger context and other strategies."""
    a = samples.result()
    faster = samples.type_result(prompt_tokens_per_s=samples.spread(304.0), context_bytes=90_000_000)
    b = samples.result(
        types=(faster, samples.type_result("q4_0")),
        n_threads=4,
        strategies=samples.strategies(rows=(samples.strategy("none", n_users_that_fit=300),)),
    )
    write_result(home / "a.json", a, overwrite=False)
    write_result(home / "b.json", b, overwrite=False)
    return home / "a.json", home / "b.json"


def test_a_comparison_shows_what_differs_first_then_which_is_better(
    run: Callable[..., Ran], two: tuple[Path, Path]
) -> None:
    ran = run("bench", "--compare", *two)
    assert (ran.status, ran.err) == (0, "")
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    for line in (
        "n_threads 2 4",
        "take care: they used different numbers of threads",
        "only A has type q8_0",
        "only B has type q4_0",
        "prompt speed 152 tokens/s 304 tokens/s 2.00 faster",
        "contexts 59.2 MB 90.0 MB 1.52 larger",
        "read again, 1,000 tokens 6.6 s 6.6 s 1.00 the same",
        "users that fit 252 300 1.19 better",
        "resuming pays from, warm 62 tokens or fewer 62 tokens or fewer 1.00 the same",
    ):
        assert line in lines
    assert lines.index("n_threads 2 4") < lines.index("Cache type f16")


def test_a_comparison_as_json_csv_and_markdown(run: Callable[..., Ran], two: tuple[Path, Path]) -> None:
    data = run("bench", "--compare", *two, "--json").document["data"]
    assert data["differences"] == [{"field": "n_threads", "a": 2, "b": 4}]
    assert data["doubts"] == ["they used different numbers of threads"]
    (speed,) = [pair for pair in data["pairs"] if pair["metric"] == "prompt_tokens_per_s"]
    assert (speed["name"], speed["b_over_a"], speed["verdict"], speed["a"]["runs"]) == ("f16", 2.0, "better", 3)
    rows = list(csv.DictReader(io.StringIO(run("bench", "--compare", *two, "--csv").out)))
    assert [row["verdict"] for row in rows if row["metric"] == "prompt_tokens_per_s"] == ["better"]
    assert "| prompt speed | 152 tokens/s | 304 tokens/s | 2.00 | faster |" in run(
        "bench", "--compare", *two, "--markdown"
    ).out  # fmt: skip


def test_a_comparison_needs_no_engine(process: Callable[..., Ran], two: tuple[Path, Path], home: Path) -> None:
    (home / "llama_cpp.py").write_text("raise RuntimeError('the engine was imported')")
    ran = process("bench", "--compare", *two, env={"PYTHONPATH": str(home)})
    assert (ran.status, ran.err) == (0, "")


def test_every_metric_has_words() -> None:
    from llamakv.ops.bench.measures import measures

    assert {measure.metric for measure in measures(samples.result())} == set(bench_comparison._METRICS)


def test_the_sample_is_whole() -> None:
    """What is compared above would otherwise say little."""
    result = samples.result()
    empty = [
        field.name
        for row in (result.types[0], result.strategies)
        for field in dataclasses.fields(row)  # type: ignore[arg-type]
        if getattr(row, field.name) is None and field.name not in ("refused", "failed")
    ]
    assert empty == []
    assert json.dumps(dataclasses.asdict(result))


# ---------------------------------------------------------------- for real


def test_a_tiny_model_is_measured(run: Callable[..., Ran], model: Path, home: Path) -> None:
    ran = run(
        "bench", "-t", 1, "--tokens", 8, "--types", "q8_0", "--repeats", 1, "--no-output-change", "--decode", 2,
        "--branches", 2, "-o", "a.json",
    )  # fmt: skip
    assert (ran.status, ran.err) == (0, "kept in a.json\n")
    result = read_result(home / "a.json")
    assert [(row.label, row.lengths[-1].n_tokens) for row in result.types] == [("q8_0", 8)]
    assert "Does it pay?" in ran.out
    assert run("bench", "--compare", "a.json", "a.json").status == 0
