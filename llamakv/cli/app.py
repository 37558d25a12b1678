"""The ``llamakv`` command: its commands, and the one place where errors become exit statuses."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from llamakv.cli import streams
from llamakv.cli.output import Output, exit_status
from llamakv.cli.signals import ended
from llamakv.errors import AbortedError, InterruptedByUser, LlamakvError, UsageError, WriteError

PROGRAM = "llamakv"
PIPE_CLOSED_STATUS = 141
"""What a shell reports for a program that wrote into a closed pipe (128 + SIGPIPE)."""

_EXIT_STATUSES = """\
Exit status:

 0  done                       13  damaged file, or a newer format
 1  unexpected                 14  does not fit the model
 2  wrong usage                15  out of cells, sequences, context or budget
 3  partly done                16  could not write
10  not found                 130  interrupted (Ctrl-C)
11  exists                    143  ended by SIGTERM
12  in use elsewhere

Example: llamakv chat --save session.bin"""

_UsageFault: type[Exception] = typer.BadParameter.__mro__[1]
"""The base of all that typer says about wrong options; it has no public name."""

COMMANDS = {
    "chat": "chat.chat",
    "save": "save.save",
    "warm": "warm.warm",
    "load": "load.load",
    "fork": "fork.fork",
    "inspect": "inspect.inspect",
    "bench": "bench.bench",
    "serve": "serve.serve",
    "ls": "listing.ls",
    "rm": "sessions.rm",
    "verify": "checks.verify",
    "repair": "checks.repair",
    "compact": "sessions.compact",
    "budget": "limits.budget",
    "prune": "limits.prune",
    "gc": "limits.gc",
    "log": "history.log",
    "diff": "history.diff",
    "tag": "lineage.tag",
    "note": "lineage.note",
    "pin": "lineage.pin",
    "unpin": "lineage.unpin",
    "mv": "copying.mv",
    "cp": "copying.cp",
    "export": "copying.export",
    "import": "copying.import_",
}
"""Commands in the order of the help, with their modules in ``cli.commands`` and their names there."""


@functools.cache
def command_of(names: Iterable[str] = tuple(COMMANDS)) -> Any:
    """The command line with these commands. Only their modules are imported: all of them take a tenth of a second."""
    app = typer.Typer(
        name=PROGRAM,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        invoke_without_command=True,
        context_settings={"help_option_names": ["--help", "-h"]},
        epilog=_EXIT_STATUSES,
    )
    app.callback()(_root)
    for name in names:
        module_name, function_name = COMMANDS[name].split(".")
        module = importlib.import_module(f"llamakv.cli.commands.{module_name}")
        own = {"cls": module.InspectCommand} if name == "inspect" else {}
        app.command(name, **own)(getattr(module, function_name))
    return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        from llamakv import __version__

        try:
            engine = f"llama-cpp-python {version('llama-cpp-python')}"
        except PackageNotFoundError:
            engine = "llama-cpp-python is not installed"
        typer.echo(f"{PROGRAM} {__version__} ({engine})")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_show_version, is_eager=True, help="Show the versions and exit."
        ),
    ] = False,
) -> None:
    """Keep what a language model has already read: save, resume and inspect llama.cpp sessions."""
    output: Output = ctx.obj
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    else:
        output.command = ctx.invoked_subcommand


def main() -> None:
    """Run the command line and leave with its exit status."""
    status = run(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; everything it has to say has been said."""
    streams.prepare()
    output = Output()
    output.interrupts.install()
    try:
        status = _run_guarded(arguments, output)
        sys.stdout.flush()
    except (streams.PipeClosed, BrokenPipeError):
        streams.abandon(sys.stdout)
        return PIPE_CLOSED_STATUS
    except WriteError as error:  # a failure that could not be written as JSON
        output.show(error)
        return error.exit_status
    except OSError as error:
        streams.abandon(sys.stdout)
        output.json = False
        output.show(WriteError(f"standard output could not be written: {error.strerror}"))
        return WriteError.exit_status
    return status


def _run_guarded(arguments: Sequence[str], output: Output) -> int:
    error: LlamakvError
    try:
        status = _invoke(arguments, output)
    except _UsageFault as fault:
        error = _usage_error(fault, arguments, output)
    except LlamakvError as known:
        error = _ended_by_signal(known, output) or known
    except (KeyboardInterrupt, typer.Abort):
        error = InterruptedByUser("interrupted", status=130)
    except (streams.PipeClosed, BrokenPipeError):
        raise
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # typer's own way to deal with it
            raise streams.PipeClosed from leaving
        raise
    except Exception as unexpected:
        if isinstance(unexpected, OSError) and unexpected.errno == errno.ENOSPC and unexpected.filename is None:
            raise  # help that could not be written: anything else that writes says so itself
        # whatever a signal raised may have been caught and raised again as something else, by an import for one
        ending = output.interrupts.ending
        error = ended(ending) if ending is not None else _internal_error(unexpected, output)
    else:
        if status == InterruptedByUser.exit_status and output.json:
            output.failure(InterruptedByUser("interrupted", status=130))
        return status
    if output.verbose and isinstance(error, InternalError):
        import traceback

        traceback.print_exception(error.__cause__)
    output.failure(error)
    return exit_status(error)


def _ended_by_signal(error: LlamakvError, output: Output) -> LlamakvError | None:
    """The signal behind an error: an op that was told to stop, or a stream that broke, since a terminal that closes
    sends SIGHUP, and can then be neither read nor written."""
    is_stream = isinstance(error, WriteError) and "path" not in error.fields
    is_stop = isinstance(error, InterruptedByUser | AbortedError)
    return ended(output.interrupts.ending) if (is_stream or is_stop) and output.interrupts.ending is not None else None


def _invoke(arguments: Sequence[str], output: Output) -> int:
    wanted = (arguments[0],) if arguments and arguments[0] in COMMANDS else tuple(COMMANDS)
    status = command_of(wanted).main(list(arguments), prog_name=PROGRAM, standalone_mode=False, obj=output)
    return status if isinstance(status, int) else 0


def _internal_error(unexpected: Exception, output: Output) -> LlamakvError:
    lines = str(unexpected).splitlines() or [""]
    what = f"{type(unexpected).__name__}: {lines[0]}" if lines[0] else type(unexpected).__name__
    advice = "" if output.verbose else " (run again with -v for a traceback)"
    error = InternalError(f"internal error: {what}{advice}")
    error.__cause__ = unexpected
    return error


class InternalError(LlamakvError):
    """A bug of ours, as the user sees it."""

    code = "internal"


def _usage_error(fault: Exception, arguments: Sequence[str], output: Output) -> UsageError:
    """What typer says about wrong options, as one line of ours."""
    output.json = output.json or "--json" in arguments
    named = next((name for name in arguments if not name.startswith("-")), "")
    output.command = output.command or (named if named in COMMANDS else "")
    message = " ".join(str(getattr(fault, "format_message", lambda: fault)()).split()).rstrip(".")
    command = f"{PROGRAM} {output.command}".strip()
    return UsageError(message[:1].lower() + message[1:], hint=f"{command} --help")
