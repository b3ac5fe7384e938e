"""The tables of docs/reference/wire.md, from tasks and parameters of requests.

The rest of that page is written by hand.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from varlen.parameter import Parameter
from varlen.request.generation import OPTIONS, names_of
from varlen.request.row_parameters import ROW_PARAMETERS
from varlen.tasks import ITERATIVE_TASKS, ONE_SHOT_TASKS, TASKS, Task, TaskFacts, Tensor

# Tensors of a task.
_Tensors: TypeAlias = Callable[[TaskFacts], tuple[Tensor, ...]]
_Rows: TypeAlias = Sequence[tuple[str, ...]]


def wire_page(page: Path) -> str:
    """Return the text of a page with new tables, each the first below its heading."""
    text = page.read_text()
    for title, (columns, rows) in _tables().items():
        lines = [_line(columns.split(", ")), "|---" * len(columns.split(", ")) + "|"]
        table = "\n".join([*lines, *map(_line, rows)]) + "\n"
        heading = rf"(^#+ {re.escape(title)}$.*?)^\|.*?\n(?!\|)"
        match = re.search(heading, text, re.MULTILINE | re.DOTALL)
        assert match, f"{page} has no table below the heading {title}"
        text = text[: match.start()] + match[1] + table + text[match.end() :]
    return text


def _tables() -> Mapping[str, tuple[str, _Rows]]:
    """Return the columns and the rows of each table by its heading."""
    tensors = "type, shape, tasks, meaning"
    return {
        "Inputs": (f"input, {tensors}", _task_rows(lambda facts: facts.inputs)),
        "Outputs": (f"output, {tensors}", _task_rows(lambda facts: facts.outputs)),
        "Parameters": (
            "parameter, tasks, default, allowed, meaning",
            [_parameter_row(name, each) for name, each in ROW_PARAMETERS.items()],
        ),
        "Inputs of a prompt": (
            "input, type, shape, meaning",
            _tensor_rows(TASKS["generate"].inputs),
        ),
        "Outputs of generation": (
            "output, type, shape, meaning",
            _tensor_rows(TASKS["generate"].outputs),
        ),
        "Options of generation": (
            "option, default, allowed, meaning",
            [_option_row(name, each) for name, each in OPTIONS.items()],
        ),
    }


def _task_rows(tensors_of: _Tensors) -> _Rows:
    """Return a row for each tensor of tasks of one step."""
    tensors = [
        (task, tensor)
        for task, facts in TASKS.items()
        if task in ONE_SHOT_TASKS
        for tensor in tensors_of(facts)
    ]
    rows = []
    for name in dict.fromkeys(tensor.name for _, tensor in tensors):
        named = [(task, tensor) for task, tensor in tensors if tensor.name == name]
        kinds = [tensor for _, tensor in named]
        rows.append(
            (
                f"`{name}`",
                kinds[0].datatype,
                _joined((_shape(each) for each in kinds), ", or "),
                _tasks([task for task, _ in named]),
                _joined((each.meaning for each in kinds), "; "),
            )
        )
    return rows


def _tensor_rows(tensors: Iterable[Tensor]) -> _Rows:
    return [(f"`{each.name}`", each.datatype, _shape(each), each.meaning) for each in tensors]


def _parameter_row(name: str, parameter: Parameter) -> tuple[str, ...]:
    default = "" if parameter.default is None else _value(parameter.default)
    return (
        f"`{name}`",
        _tasks(parameter.tasks),
        default,
        parameter.allowed,
        parameter.description,
    )


def _option_row(field: str, option: Parameter) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in names_of(field))
    return names, _value(option.default), option.allowed, option.description


def _value(value: object) -> str:
    """Return a default as clients write it."""
    words = {None: "null", (): "none", True: "true", False: "false"}
    is_number = type(value) in (int, float)
    return f"{value:g}" if is_number else words.get(value, str(value))  # type: ignore[call-overload]


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(tensor.shape)}]"


def _tasks(tasks: Iterable[Task]) -> str:
    named = set(tasks)
    if named >= {*ONE_SHOT_TASKS}:
        return "all tasks" if named >= {*ITERATIVE_TASKS} else "all of these"
    return ", ".join(f"`{task}`" for task in tasks)


def _joined(texts: Iterable[str], separator: str) -> str:
    return separator.join(dict.fromkeys(texts))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
