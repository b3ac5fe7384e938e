"""Rerankers whose files do not say how they rank match their authors' programs."""

import json

import numpy as np
import pytest

from tests.checkpoints import save_checkpoint, set_fields
from tests.closeness import assert_close, encoder_roundings
from tests.rerank_forms import (
    FORMS,
    JUDGE,
    PAIRS,
    QUESTION_OF_BGE,
    RELEVANCE,
    expected_scores,
    save_reranker,
)
from varlen import Encoder
from varlen.errors import RequestError
from varlen.models.checkpoint_folder import Checkpoint

from ..refusals import refused_checkpoint as refused


@pytest.mark.parametrize("form", FORMS)
def test_scores_match_the_authors_program(tmp_path, form):
    folder = save_reranker(tmp_path, FORMS[form][0])

    with Encoder.from_pretrained(folder, dtype="fp32", rerank_form=form) as encoder:
        mixed = encoder.classify(PAIRS)
        alone = np.concatenate([encoder.classify([pair]) for pair in PAIRS])
        if form == "bge":
            with pytest.raises(RequestError, match="has instruction, which"):
                encoder.classify(PAIRS, instruction="find the river?")
            told = None
        else:
            told = encoder.classify(PAIRS, instruction="find the river?")

    roundings = 4 * encoder_roundings(folder)
    assert_close(mixed, expected_scores(folder, form, PAIRS), roundings=roundings)
    assert_close(alone, mixed, roundings=roundings)
    if told is None:
        return
    expected = expected_scores(folder, form, PAIRS, "find the river?")
    assert_close(told, expected, roundings=roundings)
    assert not np.allclose(told, mixed)


@pytest.mark.parametrize("form", FORMS)
def test_a_long_pair_is_cut_as_by_the_authors_program(tmp_path, form):
    folder = save_reranker(tmp_path, FORMS[form][0])
    limit = 600
    pairs = [("the cat", "river " * 300), ("is it a cat? " * 100, "river " * 100), ("a", "b")]

    with Encoder.from_pretrained(
        folder, dtype="fp32", rerank_form=form, max_sequence_tokens=limit
    ) as encoder:
        actual = encoder.classify(pairs, truncate=True)
        with pytest.raises(
            RequestError, match="row 0: text has .* tokens; this model takes at most"
        ):
            encoder.classify(pairs)

    expected = expected_scores(folder, form, pairs, limit=limit)
    assert_close(actual, expected, roundings=4 * encoder_roundings(folder))


@pytest.mark.parametrize("form", FORMS)
def test_bf16_scores_are_near_those_in_fp32(tmp_path, form):
    folder = save_reranker(tmp_path, FORMS[form][0])
    documents = ["river " * count for count in range(1, 40)]
    pairs = [("is it a cat?", document) for document in documents]

    with Encoder.from_pretrained(folder, dtype="bf16", rerank_form=form) as encoder:
        actual = encoder.classify(pairs)[:, 0]

    expected = expected_scores(folder, form, pairs)[:, 0]
    cosine = actual @ expected / (np.linalg.norm(actual) * np.linalg.norm(expected))
    assert cosine > 0.999


@pytest.mark.parametrize("form", FORMS)
def test_a_chat_template_with_the_question_of_a_form_names_its_answers(tmp_path, form):
    words = FORMS[form][2]
    folder = save_reranker(tmp_path, FORMS[form][0])
    question = {"qwen3": JUDGE, "mxbai": RELEVANCE, "bge": QUESTION_OF_BGE}[form]
    template = (
        f"{question}{{% for m in messages if m.role == 'system' %}}{{{{ m.content }}}}{{% endfor %}}"
        "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}"
        "{{ (messages | selectattr('role', 'eq', 'document') | first).content }}"
    )
    set_fields(folder, "tokenizer_config.json", chat_template=template)

    checkpoint = Checkpoint.open(folder)

    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert checkpoint.task == "rerank"
    assert checkpoint.logit_score is not None
    found = checkpoint.logit_score.true_token, checkpoint.logit_score.false_token
    assert found == (*(vocabulary[word] for word in words), None)[:2]
    assert checkpoint.logit_score.form is None


def test_a_folder_that_does_not_say_its_form_is_refused_with_the_setting_that_names_it(tmp_path):
    folder = save_reranker(tmp_path)

    with refused(
        'task "rerank" needs a Qwen3ForSequenceClassification checkpoint; this one is a Qwen3ForCausalLM, whose files'
        " do not say how it ranks: name the form of its pairs with the setting rerank_form (qwen3, mxbai, bge)"
    ):
        Checkpoint.open(folder).check_task("rerank")

    named = Checkpoint.open(folder, rerank_form="qwen3")
    named.check_task("rerank")
    assert named.task == "rerank"


def test_a_form_is_refused_where_no_checkpoint_has_it(tmp_path):
    classifier = save_checkpoint(tmp_path / "bert", "BertForSequenceClassification", num_labels=1)
    with refused("rerank_form is qwen3, which is for a …ForCausalLM; this checkpoint is a Bert"):
        Checkpoint.open(classifier, rerank_form="qwen3")

    folder = save_checkpoint(tmp_path / "plain", "Qwen3ForCausalLM")
    with refused('tokenizer.json has no token "yes", by which this form of a reranker answers'):
        Checkpoint.open(folder, rerank_form="qwen3")


def test_an_instruction_is_refused_by_a_model_that_does_not_read_it(tmp_path):
    folder = save_checkpoint(tmp_path, "BertForSequenceClassification", num_labels=1)

    with Encoder.from_pretrained(folder, task="rerank") as encoder:
        with pytest.raises(RequestError, match="has instruction, which this model does not read"):
            encoder.classify([("a", "b")], instruction="find it")
