"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Options = TypeVar("_Options", bound="DataclassInstance")
_CONTEXT = inspect.Parameter(
    "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
)


def with_options(
    options: type[_Options],
) -> Callable[[Callable[[typer.Context, _Options], None]], Callable[..., None]]:
    """Return a decorator for a command of typer that takes a context and options.

    Args:
        options: a dataclass; each field of its `__init__` is annotated as typer annotates a parameter.
    """
    hints = get_type_hints(options, include_extras=True)
    # the options of a class come before the options of its bases
    order = [name for kind in options.__mro__ for name in inspect.get_annotations(kind)]
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in sorted(fields(options), key=lambda each: order.index(each.name))
        if each.init
    ]

    def decorate(function: Callable[[typer.Context, _Options], None]) -> Callable[..., None]:
        def command(context: typer.Context, **values: Any) -> None:
            function(context, options(**values))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {"context": typer.Context} | {
            each.name: each.annotation for each in parameters
        }
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # read by typer
            [_CONTEXT, *parameters]
        )
        return command

    return decorate
