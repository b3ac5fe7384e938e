"""The edge cases that need no weights, on a gateway over fake models."""

import pytest

from tests.edges.case import Answer, check
from tests.edges.table import EDGES


@pytest.mark.parametrize(
    "edge", [each for each in EDGES if not each.needs_weights], ids=lambda edge: edge.name
)
def test_the_answer_is_right(edge, send):
    def ask(route, body, role, headers):
        response = send("POST", f"{route}?model={role}", body, headers=headers)
        return Answer(response.status_code, response.text)

    check(edge, ask)


def test_no_two_cases_have_one_name():
    names = [edge.name for edge in EDGES]

    assert sorted(names) == sorted(set(names))
