"""Random checkpoints of every kind match transformers in fp32."""

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import KIND_OF_TASK, pooling_files
from tests.closeness import assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.config import EngineConfig
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import RequestOptions

from ..requests import prompt_of
from .oracle import assert_hidden_states_match, hidden_states, load_oracle, one_by_one

PLAIN = RequestOptions()

TEXTS = ["the cat", "a", "river, the river! is it 42?", "don't", "x" * 40, "The CAT's river..."]
PAIRS = [("the cat", "a river"), ("a", "b"), ("is it?", "the cat is in the river, 7 times")]

# hidden 35 with 5 heads: head_dim 7, no multiple of a vector register
SHAPES = {
    "small": {},
    "one-head": {"num_attention_heads": 1, "hidden_size": 17, "intermediate_size": 9},
    "five-heads-of-7": {"num_attention_heads": 5, "hidden_size": 35, "intermediate_size": 71},
    "heads-of-one": {"num_attention_heads": 7, "hidden_size": 7, "num_hidden_layers": 1},
    "deep": {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4},
    "wide": {"hidden_size": 132, "num_attention_heads": 11, "intermediate_size": 300},
    "no-layers": {"num_hidden_layers": 0},
    "relu": {"hidden_act": "relu"},
    "gelu_new": {"hidden_act": "gelu_new"},
    "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "coarse-eps": {"layer_norm_eps": 1e-3},
    "one-token-type": {"type_vocab_size": 1},
    "five-token-types": {"type_vocab_size": 5},
    "two-positions-more": {"max_position_embeddings": 50},
}


def random_rows(rng, lengths, vocab_size):
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def check(folder, actual, expected):
    assert all(row.dtype == np.float32 for row in actual)
    assert_rows_close(actual, expected, roundings=encoder_roundings(folder))


def run_with_types(folder, rows, types, **config):
    runner = Runner(Checkpoint.open(folder), EngineConfig(dtype="fp32", **config))
    prompts = [prompt_of(row, kinds) for row, kinds in zip(rows, types, strict=True)]
    return runner.run(prompts, [PLAIN] * len(rows))


@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_match_transformers(make_checkpoint, rng, shape):
    folder = make_checkpoint(**SHAPES[shape])
    model = load_oracle(folder)
    rows = random_rows(rng, [1, 2, 7, 7, 1, 33, 50, 12], model.config.vocab_size)

    assert_hidden_states_match(folder, model, rows)


@pytest.mark.parametrize("shape", ["small", "five-heads-of-7", "five-token-types"])
def test_token_types_match_transformers(make_checkpoint, rng, shape):
    folder = make_checkpoint(**SHAPES[shape])
    model = load_oracle(folder)
    rows = random_rows(rng, [1, 9, 9, 40], model.config.vocab_size)
    types = random_rows(rng, [1, 9, 9, 40], model.config.type_vocab_size)

    actual = run_with_types(folder, rows, types, task="hidden")

    check(folder, actual, hidden_states(model, rows, types))


def test_rows_with_and_without_token_types_share_a_batch(small_bert, rng):
    model = load_oracle(small_bert)
    rows = random_rows(rng, [5, 5, 8], model.config.vocab_size)
    types = [None, [1, 0, 1, 1, 0], None]

    actual = run_with_types(small_bert, rows, types, task="hidden")

    types = [[0] * 5, types[1], [0] * 8]
    check(small_bert, actual, hidden_states(model, rows, types))


def weighted_mean(hidden):
    weights = torch.arange(1.0, len(hidden) + 1)
    return weights @ hidden / weights.sum()


POOLINGS = {
    "cls": lambda hidden: hidden[0],
    "mean": lambda hidden: hidden.mean(dim=0),
    "max": lambda hidden: hidden.max(dim=0).values,
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(dim=0) / len(hidden) ** 0.5,
    "weightedmean": weighted_mean,
    "lasttoken": lambda hidden: hidden[-1],
}


@pytest.mark.parametrize("style", ["flags", "name"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_matches_transformers(make_checkpoint, rng, pooling, style):
    has_suffix = pooling in ("cls", "mean", "max", "weightedmean")
    flag = f"{pooling}_{'token' if pooling == 'cls' else 'tokens'}" if has_suffix else pooling
    flags = {f"pooling_mode_{name}": False for name in ("cls_token", "mean_tokens", "max_tokens")}
    named = {"pooling_mode": pooling}
    flagged = {**flags, f"pooling_mode_{flag}": True}
    folder = make_checkpoint(files=pooling_files(**(named if style == "name" else flagged)))
    model = load_oracle(folder)
    rows = random_rows(rng, [1, 3, 3, 29], model.config.vocab_size)

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        plain = encoder.embed(rows)
        normalized = encoder.embed(rows, normalize=True)

    expected = [POOLINGS[pooling](hidden) for hidden in hidden_states(model, rows)]
    check(folder, plain, expected)
    check(folder, normalized, [vector / vector.norm() for vector in expected])


@pytest.mark.parametrize(
    "task, num_labels",
    [*(("classify", n) for n in (1, 2, 3, 7)), *(("token_classify", n) for n in (2, 5))],
)
def test_classification_matches_transformers(make_checkpoint, rng, task, num_labels):
    folder = make_checkpoint(KIND_OF_TASK[task], num_labels=num_labels)
    model = load_oracle(folder, KIND_OF_TASK[task])
    rows = random_rows(rng, [1, 4, 4, 31, 2], model.config.vocab_size)

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        assert encoder.task == task
        actual = getattr(encoder, task)(rows)

    assert all(row.shape[-1] == num_labels for row in actual)
    check(folder, actual, [out.logits[0] for out in one_by_one(model, rows)])


@pytest.mark.parametrize("task", ["classify", "rerank"])
def test_pairs_of_texts_match_transformers(make_checkpoint, task):
    folder = make_checkpoint("BertForSequenceClassification", num_labels=1)
    model = load_oracle(folder, "BertForSequenceClassification")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    encoded = tokenizer(*map(list, zip(*PAIRS, strict=True)), return_token_type_ids=True)
    assert any(1 in kinds for kinds in encoded["token_type_ids"])

    with Encoder.from_pretrained(folder, task=task, dtype="fp32") as encoder:
        actual = encoder.classify(PAIRS)

    outputs = one_by_one(model, encoded["input_ids"], encoded["token_type_ids"])
    check(folder, actual, [out.logits[0] for out in outputs])


@pytest.mark.parametrize(
    "kind", ["BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM"]
)
def test_the_encoder_under_a_head_serves_hidden_states(make_checkpoint, rng, kind):
    folder = make_checkpoint(kind)
    model = load_oracle(folder, kind).bert
    rows = random_rows(rng, [3, 17], model.config.vocab_size)

    assert_hidden_states_match(folder, model, rows)


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification"])
def test_shards_match_transformers(make_checkpoint, rng, kind):
    folder = make_checkpoint(kind, save={"max_shard_size": "12KB"})
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = load_oracle(folder, kind)
    rows = random_rows(rng, [3, 17], model.config.vocab_size)

    assert_hidden_states_match(folder, getattr(model, "bert", model), rows)


def test_a_checkpoint_without_pooler_embeds(make_checkpoint, rng):
    folder = make_checkpoint(model={"add_pooling_layer": False})
    model = load_oracle(folder, add_pooling_layer=False)
    rows = random_rows(rng, [3, 17], model.config.vocab_size)

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        actual = encoder.embed(rows)

    check(folder, actual, [row.mean(dim=0) for row in hidden_states(model, rows)])


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_weights_saved_in_half_precision_run_in_fp32(make_checkpoint, rng, saved):
    folder = make_checkpoint(dtype=saved)
    model = load_oracle(folder)
    rows = random_rows(rng, [3, 17], model.config.vocab_size)

    assert_hidden_states_match(folder, model, rows)


def test_texts_match_transformers(small_bert):
    model = load_oracle(small_bert)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(small_bert / "tokenizer.json")
    )

    with Encoder.from_pretrained(small_bert, task="hidden", dtype="fp32") as encoder:
        actual = encoder.hidden(TEXTS)

    check(small_bert, actual, hidden_states(model, tokenizer(TEXTS)["input_ids"]))


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_bf16_stays_close_to_fp32(make_checkpoint, rng, kind):
    folder = make_checkpoint(kind, initializer_range=0.05)
    rows = random_rows(rng, [1, 4, 33], 50)

    with Encoder.from_pretrained(folder, dtype="fp32", task="hidden") as encoder:
        exact = encoder.hidden(rows)
    with Encoder.from_pretrained(folder, dtype="bf16", task="hidden") as encoder:
        rough = encoder.hidden(rows)

    for mine, theirs in zip(rough, exact, strict=True):
        assert mine.dtype == np.float32
        cosine = (mine * theirs).sum() / (np.linalg.norm(mine) * np.linalg.norm(theirs))
        assert cosine > 0.999
