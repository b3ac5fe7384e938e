"""The page of requests and answers has the tensors, parameters and ranges of the code."""

import re
from typing import get_args

import pytest

from tests.ci.scripts import PROJECT
from varlen.models.checkpoint.labels import Labels
from varlen.request import generation as generation_options
from varlen.request.generation import GenerationOptions
from varlen.request.scores import SCORE_FUNCTIONS
from varlen.request.vectors import VECTOR_DTYPES
from varlen.tasks import ONE_SHOT_TASKS, Task
from varlen.wire import generate as wire_generate
from varlen.wire import rows as wire
from varlen.wire.outputs import ModelOutputs, TensorSpec

PAGE = (PROJECT / "docs/reference/wire.md").read_text()
TYPES = {"TYPE_STRING": "BYTES"}


def table(title: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    below = re.split(rf"^#+ {re.escape(title)}$", PAGE, maxsplit=1, flags=re.MULTILINE)[1]
    rows = re.search(r"^\|.*?\n(?!\|)", below, re.MULTILINE | re.DOTALL)
    assert rows
    lines = rows[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def row(rows: list[list[str]], name: str) -> list[str]:
    """Return the row of a name, which may share it with others."""
    found = [each for each in rows if f"`{name}`" in each[0]]
    assert len(found) == 1, f"docs/reference/wire.md has {len(found)} rows of {name}"
    return found[0]


def check_tensors(specs: tuple[TensorSpec, ...], rows: list[list[str]]) -> None:
    for spec in specs:
        assert row(rows, spec.name)[1] == TYPES.get(
            spec.data_type, spec.data_type.removeprefix("TYPE_")
        )


def tasks_in(cell: str, rows: list[list[str]], place: int) -> set[str]:
    """Return the tasks that a cell names."""
    if cell == "the same":
        return tasks_in(rows[place - 1][3], rows, place - 1)
    one_shot = set(ONE_SHOT_TASKS)
    named = set(re.findall(r"`(\w+)`", cell))
    if cell.startswith("all but"):
        return one_shot - named
    return one_shot if cell.startswith("all") else named


@pytest.mark.parametrize("task", ONE_SHOT_TASKS)
def test_inputs_and_outputs_have_their_types_and_tasks(task: Task) -> None:
    inputs, outputs = table("Inputs"), table("Outputs")
    specs = ModelOutputs(task, 2, Labels(("a", "b"), "none"), normalize=False).specs

    for found, rows in ((wire.input_specs(task), inputs), (specs, outputs)):
        check_tensors(found, rows)
        listed = {
            re.findall(r"`(\w+)`", cells[0])[0]
            for place, cells in enumerate(rows)
            if task in tasks_in(cells[3], rows, place)
        }
        assert listed == {spec.name for spec in found}


def test_every_parameter_has_a_row_with_its_tasks() -> None:
    rows = table("Parameters")

    assert {name for cells in rows for name in re.findall(r"`(\w+)`", cells[0])} == set(
        wire._PARAMETERS
    )
    for name, tasks in wire._TASKS_OF_PARAMETER.items():
        assert set(re.findall(r"`(\w+)`", row(rows, name)[1])) == set(tasks)


@pytest.mark.parametrize(
    "name, words",
    [("output_dtype", VECTOR_DTYPES), ("activation", ("auto", *SCORE_FUNCTIONS))],
)
def test_words_of_parameters_are_those_of_the_code(name: str, words: tuple[str, ...]) -> None:
    assert re.findall(r"`(\w+)`", row(table("Parameters"), name)[2]) == list(words)


def test_tensors_of_generation_have_their_types() -> None:
    inputs, outputs = table("Inputs of a prompt"), table("Outputs of generation")
    named = tuple(spec for spec in wire_generate.INPUTS if not spec.name.startswith("return_"))

    check_tensors(named, inputs)
    check_tensors(wire_generate.OUTPUTS, outputs)
    assert len(inputs) == len(named) + 1
    assert len(outputs) == len(wire_generate.OUTPUTS)


def test_options_of_generation_have_their_defaults_and_ranges() -> None:
    rows = table("Options of generation")
    listed = [name for cells in rows for name in re.findall(r"`(\w+)`", cells[0])]
    defaults = GenerationOptions()

    assert sorted(listed) == sorted(wire_generate._GENERATION_PARAMETERS)
    for name in set(listed) - {"num_return_sequences", "structured_outputs", "guided_decoding"}:
        default = getattr(defaults, name)
        shown = {None: "null", (): "none", True: "true", False: "false"}
        is_number = type(default) in (int, float)
        assert row(rows, name)[1] == (f"{default:g}" if is_number else shown.get(default, default))
        if name in generation_options._RANGES:
            assert row(rows, name)[2] == generation_options._RANGES[name].allowed


def test_all_tasks_are_named() -> None:
    assert [task for task in get_args(Task) if f"`{task}`" not in PAGE] == []
