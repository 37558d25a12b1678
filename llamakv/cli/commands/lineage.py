"""``tag``, ``note``, ``pin`` and ``unpin``: what the user says of sessions. None of them needs the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, requests
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import Ref, StoreGroup, complete_session
from llamakv.cli.output import Json, Output
from llamakv.errors import UsageError

if TYPE_CHECKING:
    from llamakv.cli.refs import Target

Tags = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TAG]...", show_default=False, help="Words to find it by; without any, its tags are shown."
    ),
]
Text = Annotated[
    str | None,
    typer.Argument(metavar="[TEXT]", show_default=False,
                   help="What to note, in place of what is there; - is standard input. Without it, the note is shown."),
]  # fmt: skip
Remove = Annotated[bool, typer.Option("--remove", metavar="", help="Take it away instead.")]
Refs = Annotated[
    list[str],
    typer.Argument(metavar="REF...", autocompletion=complete_session, show_default=False,
                   help="Sessions: names in the store, or paths to session files."),
]  # fmt: skip


@takes_options
def tag(output: Output, ref: Ref, store: StoreGroup, tags: Tags = None, remove: Remove = False) -> None:
    """Show a session's tags, give it more, or take some away.

    Example: llamakv tag plan holiday draft
    """
    from llamakv.cli import refs
    from llamakv.ops import lineage
    from llamakv.ops.inspect import inspect_session

    found = refs.existing(config.store_dir(store.store), ref)
    named = [requests.argument(name) for name in tags or ()]
    if remove and not named:
        raise UsageError("name the tags to take away", hint=f"llamakv tag --remove {ref} TAG")
    if not named:
        now = inspect_session(found.path).info.record.lineage.tags
        output.write("" if output.json else "".join(f"{name}\n" for name in now))
    else:
        info = lineage.change_tags(found.path, **{"remove" if remove else "add": named})
        now = info.record.lineage.tags
        if not output.json:
            output.note(f"{refs.shown(found)}: {'tags ' + ', '.join(now) if now else 'no tags'}")
    output.document({"session": refs.shown(found), "path": str(found.path), "tags": list(now)})


@takes_options
def note(output: Output, ref: Ref, store: StoreGroup, text: Text = None, remove: Remove = False) -> None:
    """Show a session's note, write another one, or take it away.

    Example: llamakv note plan "the one with the train"
    """
    from llamakv.cli import refs
    from llamakv.ops import lineage
    from llamakv.ops.inspect import inspect_session

    found = refs.existing(config.store_dir(store.store), ref)
    if text is not None and remove:
        raise UsageError("a note is either written or removed", hint=f"llamakv note --remove {ref}")
    if text is None and not remove:
        info = inspect_session(found.path).info
    else:
        words = "" if text is None else requests.read_text("-") if text == "-" else requests.argument(text)
        if text is not None and not words.strip():
            raise UsageError("the note is empty", hint=f"llamakv note --remove {ref} takes it away")
        info = lineage.set_note(found.path, words)
    mark, now = lineage.split_note(info.record.lineage.note)
    if not output.json:
        _tell_note(output, found, mark, now, is_asked=text is None and not remove)
    output.document({"session": refs.shown(found), "path": str(found.path), "note": now, "incomplete": mark or None})


def _tell_note(output: Output, found: Target, mark: str, now: str, *, is_asked: bool) -> None:
    from llamakv.cli import refs

    if not is_asked:
        output.note(f"{refs.shown(found)}: {'noted' if now else 'no note'}")
        return
    if mark:
        output.note(f"{refs.shown(found)} is {mark}")
    if now:
        output.write(f"{now}\n")
    else:
        output.note(f"{refs.shown(found)} has no note")


@takes_options
def pin(output: Output, refs: Refs, store: StoreGroup) -> None:
    """Keep sessions from being removed to make room.

    Example: llamakv pin plan report.bin
    """
    _set_pinned(output, store, refs, pinned=True)


@takes_options
def unpin(output: Output, refs: Refs, store: StoreGroup) -> None:
    """Let sessions be removed to make room again.

    Example: llamakv unpin plan
    """
    _set_pinned(output, store, refs, pinned=False)


def _set_pinned(output: Output, store: StoreGroup, names: list[str], *, pinned: bool) -> None:
    from llamakv.cli import refs
    from llamakv.ops import lineage
    from llamakv.ops.inspect import inspect_session

    root = config.store_dir(store.store)
    found = [refs.existing(root, name) for name in names]
    for target in found:
        inspect_session(target.path)  # all can be read before the first is changed
    for target in found:
        lineage.set_pinned(target.path, pinned)
        if not output.json:
            output.note(f"{'pinned' if pinned else 'unpinned'} {refs.shown(target)}")
    output.document({"sessions": [_pinned_json(target, pinned) for target in found]})


def _pinned_json(target: Target, pinned: bool) -> Json:
    from llamakv.cli import refs

    return {"session": refs.shown(target), "path": str(target.path), "pinned": pinned}
