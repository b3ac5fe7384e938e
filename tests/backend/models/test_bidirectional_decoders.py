"""Decoders whose tokens read later ones too equal transformers; no code of a checkpoint runs."""

import json

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.checkpoints import change_tensors, drop_field, pooling_files, set_fields
from tests.closeness import assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.models.checkpoint_folder import Checkpoint

from ..refusals import refused_checkpoint as refused
from .oracle import logits_of, states_of

WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CASES = {
    "gpt2": ("GPT2Model", {}),
    "llama": ("LlamaModel", {}),
    "mistral-window": ("MistralModel", {"sliding_window": 5}),
    "qwen2": ("Qwen2Model", {}),
    "qwen2-windows": ("Qwen2Model", WINDOWS),
    "qwen3": ("Qwen3Model", {}),
}
NEMOTRON = {
    "model_type": "llama_bidirec",
    "pooling": "avg",
    "temperature": 0.02,
    "auto_map": {
        "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
        "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
    },
}
VOYAGE = {
    "architectures": ["Qwen3ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
    "num_labels": 23,
    "use_bidirectional_attention": True,
}
PAIRS = [("the cat", "a river"), ("", "b" * 30), ("is it 42?", "the cat is in the river, 7 times")]


def rows_of(rng):
    return [rng.integers(1, 200, length).tolist() for length in (1, 2, 9, 33, 60, 9)]


def load(folder, kind):
    """Return the model of transformers whose tokens read later ones."""
    loader = getattr(transformers, kind)
    config = loader.config_class.from_pretrained(folder)
    config.is_causal = False
    return loader.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def served(folder, task, rows):
    """Return our answers to rows of one batch, which equal the answers alone."""
    with Encoder.from_pretrained(folder, task=task, dtype="fp32") as encoder:
        answer = encoder.hidden if task == "hidden" else encoder.classify
        mixed = answer(rows)
        alone = [answer([row])[0] for row in rows]
    assert_rows_close(alone, mixed, roundings=encoder_roundings(folder))
    return mixed


# Models of every family run in `make test-all`.
MARKED = [
    case if case in ("qwen2-windows", "qwen3") else pytest.param(case, marks=pytest.mark.full)
    for case in CASES
]


@pytest.mark.parametrize("case", MARKED)
def test_hidden_states_match_transformers(make_checkpoint, rng, case):
    kind, fields = CASES[case]
    folder = make_checkpoint(kind, **fields)
    causal = states_of(getattr(transformers, kind).from_pretrained(folder).eval(), [[3, 5, 7, 9]])
    expected = states_of(load(folder, kind), rows := [*rows_of(rng), [3, 5, 7, 9]])
    set_fields(folder, "config.json", is_causal=False)

    actual = served(folder, "hidden", rows)

    assert_rows_close(actual, expected, roundings=encoder_roundings(folder))
    assert np.abs(actual[-1][0] - causal[0][0].detach().numpy()).max() > 0.1


@pytest.mark.parametrize("case", MARKED)
def test_bf16_keeps_the_direction_of_vectors(make_checkpoint, rng, case):
    kind, fields = CASES[case]
    folder = make_checkpoint(kind, **fields)
    rows = rows_of(rng)
    means = [row.mean(dim=0).numpy() for row in states_of(load(folder, kind), rows)]
    set_fields(folder, "config.json", is_causal=False)

    with Encoder.from_pretrained(folder, dtype="bf16") as encoder:
        actual = encoder.embed(rows, normalize=True)

    cosines = [row @ mean / np.linalg.norm(mean) for row, mean in zip(actual, means, strict=True)]
    assert min(cosines) > 0.999


def test_a_causal_language_model_that_reads_later_tokens_is_an_embedder(make_checkpoint):
    folder = make_checkpoint("Qwen2ForCausalLM", files=pooling_files(pooling_mode="mean"))
    set_fields(folder, "config.json", is_causal=False)

    checkpoint = Checkpoint.open(folder)

    assert checkpoint.tasks == ("embed", "hidden")
    with refused(
        "needs a model whose tokens read only earlier ones; config.json says these read all"
    ):
        checkpoint.check_task("generate")


def test_a_classifier_reads_the_last_token_as_in_transformers(make_checkpoint, rng):
    folder = make_checkpoint("Qwen3ForSequenceClassification", num_labels=3, pad_token_id=0)
    rows = rows_of(rng)
    model = load(folder, "Qwen3ForSequenceClassification")
    set_fields(folder, "config.json", is_causal=False)

    expected = logits_of(model, rows)
    assert_rows_close(
        served(folder, "classify", rows), expected, roundings=encoder_roundings(folder)
    )


@pytest.mark.parametrize("pooling", [None, "avg", "cls", "last"])
def test_nemotron_embeds_as_its_config_pools(make_checkpoint, rng, pooling):
    folder = make_checkpoint("LlamaModel")
    rows = rows_of(rng)
    states = states_of(load(folder, "LlamaModel"), rows)
    names = {"architectures": ["LlamaBidirectionalModel"], "pooling": pooling}
    set_fields(folder, "config.json", **NEMOTRON | names)

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        actual = encoder.embed(rows)

    pooled = {"cls": lambda row: row[0], "last": lambda row: row[-1]}
    pool = pooled.get(pooling, lambda row: row.mean(dim=0))
    assert_rows_close(actual, [pool(row) for row in states], roundings=encoder_roundings(folder))


@pytest.mark.parametrize("pooling", ["avg", "last"])
def test_nemotron_ranks_a_pair_as_one_text(make_checkpoint, pooling):
    folder = make_checkpoint("LlamaForSequenceClassification", num_labels=1)
    weight = load(folder, "LlamaForSequenceClassification").score.weight.detach()
    model = load(folder, "LlamaModel")
    names = {"architectures": ["LlamaBidirectionalForSequenceClassification"], "pooling": pooling}
    set_fields(folder, "config.json", **NEMOTRON | names)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [f"question:{query} \n \n passage:{passage}" for query, passage in PAIRS]

    actual = served(folder, "rerank", PAIRS)

    states = states_of(model, [tokenizer.encode(text).ids for text in texts])
    pooled = [row.mean(dim=0) if pooling == "avg" else row[-1] for row in states]
    expected = [(weight @ row) / NEMOTRON["temperature"] for row in pooled]
    assert_rows_close(actual, expected, roundings=2 * encoder_roundings(folder))


def test_a_part_of_a_query_is_refused_where_a_pair_is_one_text(make_checkpoint):
    folder = make_checkpoint("LlamaForSequenceClassification", num_labels=1)
    names = {"architectures": ["LlamaBidirectionalForSequenceClassification"]}
    set_fields(folder, "config.json", **NEMOTRON | names)

    with Encoder.from_pretrained(folder, task="rerank", dtype="fp32") as encoder:
        whole, cut = encoder.classify([("a", "b" * 900), ("a", "b" * 950)], truncate=True)

    assert whole == pytest.approx(cut)


@pytest.mark.parametrize("prefix", ["model.", ""], ids=["prefix", "bare"])
def test_voyage_projects_each_token(make_checkpoint, rng, prefix):
    folder = make_checkpoint("Qwen3Model", files=pooling_files(pooling_mode="mean"))
    rows = rows_of(rng)
    weight = torch.from_numpy(rng.standard_normal((23, 36)).astype(np.float32)) / 6
    expected = [row @ weight.T for row in states_of(load(folder, "Qwen3Model"), rows)]

    def add_projection(tensors):
        named = {prefix + name: tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(named, **{"linear.weight": weight})

    change_tensors(folder, add_projection)
    set_fields(folder, "config.json", **VOYAGE)

    assert_rows_close(served(folder, "hidden", rows), expected, roundings=encoder_roundings(folder))
    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        vectors = encoder.embed(rows)
    means = [row.mean(dim=0) for row in expected]
    assert_rows_close(vectors, means, roundings=encoder_roundings(folder))
    assert Checkpoint.open(folder).embedding_size == 23


def test_gte_qwen2_is_read_as_its_config_says(make_checkpoint, rng):
    folder = make_checkpoint("Qwen2ForCausalLM", files=pooling_files(pooling_mode="lasttoken"))
    code = {"AutoModel": "modeling_qwen.Qwen2Model", "AutoConfig": None}
    rows = rows_of(rng)
    expected = states_of(load(folder, "Qwen2ForCausalLM").model, rows)
    set_fields(folder, "config.json", auto_map=code, is_causal=False)

    with Encoder.from_pretrained(folder, dtype="fp32") as encoder:
        actual = encoder.embed(rows)

    assert_rows_close(actual, [row[-1] for row in expected], roundings=encoder_roundings(folder))
    drop_field(folder, "config.json", "is_causal")
    with refused("has auto_map, which names code of the checkpoint"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("Llama", NEMOTRON | {"pooling": "weighted_avg"}, 'has sequence_pooling "weighted_avg"'),
        ("Llama", NEMOTRON | {"temperature": 0}, "allowed: numbers above 0"),
        (
            "Llama",
            NEMOTRON | {"is_causal": True},
            'has model_type "llama_bidirec" and is_causal true',
        ),
        ("Llama", NEMOTRON | {"auto_map": {"AutoModel": "m.Mine"}}, 'auto_map with "m.Mine"'),
        ("Qwen3", VOYAGE | {"auto_map": {"AutoModel": "m.Mine"}}, 'auto_map with "m.Mine"'),
        ("Qwen3", VOYAGE | {"is_causal": True}, "make them agree"),
        ("Qwen2", {"is_causal": False, "auto_map": {"AutoModel": "m.Mine"}}, 'with "m.Mine"'),
    ],
)
def test_refuses_another_code_or_a_contradiction(make_checkpoint, kind, fields, message):
    folder = make_checkpoint(f"{kind}Model")
    set_fields(folder, "config.json", **fields)

    with refused(message):
        Checkpoint.open(folder)


def test_the_projection_of_voyage_is_not_optional(make_checkpoint):
    folder = make_checkpoint("Qwen3Model")
    set_fields(folder, "config.json", **VOYAGE)
    assert json.loads((folder / "config.json").read_text())["num_labels"] == 23

    with refused("linear.weight"):
        Checkpoint.open(folder).check_task("embed")
