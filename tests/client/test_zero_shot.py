"""Zero-shot classification answers as the pipeline of transformers."""

import numpy as np
import pytest
import torch
from transformers import ZeroShotClassificationPipeline

from varlen_client.errors import InvalidRequest
from varlen_client.tasks.labels import Entailment, hypotheses, label_scores, parse_labels

LABELS = ["sports", "politics", "the sea"]
ORDERS = [
    ["contradiction", "neutral", "entailment"],
    ["ENTAILMENT", "neutral", "contradiction"],
    ["not_entailment", "entailment"],
    ["entailed", "not"],
]


@pytest.mark.parametrize("names", ORDERS, ids=" ".join)
@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_scores_match_the_pipeline(names, multi_label, count):
    labels = LABELS[:count]
    logits = np.random.default_rng(0).normal(size=(2 * count, len(names)), scale=3)
    logits = logits.astype(np.float32)
    pipeline = ZeroShotClassificationPipeline.__new__(ZeroShotClassificationPipeline)
    config = type("Config", (), {"label2id": {name: at for at, name in enumerate(names)}})()
    pipeline.model = type("Model", (), {"config": config})()
    found = Entailment(logits, [name.lower() for name in names])

    actual = label_scores(found, labels, multi_label=multi_label)

    for row, begin in zip(actual, (0, count), strict=True):
        outputs = [
            {
                "candidate_label": label,
                "sequence": "a",
                "logits": torch.tensor(logits[[begin + at]]),
            }
            for at, label in enumerate(labels)
        ]
        expected = pipeline.postprocess(outputs, multi_label=multi_label)
        assert [each.label for each in row] == expected["labels"]
        assert [each.score for each in row] == pytest.approx(expected["scores"], rel=1e-5)


def test_each_text_is_paired_with_the_hypothesis_of_each_label():
    assert parse_labels(" sports, the sea,") == ["sports", "the sea"]
    # as the pipeline, which takes a list as it is
    assert parse_labels(["a", ""]) == ["a", ""]
    assert hypotheses(["a", "b"], ["x"], "It is {}.") == [("a", "It is x."), ("b", "It is x.")]


@pytest.mark.parametrize(
    "template", ["no place", "{} and {}", "{0}", "{:9999999999}", "{} {x}", "{}" + "a" * 5000]
)
def test_a_template_has_one_place_for_the_label(template):
    with pytest.raises(InvalidRequest, match="hypothesis_template is .*; allowed"):
        hypotheses(["a"], ["x"], template)


def test_a_single_text_is_refused():
    with pytest.raises(InvalidRequest, match="got one string; pass a list of strings"):
        hypotheses("a text", ["x"], "It is {}.")


@pytest.mark.parametrize("labels", ["", " ,", [], ["a"] * 513])
def test_the_number_of_labels_is_bounded(labels):
    with pytest.raises(InvalidRequest, match="candidate_labels has .* allowed: 1 to 512"):
        parse_labels(labels)


def test_a_model_without_entailment_is_refused():
    found = Entailment(np.zeros((1, 2), np.float32), ["positive", "negative"])

    with pytest.raises(InvalidRequest, match="needs a model of natural language inference"):
        label_scores(found, ["x"], multi_label=False)
