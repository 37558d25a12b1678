"""What people see: numbers, reports, progress."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from llamakv.cli import render
from llamakv.cli.output import to_json
from llamakv.cli.render import progress
from llamakv.records import MemoryKind, Sampling


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (41_234, "41.2 kB"), (123_456, "123 kB"), (999_600, "1.0 MB"),
     (98_000_000, "98.0 MB"), (5 * 10**9, "5.0 GB"), (7 * 10**12, "7.0 TB")],
)  # fmt: skip
def test_sizes(n_bytes: int, text: str) -> None:
    assert render.size(n_bytes) == text


@pytest.mark.parametrize(
    ("elapsed_s", "text"),
    [(0.0, "0.00 s"), (0.052, "0.05 s"), (9.996, "10.0 s"), (59.9, "59.9 s"), (59.96, "1 min 00 s"),
     (125, "2 min 05 s"), (3600 * 5 + 60, "5 h 01 min")],
)  # fmt: skip
def test_durations(elapsed_s: float, text: str) -> None:
    assert render.seconds(elapsed_s) == text


@pytest.mark.parametrize(
    ("passed_s", "text"),
    [(-5, "just now"), (59, "just now"), (60, "1 min ago"), (7300, "2 h ago"), (86400 * 3, "3 d ago")],
)
def test_ages(passed_s: float, text: str) -> None:
    assert render.age(1000.0, 1000.0 + passed_s) == text


def test_speed_is_left_out_where_there_is_none() -> None:
    assert (render.rate(0, 1.0), render.rate(5, 0.0), render.rate(50, 2.0), render.rate(5000, 2.0)) == (
        "", "", "25 tokens/s", "2,500 tokens/s",
    )  # fmt: skip


def test_markup_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    shown = render.report([("path", "[WIP] [bold]x[/bold] :smile:")]) + render.table(("A", "B"), [("[/INST]", "[red]")])
    assert "[WIP] [bold]x[/bold] :smile:" in shown
    assert "[/INST]  [red]" in shown


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Terminal]:
    def make(columns: int = 80, term: str = "xterm") -> Terminal:
        stream = Terminal()
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", term)
        monkeypatch.delenv("NO_COLOR", raising=False)
        return stream

    return make


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_report_fits_the_terminal(terminal: Callable[..., Terminal], columns: int) -> None:
    terminal(columns, "dumb")
    shown = render.report([("label", "word " * 60)]) + render.table(("A", "B"), [("n" * 90, "v" * 90)])
    assert max(map(len, shown.splitlines())) <= columns


def test_colour_only_where_it_is_welcome(terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal()
    assert "\x1b[1m" in render.report([("label", "value")])
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in render.report([("label", "value")])


class TestProgress:
    def _updates(self, line: progress.ProgressLine, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
        for step in range(10):
            now[0] = step * 0.2
            line.update("prefill", step * 100, 1000)
        line.clear()

    def test_is_shown_on_a_terminal_once_it_takes_a_moment(
        self, terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = terminal()
        self._updates(progress.ProgressLine(quiet=False), monkeypatch)
        shown = stream.getvalue()
        assert "of 1,000 tokens · 500 tokens/s" in shown
        assert "left" in shown
        assert shown.rstrip("\n").endswith("\x1b[2K")

    @pytest.mark.parametrize(("quiet", "term"), [(True, "xterm"), (False, "dumb")])
    def test_is_not_shown_where_it_is_not_wanted(
        self, terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch, quiet: bool, term: str
    ) -> None:
        stream = terminal(term=term)
        self._updates(progress.ProgressLine(quiet=quiet), monkeypatch)
        assert stream.getvalue() == ""

    def test_is_not_shown_off_a_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._updates(progress.ProgressLine(quiet=False), monkeypatch)
        assert capsys.readouterr().err == ""


def test_json_of_data_has_no_infinities() -> None:
    shown = to_json(Sampling(logit_bias=((1, float("-inf")),)))
    assert isinstance(shown, dict)
    assert shown["logit_bias"] == [[1, "-inf"]]
    assert to_json(MemoryKind.DENSE) == "dense"
    with pytest.raises(TypeError, match="no JSON form for object"):
        to_json(object())
