"""Encoders beside BERT on the real server give the answers of transformers."""

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.checkpoints import save_checkpoint
from tests.closeness import assert_close, encoder_roundings

from .clients import strings, texts
from .serving import add_model, load, unload

pytestmark = pytest.mark.full

FIRST = ["the cat", "river, the river! is it 42?", "x" * 30]
SECOND = ["a river", "no", "the cat is in the river, 7 times"]


# one with another place of the first position, one without token types, one with biases, one with shared layers
@pytest.mark.parametrize("family", ["Roberta", "DistilBert", "MPNet", "Albert"])
def test_a_pair_gets_the_logits_of_transformers(server, repository, grpc_client, tmp_path, family):
    kind, name = f"{family}ForSequenceClassification", family.lower()
    folder = save_checkpoint(tmp_path / name, kind, num_labels=3)
    add_model(repository, name, folder)
    try:
        assert load(server, name) is None
        answer = grpc_client.infer(name, texts(*FIRST) | {"text_pair": strings(*SECOND)})
    finally:
        unload(server, name)

    model = getattr(transformers, kind).from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = []
    for pair in zip(FIRST, SECOND, strict=True):
        encoding = tokenizer.encode(*pair)
        # tokenizers of these families give transformers no token types
        inputs = {"input_ids": torch.tensor([encoding.ids])}
        with torch.inference_mode():
            expected.append(model(**inputs).logits[0].numpy())
    assert_close(answer, np.stack(expected), roundings=encoder_roundings(folder))
