"""What becomes of a result of ``bench``: kept while it grows, shown, drawn; and two of them compared."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llamakv.cli.output import Json, Output, error_json, exit_status, to_json
from llamakv.cli.signals import ended
from llamakv.errors import ExistsError, InterruptedByUser, LlamakvError, UsageError, WriteError
from llamakv.ops.bench.result_file import read_result, result_json, write_result
from llamakv.ops.report_files import check_place

if TYPE_CHECKING:
    from llamakv.ops.bench.results import BenchResult
    from llamakv.ops.requests import Reporter

PARTLY_DONE = 3
Form = Literal["tables", "json", "markdown", "csv"]


def form_of(output: Output, *, markdown: bool, csv: bool) -> Form:
    """How the result goes to standard output.

    Raises:
        UsageError: in two ways at once.
    """
    forms: tuple[tuple[Form, bool], ...] = (("json", output.json), ("markdown", markdown), ("csv", csv))
    wanted = [form for form, is_wanted in forms if is_wanted]
    if len(wanted) > 1:
        raise UsageError(
            f"--{wanted[0]} and --{wanted[1]} exclude each other: standard output takes one form",
            hint="-o FILE keeps the result as JSON besides",
        )
    return wanted[0] if wanted else "tables"


class Target:
    """Where one result goes."""

    def __init__(
        self, output: Output, form: Form, *, result_file: Path | None, plot: Path | None, overwrite: bool
    ) -> None:
        self._output = output
        self._form = form
        self._file = result_file
        self._plot = plot
        self._overwrite = overwrite
        self._is_ours = False
        self._warned = False
        self._last: BenchResult | None = None
        self._failures: list[LlamakvError] = []

    def check(self) -> None:
        """Find out what can be, before anything is measured.

        Raises:
            UsageError, ExistsError, WriteError: a file cannot be written as it was asked for.
        """
        if str(self._file) == "-":
            raise UsageError("--output takes a file, '-' is none", hint="--json writes the result to standard output")
        if self._file is not None:
            check_place(self._file, overwrite=self._overwrite)
        if self._plot is None:
            return
        if self._is_plot_shown:
            if self._form != "tables":
                raise UsageError(f"standard output cannot take both a plot and --{self._form}", hint="--plot plot.svg")
            return
        from llamakv.cli.plots import check_plot_file

        check_plot_file(self._plot, overwrite=self._overwrite)
        if self._plot == self._file:
            raise UsageError(f"both the result and the plot would go to '{self._plot}'", path=str(self._plot))

    def keep(self, result: BenchResult) -> None:
        """Take what there is so far. A file that cannot be written now is no reason to stop measuring."""
        self._last = result
        if self._file is None:
            return
        try:
            self._save(result)
        except (WriteError, ExistsError) as error:
            if not self._warned:
                self._output.warning(f"{error.message}; going on")
            self._warned = True

    def fail(self, name: str, error: LlamakvError) -> None:
        """Take why a row could not be measured."""
        named = copy.copy(error)
        named.message = f"{name} could not be measured: {error.message}"
        self._failures.append(named)

    def deliver(self, measure: Callable[[Reporter], BenchResult]) -> int:
        """Measure, then show and keep the result: also of a run that was interrupted or failed, what there is of it.
        Returns the exit status: not 0 where it is not whole, or could not be kept.

        Raises:
            LlamakvError: nothing was measured.
        """
        from llamakv.cli.reporting import running

        failure = None
        with running(self._output) as reporter:
            try:
                result = measure(reporter)
            except LlamakvError as error:
                if self._last is None:
                    raise
                failure = None if isinstance(error, InterruptedByUser) else error
                result = dataclasses.replace(self._last, interrupted=True)
        return self._conclude(result, failure)

    @property
    def _is_plot_shown(self) -> bool:
        return str(self._plot) == "-"

    def _save(self, result: BenchResult) -> None:
        assert self._file is not None
        write_result(self._file, result, overwrite=self._overwrite or self._is_ours)
        self._is_ours = True

    def _conclude(self, result: BenchResult, failure: LlamakvError | None) -> int:
        errors = self._keep_all(result)
        has_failed = _has_failed(result)
        is_nothing_done = bool(self._failures) and not _is_anything_measured(result)
        if is_nothing_done:
            errors = [*self._failures, *(error for error in errors if not isinstance(error, UsageError))]
        if failure is not None:
            errors.append(failure)
        elif result.interrupted:
            ending = self._output.interrupts.ending
            told = "what was measured is shown" if _is_anything_measured(result) else "nothing was measured"
            errors.append(InterruptedByUser(f"interrupted; {told}", status=130) if ending is None else ended(ending))
        if self._form == "json":
            status = "error" if is_nothing_done else "partial" if errors or has_failed else "ok"
            self._output.document(to_json(result_json(result)), status=status, errors=list(map(error_json, errors)))
        else:
            if not is_nothing_done or self._form == "csv":
                self._output.write_styled(shown(result, self._form))
            if self._is_plot_shown:
                self._show_plot(result)
            for error in errors:
                self._output.show(error)
            if self._file is not None and not any(isinstance(error, WriteError | ExistsError) for error in errors):
                self._output.note(f"kept in {self._file}")
        if is_nothing_done and failure is None and not result.interrupted:
            return exit_status(self._failures[0])
        if errors:
            return exit_status(errors[-1])
        return PARTLY_DONE if has_failed else 0

    def _keep_all(self, result: BenchResult) -> list[LlamakvError]:
        """Write the files; returns what went wrong, since the result is to be shown all the same."""
        errors: list[LlamakvError] = []
        for write in (self._save if self._file is not None else None, self._draw if self._plot is not None else None):
            try:
                if write is not None:
                    write(result)
            except LlamakvError as error:
                errors.append(error)
        return errors

    def _draw(self, result: BenchResult) -> None:
        if self._is_plot_shown or self._plot is None:
            return
        from llamakv.cli import plots
        from llamakv.cli.bench import plots as bench_plots

        panels = bench_plots.result_panels(result)
        if not panels:
            raise UsageError("there is nothing to draw: nothing was measured to its end")
        plots.write_panels(
            bench_plots.result_title(result), panels, self._plot,
            note=bench_plots.result_note(result), overwrite=self._overwrite,
        )  # fmt: skip

    def _show_plot(self, result: BenchResult) -> None:
        from llamakv.cli import plots, render
        from llamakv.cli.bench import plots as bench_plots

        for panel in bench_plots.result_panels(result):
            self._output.write_styled("\n" + plots.terminal_plot(panel, render.width()))


def _is_anything_measured(result: BenchResult) -> bool:
    has_strategies = result.strategies is not None and bool(result.strategies.rows)
    return has_strategies or any(row.is_measured or row.refused is not None for row in result.types)


def _has_failed(result: BenchResult) -> bool:
    has_strategy = result.strategies is not None and bool(result.strategies.failed)
    return has_strategy or any(row.failed is not None for row in result.types)


def shown(result: BenchResult, form: Form) -> str:
    """A result as text for standard output."""
    if form == "csv":
        from llamakv.cli.bench.as_csv import result_csv

        return result_csv(result)
    from llamakv.cli import render
    from llamakv.cli.bench import rows as bench_rows
    from llamakv.cli.bench import tables as bench_tables

    facts, tables = bench_rows.result_facts(result), bench_rows.result_tables(result)
    if form == "markdown":
        return "\n".join([bench_tables.markdown_facts(facts), *map(bench_tables.markdown_text, tables)])
    return "\n".join([render.report(facts), *map(bench_tables.terminal_text, tables)])


def compare(output: Output, path_a: Path, path_b: Path, form: Form) -> None:
    """Read two results and set them side by side.

    Raises:
        NotFoundError, ReadError, FormatError: one of them cannot be read.
    """
    from llamakv.cli.bench import comparison as bench_comparison
    from llamakv.ops.bench.compare import compare_results

    found = compare_results(read_result(path_a), read_result(path_b))
    if form == "json":
        data: dict[str, Json] = {"a": str(path_a), "b": str(path_b), **bench_comparison.comparison_json(found)}
        output.document(data)
        return
    if form == "csv":
        from llamakv.cli.bench.as_csv import comparison_csv

        output.write_styled(comparison_csv(found))
        return
    from llamakv.cli import render
    from llamakv.cli.bench import tables as bench_tables

    files = [("A", str(path_a)), ("B", str(path_b))]
    tables = bench_comparison.comparison_tables(found)
    if form == "markdown":
        parts = [bench_tables.markdown_facts(files), *map(bench_tables.markdown_text, tables)]
    else:
        parts = [render.report(files), *map(bench_tables.terminal_text, tables)]
    output.write_styled("\n".join(parts))
