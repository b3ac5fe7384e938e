"""Answers of the real server match independent oracles for all inputs, tasks and protocols."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from tokenizers import Tokenizer
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

from tests.checkpoints import WORDS
from tests.closeness import assert_close
from varlen_tools.local_server import LOOPBACK

from .clients import Array, integers, strings, texts
from .serving import add_model, load, unload

SENTENCES = (
    "A man is eating food.",
    "ok",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 🥊",
    "The stock market fell sharply on Monday, after a week in which few investors had wanted to sell.",
    "深層学習",
    " ".join(["seventeen"] * 120),
)


def words(count: int, seed: int) -> str:
    """Return a text of `count` random words of the test vocabulary."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def test_text_embeds_as_sentence_transformers_and_the_encoder_in_process_do(
    client, in_process, sentence_transformer, roundings
):
    answer = client.infer("minilm", texts(*SENTENCES))

    assert_close(
        answer, sentence_transformer.encode(list(SENTENCES)), roundings=roundings["minilm"]
    )
    assert_close(answer, in_process.embed(SENTENCES), roundings=roundings["minilm"])


@pytest.fixture(scope="module")
def padded(server, repository, minilm):
    """A model that pads its batches."""
    add_model(repository, "padded", minilm, execution="padded", max_batch_sequences="5")
    assert load(server, "padded") is None
    yield "padded"
    unload(server, "padded")


def test_padded_execution_embeds_as_packed_does(padded, client, sentence_transformer, roundings):
    answer = client.infer(padded, texts(*SENTENCES, *SENTENCES[:2]))
    alone = client.infer(padded, texts(SENTENCES[0]))

    expected = sentence_transformer.encode([*SENTENCES, *SENTENCES[:2]])
    assert_close(answer, expected, roundings=roundings["minilm"])
    assert_close(alone, answer[:1], roundings=roundings["minilm"])
    packed = client.infer("minilm", texts(*SENTENCES))
    assert_close(answer[: len(packed)], packed, roundings=roundings["minilm"])


def test_a_text_has_the_same_vector_alone_and_in_any_batch(client, roundings):
    alone = [client.infer("minilm", texts(sentence))[0] for sentence in SENTENCES]
    backwards = client.infer("minilm", texts(*SENTENCES[::-1]))[::-1]
    crowded = client.infer("minilm", texts(*SENTENCES, *SENTENCES, *["filler"] * 50))

    assert_close(backwards, alone, roundings=roundings["minilm"])
    assert_close(crowded[: len(alone)], alone, roundings=roundings["minilm"])
    assert_close(crowded[len(alone) : 2 * len(alone)], alone, roundings=roundings["minilm"])


def test_a_request_holds_as_many_rows_as_max_batch_size(client, in_process, roundings):
    rows = [" ".join(["row"] * (1 + number % 9)) + f" {number}" for number in range(64)]

    answer = client.infer("minilm", texts(*rows))

    assert_close(answer, in_process.embed(rows), roundings=roundings["minilm"])


def test_token_ids_embed_as_the_text_they_stand_for(client, minilm, roundings):
    ids = _ids(minilm, SENTENCES[0])

    from_ids = client.infer("minilm", {"input_ids": integers([ids])})

    assert_close(
        from_ids, client.infer("minilm", texts(SENTENCES[0])), roundings=roundings["minilm"]
    )


def test_a_padded_batch_with_a_mask_embeds_as_its_texts(client, minilm, roundings):
    rows = [_ids(minilm, sentence) for sentence in SENTENCES]
    longest = max(map(len, rows))
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        # values under the padding must not matter
        ids[index] = 999_999
        ids[index, : len(row)], mask[index, : len(row)] = row, 1

    inputs = {"input_ids": integers(ids), "attention_mask": integers(mask)}
    plain = client.infer("minilm", inputs)
    typed = client.infer("minilm", inputs | {"token_type_ids": integers(np.zeros_like(ids))})

    assert_close(plain, client.infer("minilm", texts(*SENTENCES)), roundings=roundings["minilm"])
    assert_close(typed, plain, roundings=roundings["minilm"])


def test_truncate_cuts_a_long_text_as_sentence_transformers_does(
    client, sentence_transformer, roundings
):
    long = " ".join(f"number {number}" for number in range(300))

    answer = client.infer("minilm", texts(long), {"truncate": True})

    assert_close(answer, sentence_transformer.encode([long]), roundings=roundings["minilm"])


def test_normalize_false_leaves_vectors_as_long_as_they_are(client, in_process, roundings):
    raw = client.infer("minilm", texts(*SENTENCES), {"normalize": False})
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)

    assert np.all(abs(lengths - 1) > 0.1)
    assert_close(raw, in_process.embed(SENTENCES, normalize=False), roundings=roundings["minilm"])
    assert_close(
        raw / lengths,
        client.infer("minilm", texts(*SENTENCES), {"normalize": True}),
        roundings=roundings["minilm"],
    )


def test_parameters_that_are_not_ours_change_nothing(client):
    parameters = {"tenant": "perhaps", "trace": 7, 'a "quoted"\\ name': True}

    answer = client.infer("minilm", texts("hello"), parameters)

    np.testing.assert_array_equal(answer, client.infer("minilm", texts("hello")))


@pytest.mark.parametrize("pair", [False, True], ids=["texts", "pairs"])
def test_classify_gives_the_logits_of_transformers(client, checkpoints, pair, roundings):
    firsts = [words(count, seed=count) for count in (1, 30, 7)]
    seconds = [words(count, seed=count) for count in (12, 3, 200)] if pair else None
    inputs = texts(*firsts) | ({"text_pair": strings(*seconds)} if seconds else {})

    answer = client.infer("classifier", inputs)

    model = BertForSequenceClassification.from_pretrained(checkpoints["classifier"]).eval()
    expected = [row.numpy() for row in _run(model, checkpoints["classifier"], firsts, seconds)]
    assert answer.shape == (3, 3)
    assert_close(answer, np.concatenate(expected), roundings=roundings["classifier"])


def test_token_classify_gives_every_token_its_logits(client, checkpoints, roundings):
    rows = [words(count, seed=count) for count in (40, 1, 9)]

    answer = client.infer("tagger", texts(*rows))

    model = BertForTokenClassification.from_pretrained(checkpoints["tagger"]).eval()
    _assert_rows_then_zeros(
        answer, _run(model, checkpoints["tagger"], rows), width=5, roundings=roundings["tagger"]
    )


def test_hidden_gives_the_last_hidden_state_of_transformers(client, checkpoints, roundings):
    rows = [words(count, seed=count) for count in (3, 150, 20)]

    answer = client.infer("encoder", texts(*rows))

    model = BertModel.from_pretrained(checkpoints["encoder"]).eval()
    _assert_rows_then_zeros(
        answer, _run(model, checkpoints["encoder"], rows), width=32, roundings=roundings["encoder"]
    )


@pytest.mark.parametrize(
    ("library", "endpoint"),
    [(tritonclient.grpc, "grpc_port"), (tritonclient.http, "http_port")],
    ids=["grpc", "http"],
)
def test_the_clients_that_ship_with_the_server_get_the_same_answer(
    server, in_process, library, endpoint, roundings
):
    tensor = library.InferInput("text", [len(SENTENCES), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in SENTENCES], dtype=object))
    client = library.InferenceServerClient(f"{LOOPBACK}:{getattr(server, endpoint)}")
    try:
        answer = client.infer("minilm", [tensor], parameters={"normalize": False})
    finally:
        client.close()

    assert_close(
        answer.as_numpy("sentence_embedding"),
        in_process.embed(SENTENCES, normalize=False),
        roundings=roundings["minilm"],
    )


def _ids(folder: Path, text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def _run(
    model: torch.nn.Module, folder: Path, firsts: list[str], seconds: list[str] | None = None
) -> list[torch.Tensor]:
    """Return the model's first output for each text or pair, run by itself."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answers = []
    for index, first in enumerate(firsts):
        encoding = tokenizer.encode(first, seconds[index] if seconds else None)
        with torch.inference_mode():
            output = model(
                input_ids=torch.tensor([encoding.ids]),
                token_type_ids=torch.tensor([encoding.type_ids]),
            )
        answers.append(output[0])
    return answers


def _assert_rows_then_zeros(
    answer: Array, expected: list[torch.Tensor], *, width: int, roundings: int
) -> None:
    """Check rows of different lengths, padded with zeros."""
    assert answer.shape == (len(expected), max(row.shape[1] for row in expected), width)
    for row, wanted in zip(answer, expected, strict=True):
        tokens = wanted.shape[1]
        assert_close(row[:tokens], wanted[0], roundings=roundings)
        assert not row[tokens:].any()
