"""Which kind of model the server takes a task for."""

from varlen.server.kinds import Prompts, Rows, kind_of
from varlen.tasks import ITERATIVE_TASKS, ONE_SHOT_TASKS, input_specs


def test_a_task_is_served_by_the_kind_of_its_row():
    assert {kind_of(task) for task in ITERATIVE_TASKS} == {Prompts}
    assert {kind_of(task) for task in ONE_SHOT_TASKS} == {Rows}


def test_the_first_inputs_of_a_kind_are_inputs_of_its_tasks():
    for task in (*ITERATIVE_TASKS, *ONE_SHOT_TASKS):
        names = {spec.name for spec in input_specs(task)}
        first = {kind[0] for kind in kind_of(task).inputs}
        # spans and answers have offsets of texts, so their requests have no token ids
        of_texts = task in ("extract", "question_answer")
        assert first <= names or (of_texts and first & names == {"text"})
