"""Scores of bf16 models are fp32: documents that differ do not tie."""

import numpy as np
import pytest
import torch

from varlen import Encoder

DOCUMENTS = 200
# A class of transformers, and fields of config.json.
CLASSIFIERS = {
    "bert": ("BertForSequenceClassification", {}),
    "no layers": ("BertForSequenceClassification", {"num_hidden_layers": 0}),
    "roberta": ("RobertaForSequenceClassification", {}),
    "distilbert": ("DistilBertForSequenceClassification", {}),
    "shared layers": ("AlbertForSequenceClassification", {}),
    "modernbert": ("ModernBertForSequenceClassification", {"classifier_pooling": "cls"}),
    "modernbert-mean": ("ModernBertForSequenceClassification", {"classifier_pooling": "mean"}),
    "deberta": ("DebertaV2ForSequenceClassification", {}),
    "gte": ("GteForSequenceClassification", {}),
    "qwen3": ("Qwen3ForSequenceClassification", {"pad_token_id": 0}),
}
TOKEN_CLASSIFIERS = [
    "BertForTokenClassification",
    "ModernBertForTokenClassification",
    "DebertaV2ForTokenClassification",
    "Qwen3ForTokenClassification",
]


def random_rows(rng):
    return [rng.integers(5, 80, length).tolist() for length in rng.integers(3, 12, DOCUMENTS)]


def is_rounded(logits):
    """Return which logits are numbers of bf16."""
    return torch.tensor(logits).bfloat16().float().numpy() == logits


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_of_different_documents_differ(make_checkpoint, rng, name):
    kind, config = CLASSIFIERS[name]
    folder = make_checkpoint(kind, num_labels=1, **config)
    rows = random_rows(rng)
    scores = {}
    for dtype in ("fp32", "bf16"):
        with Encoder.from_pretrained(folder, task="rerank", dtype=dtype) as encoder:
            scores[dtype] = encoder.classify(rows)[:, 0]

    # without layers, only the first tokens differ
    assert np.unique(scores["fp32"]).size > (50 if name == "no layers" else 0.9 * DOCUMENTS)
    assert np.unique(scores["bf16"]).size >= np.unique(scores["fp32"]).size - 1
    assert is_rounded(scores["bf16"]).mean() < 0.05
    spread = scores["fp32"].std()
    np.testing.assert_allclose(scores["bf16"], scores["fp32"], rtol=0, atol=spread)


@pytest.mark.parametrize("kind", TOKEN_CLASSIFIERS)
def test_logits_of_tokens_are_not_rounded_to_bf16(make_checkpoint, rng, kind):
    folder = make_checkpoint(kind, num_labels=3)

    with Encoder.from_pretrained(folder, dtype="bf16") as encoder:
        logits = np.concatenate(encoder.token_classify(random_rows(rng)))

    assert is_rounded(logits).mean() < 0.05


@pytest.mark.parametrize("task", ["embed", "hidden"])
@pytest.mark.parametrize(
    "kind", ["BertForSequenceClassification", "Qwen3ForSequenceClassification"]
)
def test_a_classifier_gives_vectors_in_bf16_too(make_checkpoint, rng, kind, task):
    folder = make_checkpoint(kind, num_labels=1)
    rows = random_rows(rng)[:8]
    vectors = {}
    for dtype in ("fp32", "bf16"):
        with Encoder.from_pretrained(folder, task=task, dtype=dtype) as encoder:
            vectors[dtype] = np.concatenate([each.ravel() for each in getattr(encoder, task)(rows)])

    exact, rounded = vectors["fp32"], vectors["bf16"]
    cosine = exact @ rounded / np.linalg.norm(exact) / np.linalg.norm(rounded)
    assert cosine > 0.999
