"""Masks are filled as by the pipeline fill-mask of transformers."""

import json

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import set_fields
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.models.bert_relatives import RELATIVES

from ..refusals import refused_checkpoint as refused
from ..refusals import refused_request

KINDS = [
    *(family.class_name for family in RELATIVES.values()),
    *("ModernBert", "Deberta", "DebertaV2"),
]
MASK = 4
TEXTS = ["the [MASK] is", "[MASK] cat [MASK] river, is it 42?", "a cat is [MASK]", "[MASK]"]


def save(make_checkpoint, kind="BertForMaskedLM", **settings):
    """Save a checkpoint whose tokenizer knows the mask."""
    folder = make_checkpoint(kind, **settings)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": id_, "content": content, "special": True, **special}
        for id_, content in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))
    ]
    set_fields(folder, "tokenizer.json", added_tokens=added)
    return folder


@pytest.fixture(scope="module")
def folder(make_checkpoint):
    return save(make_checkpoint)


@torch.inference_mode()
def likeliest(folder, kind, rows, top_k):
    """Return tokens and probabilities of each mask of each row, `[masks, top_k]`."""
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for row in rows:
        ids = torch.tensor(row)
        best = model(ids[None]).logits[0][ids == MASK].softmax(-1).topk(top_k)
        answers.append((best.indices.numpy(), best.values.numpy()))
    return answers


def scores_of(row):
    return np.array([[token.score for token in mask] for mask in row])


def tokens_of(row):
    return np.array([[token.token_id for token in mask] for mask in row])


@pytest.mark.parametrize("name", KINDS)
def test_every_family_gives_the_tokens_of_transformers(make_checkpoint, rng, name):
    kind = f"{name}ForMaskedLM"
    # the mask of these tests is no padding, which transformers gives another position
    padding = {"pad_token_id": 0} if kind.startswith(("Roberta", "XLM", "Camembert")) else {}
    folder = save(make_checkpoint, kind, **padding)
    rows = [rng.integers(5, 92, length).tolist() for length in (1, 3, 9, 40, 9)]
    for row, places in zip(rows, ([0], [0, 1, 2], [4], [3, 39], range(1, 9)), strict=True):
        for place in places:
            row[place] = MASK

    with Encoder.from_pretrained(folder, task="fill_mask", dtype="fp32", threads=1) as encoder:
        answers = encoder.fill_mask(rows, top_k=6)
        alone = [encoder.fill_mask([row], top_k=6)[0] for row in rows]

    roundings = 16 * encoder_roundings(folder)
    expected = likeliest(folder, kind, rows, 6)
    for actual, single, (tokens, scores) in zip(answers, alone, expected, strict=True):
        assert_close(scores_of(actual), scores, roundings=roundings)
        assert_close(scores_of(single), scores, roundings=roundings)
        np.testing.assert_array_equal(tokens_of(actual), tokens)


def test_texts_get_the_answers_of_the_pipeline(folder):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), mask_token="[MASK]", pad_token="[PAD]"
    )
    model = transformers.BertForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    pipeline = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu")

    with Encoder.from_pretrained(folder, task="fill_mask", dtype="fp32", threads=1) as encoder:
        answers = encoder.fill_mask(TEXTS)

    for text, answer in zip(TEXTS, answers, strict=True):
        expected = pipeline(text)
        expected = expected if text.count("[MASK]") > 1 else [expected]
        assert [[token.token_id for token in mask] for mask in answer] == [
            [token["token"] for token in mask] for mask in expected
        ]
        assert [[token.text for token in mask] for mask in answer] == [
            [token["token_str"] for token in mask] for mask in expected
        ]
        assert_close(
            scores_of(answer),
            [[token["score"] for token in mask] for mask in expected],
            roundings=16 * encoder_roundings(folder),
        )


def test_bf16_chooses_likely_tokens(make_checkpoint):
    folder = save(make_checkpoint, initializer_range=0.05)
    settings = {"task": "fill_mask", "threads": 1}

    with Encoder.from_pretrained(folder, dtype="fp32", **settings) as encoder:
        exact = encoder.fill_mask(TEXTS, top_k=92)
    with Encoder.from_pretrained(folder, dtype="bf16", **settings) as encoder:
        rough = encoder.fill_mask(TEXTS, top_k=92)

    for mine, theirs in zip(rough, exact, strict=True):
        for row, other in zip(mine, theirs, strict=True):
            vectors = np.zeros((2, 92))
            for vector, mask in zip(vectors, (row, other), strict=True):
                vector[[token.token_id for token in mask]] = [token.score for token in mask]
            a, b = vectors
            assert a @ b / np.sqrt(a @ a * (b @ b)) > 0.999


def test_refuses_inputs_without_masks_or_with_too_many(folder):
    with Encoder.from_pretrained(folder, task="fill_mask", dtype="fp32", threads=1) as encoder:
        with refused_request("row 1: the input has 0 tokens [MASK]; this model takes 1 to 8"):
            encoder.fill_mask(["a [MASK]", "the cat"])
        with refused_request("row 0: the input has 9 tokens [MASK]"):
            encoder.fill_mask([[MASK] * 9])
        with refused_request("top_k is 93; allowed: whole numbers from 1 to 92"):
            encoder.fill_mask(TEXTS, top_k=93)
        # what is cut away is not filled
        with refused_request("row 0: the input has 0 tokens"):
            encoder.fill_mask([f"{'x ' * 200} [MASK]"], truncate=True)


def test_refuses_a_tokenizer_without_the_mask(make_checkpoint):
    folder = save(make_checkpoint)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].pop()
    tokenizer["model"]["vocab"].pop("[MASK]")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    with refused("tokenizer.json has no token [MASK] or <mask>, which the task fill_mask needs"):
        Encoder.from_pretrained(folder, task="fill_mask")
