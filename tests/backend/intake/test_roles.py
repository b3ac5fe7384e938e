"""Roles of texts: the tokens that they add, and those that have vectors."""

import numpy as np

from tests.backend.requests import prompt_of
from varlen.intake.roles import Expansion, TextRole
from varlen.request.request import Vectors


def values_of(prompt):
    fields = prompt.token_ids, prompt.type_ids, prompt.payload_tokens(Vectors)
    values = (None if each is None else each.tolist() for each in fields)
    return *values, prompt.payload_count(Vectors)


def test_added_tokens_have_type_zero_and_are_read_only_if_the_role_says_so():
    skipped = np.array([7], dtype=np.int32)
    prompt = prompt_of([7, 8, 9], types=[0, 1, 1])

    unread = TextRole(expansion=Expansion(5, 4, is_read=False), skipped=skipped).place(prompt)
    read = TextRole(expansion=Expansion(5, 4, is_read=True)).place(prompt)

    assert values_of(unread) == ([7, 8, 9, 4, 4], [0, 1, 1, 0, 0], [1, 2, 3, 4], 3)
    assert values_of(read) == ([7, 8, 9, 4, 4], [0, 1, 1, 0, 0], None, None)
