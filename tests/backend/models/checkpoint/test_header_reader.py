"""The check of a checkpoint asks for the tensors that loading reads."""

import pytest
import torch

from varlen.models.checkpoint.family import HeaderReader
from varlen.models.checkpoint.layers import LayerReader
from varlen.models.checkpoint.weights import CheckpointWeights, check_tensor, read_headers
from varlen.models.checkpoint_folder import Checkpoint


@pytest.mark.parametrize(
    "kind",
    [
        "AlbertForSequenceClassification",
        "DebertaV2ForSequenceClassification",
        "GPT2LMHeadModel",
        "ModernBertForTokenClassification",
        "MPNetModel",
        "Qwen3ForTokenClassification",
        "MarianMTModel",
        "T5ForConditionalGeneration",
    ],
)
def test_both_readers_ask_for_the_same_tensors(make_checkpoint, monkeypatch, kind):
    checkpoint = Checkpoint.open(make_checkpoint(kind))
    asked = {"headers": {}, "weights": {}}

    def check(headers, name, shape):
        asked["headers"][name] = shape
        return check_tensor(headers, name, shape)

    def read(weights, name, *shape):
        asked["weights"][name] = shape
        return original(weights, name, *shape)

    original = CheckpointWeights.read
    monkeypatch.setattr("varlen.models.checkpoint.family.check_tensor", check)
    monkeypatch.setattr(CheckpointWeights, "read", read)

    with CheckpointWeights(checkpoint.folder) as weights:
        for reader in (
            HeaderReader(read_headers(checkpoint.folder)),
            LayerReader(weights, torch.float32, torch.device("cpu")),
        ):
            checkpoint.family.load(reader, checkpoint.config, checkpoint.head)

    assert asked["headers"] == asked["weights"] != {}
