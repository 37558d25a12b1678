"""``inspect``: finds out whether a session, a model file or a store is asked about."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from llamakv.cli import config
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.inspect_session import SessionInspectGroup, inspect_session
from llamakv.cli.commands.options import ModelInspectGroup, StoreGroup, complete_session
from llamakv.cli.commands.store_report import inspect_store
from llamakv.cli.output import Output
from llamakv.errors import ModelFileError, NotFoundError, UsageError

_GGUF, _GGUF_MAGIC = ".gguf", b"GGUF"
_OF_BOTH = frozenset({"layers", "plot", "force"})
"""Options that mean something for a model file and for a session."""

RefOrModel = Annotated[
    str | None,
    typer.Argument(metavar="[REF|MODEL.gguf]", autocompletion=complete_session, show_default=False,
                   help="Session: a name in the store, or a path to a session file. Or a model file. None: see "
                        "--store."),
]  # fmt: skip


class InspectCommand(TyperCommand):
    """Knows ``--store`` without a folder, which is the default store."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """See ``TyperCommand``."""
        return super().make_context(info_name, _with_folders(args), *rest, **extra)


def _with_folders(arguments: Sequence[str]) -> list[str]:
    """Arguments in which each ``--store`` has a folder: the default one where nothing follows, or another option."""
    found: list[str] = []
    is_option = True
    for index, argument in enumerate(arguments):
        found.append(argument)
        is_option = is_option and argument != "--"
        is_bare = index + 1 == len(arguments) or arguments[index + 1].startswith("-")
        if is_option and argument == "--store" and is_bare:
            found.append(str(config.store_dir(None)))
    return found


@takes_options
def inspect(
    output: Output, store: StoreGroup, session: SessionInspectGroup, model: ModelInspectGroup, ref: RefOrModel = None
) -> None:
    """Show what a session or a model takes or, with --store alone, what a whole store does.

    Example: llamakv inspect session.bin; llamakv inspect model.gguf --n-ctx 8192
    """
    of_session, of_model = _given(session), _given(model)
    if ref is None:
        if store.store is None or of_session or of_model:
            raise UsageError("missing argument 'REF': a session, or --store alone", hint="llamakv inspect --store")
        inspect_store(output, config.store_dir(store.store))
    elif _is_model(ref):
        _refuse([*of_session, *(["--store"] if store.store is not None else [])], f"a model file, and {ref} is one")
        from llamakv.cli.commands.inspect_model import inspect_model

        inspect_model(output, Path(ref), model)
    elif of_model and not Path(ref).exists() and Path(ref).suffix.lower() == _GGUF:
        raise NotFoundError(f"the model file {ref} does not exist", path=ref)
    else:
        _refuse([name for name in of_model if name[2:] not in _OF_BOTH], f"a session; {ref} is no model file")
        inspect_session(output, config.store_dir(store.store), ref, session, model)


def _given(group: SessionInspectGroup | ModelInspectGroup) -> list[str]:
    """The names of the options that were given."""
    fields = dataclasses.fields(group)
    return ["--" + f.name.replace("_", "-") for f in fields if getattr(group, f.name) != f.default]


def _refuse(options: Sequence[str], what: str) -> None:
    if options:
        raise UsageError(f"{options[0]} means nothing for {what}", hint="llamakv inspect --help")


def _is_model(ref: str) -> bool:
    """Whether an argument is a model file: by its name, or by how it begins."""
    path = Path(ref)
    try:
        if path.suffix.lower() == _GGUF and (path.is_dir() or path.is_fifo()):
            what = "a folder" if path.is_dir() else "a pipe"
            raise ModelFileError(f"{ref} is {what}, not a model file", path=ref)
        if not path.is_file():
            return False
        if path.suffix.lower() == _GGUF:
            return True
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except (OSError, ValueError):
        return False  # reading it as a session says why
