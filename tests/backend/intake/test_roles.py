"""Roles of texts: the tokens that they add, and those that have vectors."""

import numpy as np
import pytest

from tests.backend.requests import prompt_of
from varlen.intake.roles import Expansion, TextRole, TextRoles
from varlen.request.request import Vectors


def values_of(prompt):
    fields = prompt.token_ids, prompt.type_ids, prompt.payload_tokens(Vectors)
    values = (None if each is None else each.tolist() for each in fields)
    return *values, prompt.payload_count(Vectors)


def test_added_tokens_have_type_zero_and_are_read_only_if_the_role_says_so():
    skipped = np.array([7], dtype=np.int32)
    prompt = prompt_of([7, 8, 9], types=[0, 1, 1])

    unread = TextRole(expansion=Expansion(5, 4, is_attended=False), skipped=skipped).place(prompt)
    read = TextRole(expansion=Expansion(5, 4, is_attended=True)).place(prompt)

    assert values_of(unread) == ([7, 8, 9, 4, 4], [0, 1, 1, 0, 0], [1, 2, 3, 4], 3)
    assert values_of(read) == ([7, 8, 9, 4, 4], [0, 1, 1, 0, 0], None, None)


# The names of prompts in config_sentence_transformers.json of these models.
PUBLISHED = {
    "e5": ("query", "passage"),
    "mxbai": ("query",),
    "stella": ("s2p_query", "s2s_query"),
    "qwen": ("query", "document"),
    "jina": ("retrieval.query", "retrieval.passage", "separation", "classification"),
    "nomic": ("query", "passage", "Classification", "Clustering", "STS"),
    "gemma": ("query", "document", "Clustering", "Classification", "Retrieval-query", "STS"),
}


def roles_named(names, default=""):
    return TextRoles({name: TextRole(f"{name}: ") for name in names}, TextRole(default))


@pytest.mark.parametrize(
    "model, query, document, classification, clustering",
    [
        ("e5", "query: ", "passage: ", None, None),
        ("mxbai", "query: ", "", None, None),
        ("stella", "s2p_query: ", "", None, None),
        ("qwen", "query: ", "document: ", None, None),
        (
            "jina",
            *(
                f"{n}: "
                for n in ("retrieval.query", "retrieval.passage", "classification", "separation")
            ),
        ),
        ("nomic", "query: ", "passage: ", "Classification: ", "Clustering: "),
        ("gemma", "query: ", "document: ", "Classification: ", "Clustering: "),
    ],
)
def test_an_input_type_chooses_the_prompt_of_its_meaning(
    model, query, document, classification, clustering
):
    roles = roles_named(PUBLISHED[model], default="query: ")

    def prompts_of(*types):
        return {role.prompt if (role := roles.of_type(each)) else None for each in types}

    assert prompts_of("query", "search_query") == {query}
    assert prompts_of("document", "passage", "search_document") == {document}
    assert prompts_of("classification") == {classification}
    assert prompts_of("clustering") == {clustering}


def test_documents_with_a_prompt_do_not_make_queries_plain():
    assert roles_named(["document"]).of_type("query") is None


@pytest.mark.parametrize("named", [{}, {"query": TextRole(), "document": TextRole()}])
def test_a_model_without_prompts_takes_every_input_type(named):
    roles = TextRoles(named)

    for each in ("query", "passage", "classification", "clustering"):
        assert roles.of_type(each) == TextRole()


def test_a_role_may_differ_without_a_prompt():
    # of a late-interaction model
    roles = TextRoles({"query": TextRole(max_tokens=8), "document": TextRole(max_tokens=30)})

    assert roles.of_type("search_query").max_tokens == 8
    assert roles.of_type("passage").max_tokens == 30
    assert roles.of_type("clustering") is None
