"""Labels and scores of classifiers match the original libraries."""

import pytest
from sentence_transformers import CrossEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import set_fields
from varlen import Encoder
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.vectors import scores_of

TEXTS = ["the cat", "a river, 42", "no"]
KIND = "BertForSequenceClassification"


def logits_of(folder, texts):
    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        return encoder.classify(texts)


@pytest.mark.parametrize(
    "problem, count",
    [
        ("regression", 1),
        ("regression", 3),
        ("multi_label_classification", 3),
        ("single_label_classification", 3),
        (None, 1),
        (None, 3),
    ],
)
def test_scores_are_those_of_the_pipeline_of_transformers(make_checkpoint, problem, count):
    folder = make_checkpoint(KIND, num_labels=count)
    set_fields(folder, "config.json", problem_type=problem)
    set_fields(folder, "config.json", id2label={str(i): f"label {i}" for i in range(count)})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    classify = pipeline("text-classification", model, tokenizer=tokenizer, device="cpu")

    labels = Checkpoint.open(folder).labels
    scores = scores_of(logits_of(folder, TEXTS), labels.function)

    for row, expected in zip(scores, classify(TEXTS, top_k=None), strict=True):
        named = dict(zip(labels.names, row.tolist(), strict=True))
        assert named == {
            each["label"]: pytest.approx(each["score"], rel=1e-4, abs=1e-5) for each in expected
        }


@pytest.mark.parametrize("function", ["Identity", "Sigmoid"])
@pytest.mark.parametrize("place", ["sentence-transformers 6", "5", "2"])
def test_scores_are_those_of_a_cross_encoder(make_checkpoint, tmp_path, function, place):
    folder = make_checkpoint(KIND, num_labels=1)
    path = {"Identity": "torch.nn.modules.linear.Identity", "Sigmoid": "torch.nn.Sigmoid"}[function]
    if place == "2":
        set_fields(folder, "config.json", sbert_ce_default_activation_function=path)
    else:
        set_fields(folder, "config.json", sentence_transformers={"activation_fn": path})
    if place == "sentence-transformers 6":
        CrossEncoder(str(folder), device="cpu").save_pretrained(str(tmp_path))
        folder = tmp_path
        # which its own file overrides
        other = {"Identity": "torch.nn.Sigmoid", "Sigmoid": "torch.nn.Identity"}[function]
        set_fields(folder, "config.json", sentence_transformers={"activation_fn": other})
    pairs = [("the cat", text) for text in TEXTS]

    labels = Checkpoint.open(folder).labels
    scores = scores_of(logits_of(folder, pairs), labels.function)

    assert labels.function == {"Identity": "none", "Sigmoid": "sigmoid"}[function]
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs)
    assert scores[:, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


def test_labels_without_names_are_numbered(make_checkpoint):
    folder = make_checkpoint(KIND, num_labels=2)

    assert Checkpoint.open(folder).labels.names == ("LABEL_0", "LABEL_1")


def test_names_are_in_the_order_of_the_logits(make_checkpoint):
    folder = make_checkpoint(KIND, num_labels=3)
    set_fields(folder, "config.json", id2label={"2": "c", "0": "a", "1": "b"})

    assert Checkpoint.open(folder).labels.names == ("a", "b", "c")


def test_refuses_labels_that_are_not_numbered_from_0(make_checkpoint):
    folder = make_checkpoint(KIND, num_labels=2)
    set_fields(folder, "config.json", id2label={"1": "a", "2": "b"})

    with refused("allowed: labels numbered from 0 to 1"):
        Checkpoint.open(folder)


def test_refuses_a_function_that_is_not_ours(make_checkpoint):
    folder = make_checkpoint(KIND, num_labels=1)
    path = "torch.nn.modules.activation.Tanh"
    set_fields(folder, "config_sentence_transformers.json", activation_fn=path)

    with refused(f'are made by "{path}"; allowed: Identity, Sigmoid, Softmax'):
        Checkpoint.open(folder)


@pytest.mark.parametrize("family", ["Bert", "DebertaV2", "ModernBert"])
def test_a_classifier_without_labels_is_refused(family, make_checkpoint):
    folder = make_checkpoint(f"{family}ForSequenceClassification")
    set_fields(folder, "config.json", id2label={})

    with refused("config.json implies"):
        Checkpoint.open(folder).check_task("classify")
