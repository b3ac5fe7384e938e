"""The page of requests and answers names every tensor, parameter and task of the code.

Its tables are written from the code: tests/ci/test_write_reference.py compares them.
"""

import re
from typing import get_args

import pytest

from tests.ci.scripts import PROJECT
from varlen.request.generation import OPTIONS, names_of
from varlen.request.row_parameters import ROW_PARAMETERS
from varlen.tasks import ITERATIVE_TASKS, ONE_SHOT_TASKS, TASKS, Task

PAGE = (PROJECT / "docs/reference/wire.md").read_text()


def names_in(title: str) -> list[str]:
    """Return the names in the first column of the first table below a heading."""
    below = re.split(rf"^#+ {re.escape(title)}$", PAGE, maxsplit=1, flags=re.MULTILINE)[1]
    rows = re.search(r"^\|.*?\n(?!\|)", below, re.MULTILINE | re.DOTALL)
    assert rows
    return [
        name
        for line in rows[0].splitlines()[2:]
        for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
    ]


@pytest.mark.parametrize(
    "title, tasks, section",
    [
        ("Inputs", ONE_SHOT_TASKS, "inputs"),
        ("Outputs", ONE_SHOT_TASKS, "outputs"),
        ("Inputs of a prompt", ITERATIVE_TASKS, "inputs"),
        ("Outputs of generation", ITERATIVE_TASKS, "outputs"),
    ],
)
def test_every_tensor_has_one_row(title, tasks, section):
    tensors = {tensor.name for task in tasks for tensor in getattr(TASKS[task], section)}

    assert sorted(names_in(title)) == sorted(tensors)


def test_every_parameter_has_one_row():
    assert names_in("Parameters") == list(ROW_PARAMETERS)
    names = [name for field in OPTIONS for name in names_of(field)]
    assert names_in("Options of generation") == names


def test_all_tasks_are_named():
    assert list(TASKS) == list(get_args(Task))
    assert [task for task in TASKS if f"`{task}`" not in PAGE] == []
