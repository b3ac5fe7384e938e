"""The text of docs/reference/commands.md, from the options of the commands themselves."""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from string import Template
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from varlen_client.cli.main import PANELS, find_commands
from varlen_client.cli.requests import RequestOptions, RowOptions

# Names of the options that all commands with requests have. The field `command` is none.
_REQUEST = {field.name for field in fields(RequestOptions)} - {"command"}
_SHARED = {field.name for field in fields(RowOptions)} - {"command"}
# Names of values in the table by their type.
_VALUES = {Path: "PATH", int: "N", float: "N", str: "TEXT"}

_PAGE = Template("""\
# Commands

<!-- Written by `$command` from the commands themselves. -->

`varlen` is installed with the package; `varlen --version` names it. Results go to stdout, messages to stderr.
On a terminal, stderr has a progress bar too.
The exit code is 0, 1 if the server or the request failed, or 2 if the arguments are wrong.

$contents

The package `varlen-client` alone has `serve-http`, `status` and the commands that ask; `varlen` has them all.
The commands of `varlen` are modules too, such as `python -m varlen_tools.fetch`.

## Options of requests

All commands that send requests have these, except that `generate`, `translate` and `question-answer` do not truncate.

$shared
$commands""")


def commands_page(command: str) -> str:
    """Return the text of docs/reference/commands.md, which `command` writes."""
    loaded = {name: each.load() for name, each in find_commands().items()}
    return _PAGE.substitute(
        command=command,
        contents="\n".join(_contents()),
        shared=_table([row for name, row in _rows(loaded["embed"]) if name in _SHARED]),
        commands="\n".join(
            text
            for panel, names in PANELS.items()
            for text in (f"## {panel}\n", *(_parts(name, loaded[name]) for name in names))
        ),
    )


def _contents() -> Iterator[str]:
    """Yield a line for each panel of `varlen --help`, with links to its commands."""
    for panel, names in PANELS.items():
        links = (f"[`{name}`](#varlen-{name})" for name in names)
        yield f"* **{panel}**: {', '.join(links)}"


def _parts(name: str, command: Any) -> str:
    """Return the part of the page on a command, and on those below it."""
    below = getattr(command, "commands", {}).items()
    parts = [(name, command), *((f"{name} {its}", each) for its, each in below)]
    return "\n".join(_part(f"### varlen {name}", each) for name, each in parts)


def _part(heading: str, command: Any) -> str:
    """Return the part of the page on one command."""
    rows, note = dict(_rows(command)), ""
    if rows.keys() >= _REQUEST:
        rows = {name: row for name, row in rows.items() if name not in _SHARED}
        note = "\nAnd the [options of requests](#options-of-requests).\n"
    return f"{heading}\n\n{command.help}\n\n{_table(rows.values())}{note}"


def _rows(command: Any) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield the name and the cells of each argument and option."""
    parameters = inspect.signature(command.callback, eval_str=True).parameters
    for each in command.params:
        if each.name not in parameters:
            continue
        annotation = parameters[each.name].annotation
        kind, info = get_args(annotation) or (annotation, None)
        yield each.name, (_shown_name(each, kind), _default(each), _description(each, kind, info))


def _shown_name(parameter: Any, kind: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`" + ("..." if parameter.nargs == -1 else "")
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.is_flag:
        return names
    return names.removesuffix("`") + f" {_value(kind)}`"


def _value(kind: Any) -> str:
    """Return the name of an option's value."""
    return next((_VALUES[each] for each in _types(kind) if each in _VALUES), "WORD")


def _types(kind: Any) -> Iterator[Any]:
    """Yield the types of a union or of the items of a list, without None."""
    if get_origin(kind) in (Union, UnionType, list):
        for each in get_args(kind):
            yield from _types(each)
    elif kind is not type(None):
        yield kind


def _words(kind: Any) -> list[str]:
    """Return the words that an option allows; none if it allows others too."""
    found: list[str] = []
    for each in _types(kind):
        if get_origin(each) is Literal:
            found += get_args(each)
        elif isinstance(each, type) and issubclass(each, Enum):
            found += [member.value for member in each]
    return found


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False:
        return "required" if parameter.required else ""
    if value is True:
        return f"`{parameter.opts[0]}`"
    values = value if isinstance(value, (list, tuple)) else [value]
    return ", ".join(f"`{_plain(each)}`" for each in values)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return f"{value:g}" if isinstance(value, float) else value


def _description(parameter: Any, kind: Any, info: Any) -> str:
    # `\[` is a bracket in the markup of help texts
    text = (getattr(info, "help", None) or "").replace("\\[", "[")
    sentences = [text if text.endswith((".", '."')) else f"{text}."] if text else []
    if words := _words(kind):
        sentences.append("Allowed: " + ", ".join(f"`{word}`" for word in words) + ".")
    elif getattr(info, "min", None) is not None:
        range_ = f"from {info.min:g}" + ("" if info.max is None else f" to {info.max:g}")
        sentences.append(f"Allowed: {range_}.")
    if parameter.envvar:
        sentences.append(f"Environment: `{parameter.envvar}`.")
    return " ".join(sentences)


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    header = ("argument or option", "default", "description")
    lines = (f"| {' | '.join(row)} |" for row in (header, ("---",) * 3, *rows))
    return "\n".join(lines) + "\n"
