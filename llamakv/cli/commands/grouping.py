"""Commands that ask for whole groups of options, and for the ``Output`` they write to."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TypeVar, cast, get_type_hints

import typer

from llamakv.cli.commands.options import OutputGroup
from llamakv.cli.output import Output

Group = TypeVar("Group")


def takes_options(function: Callable[..., None]) -> Callable[..., None]:
    """Turn a command that asks for an ``Output`` and groups of options into one with a parameter per option."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type] = {}
    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is Output:
            continue
        if dataclasses.is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters.extend(_parameters(hints[name]))
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
    parameters.extend(_parameters(OutputGroup))

    def run(*, ctx: typer.Context, **values: object) -> None:
        output = cast(Output, ctx.obj)
        settings = _take(OutputGroup, values)
        output.json, output.verbose, output.quiet = settings.json, settings.verbose, settings.quiet
        grouped: dict[str, object] = {name: _take(group, values) for name, group in groups.items()}
        function(output, **values, **grouped)

    run.__doc__ = function.__doc__
    run.__name__ = function.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@functools.cache
def _parameters(group: type) -> tuple[inspect.Parameter, ...]:
    hints = get_type_hints(group, include_extras=True)
    return tuple(
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    )


def _take(group: type[Group], values: dict[str, object]) -> Group:
    """Move a group's values out of all of a command's."""
    names = [field.name for field in dataclasses.fields(group)]  # type: ignore[arg-type]
    return group(**{name: values.pop(name) for name in names})
