"""jina-embeddings-v3 and jina-reranker-v2 match transformers; adapters are merged at load."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import (
    WEIGHTS,
    change_tensors,
    module,
    save_checkpoint,
    set_fields,
    write_file,
)
from tests.closeness import assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.models.checkpoint.first_releases import to_native
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.notes import checkpoint_notes

from .oracle import hidden_states, load_oracle

CODE = "jinaai/xlm-roberta-flash-implementation--modeling"
ADAPTERS = ["retrieval.query", "retrieval.passage", "separation"]
# As in jina-embeddings-v3, but small.
CONFIG = {
    "architectures": ["XLMRobertaModel"],
    "attention_probs_dropout_prob": 0.1,
    "auto_map": {
        "AutoConfig": "jinaai/xlm-roberta-flash-implementation--configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": f"{CODE}_lora.XLMRobertaLoRA",
        "AutoModelForMaskedLM": f"{CODE}_xlm_roberta.XLMRobertaForMaskedLM",
    },
    "bos_token_id": 0,
    "classifier_dropout": None,
    "emb_pooler": None,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-05,
    "load_trained_adapters": True,
    "lora_adaptations": ADAPTERS,
    "lora_alpha": 1,
    "lora_dropout_p": 0.0,
    "lora_main_params_trainable": False,
    "lora_rank": 4,
    "matryoshka_dimensions": [32, 64],
    "model_type": "xlm-roberta",
    "output_past": True,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "rotary_emb_base": 777.0,
    "task_instructions": dict.fromkeys(ADAPTERS, "Represent: "),
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "truncate_dim": None,
    "type_vocab_size": 1,
    "use_cache": True,
    "use_flash_attn": True,
    "use_reentrant": False,
}
SIZES = (
    "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size"
    " max_position_embeddings"
).split()


def rows_of(rng):
    return [rng.integers(5, 60, length).tolist() for length in (1, 2, 7, 60, 33, 7)]


def save_hub_form(folder):
    """Save a checkpoint in the form of the hub.

    Return transformers' tensors and config.json.
    """
    rotary = {"rope_type": "default", "rope_theta": 777.0}
    save_checkpoint(folder, "JinaEmbeddingsV3Model", rope_parameters=rotary)
    given = json.loads((folder / "config.json").read_text())
    sizes = {name: given[name] for name in SIZES}
    tensors = load_file(folder / WEIGHTS)
    stored = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            stored[f"roberta.{name}"] = tensor
            continue
        stem = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        rows, columns = tensor.shape
        count, rank = len(ADAPTERS), CONFIG["lora_rank"]
        shapes = [(count, rank, columns), (count, rows, rank)]
        if "embeddings." in name:
            shapes = [(count, rows, rank), (count, rank, columns)]
        stored[f"{stem}.original"] = tensor
        for letter, shape in zip("AB", shapes, strict=True):
            factor = torch.randn(shape, generator=generator) * 0.3
            stored[f"{stem}.0.lora_{letter}"] = factor
    save_file(stored, folder / WEIGHTS)
    write_file(folder, "config.json", {**CONFIG, **sizes})
    return tensors, given


@pytest.fixture
def hub_form(tmp_path):
    """Return a function that saves a checkpoint in the form of the hub."""
    return lambda: (tmp_path / "hub", *save_hub_form(tmp_path / "hub"))


def oracle_of(tmp_path, tensors, given, stored, number):
    """Return transformers' own model of the weights, an adapter merged in float64."""
    merged = dict(tensors)
    for name, tensor in tensors.items():
        stem = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight.0.lora_"
        if number is not None and f"{stem}A" in stored:
            a, b = (stored[f"{stem}{letter}"][number].double() for letter in "AB")
            product = a @ b if "embeddings." in name else b @ a
            merged[name] = (tensor.double() + product / CONFIG["lora_rank"]).float()
    folder = tmp_path / "oracle"
    write_file(folder, "config.json", given)
    save_file(merged, folder / WEIGHTS, {"format": "pt"})
    return load_oracle(folder, given["architectures"][0])


@pytest.mark.parametrize("adapter", ["none", *ADAPTERS[:2]])
def test_hidden_states_match_transformers_with_the_merged_adapter(hub_form, tmp_path, rng, adapter):
    folder, tensors, given = hub_form()
    rows = rows_of(rng)

    with Encoder.from_pretrained(folder, task="hidden", dtype="fp32", adapter=adapter) as encoder:
        actual = encoder.hidden(rows)

    number = None if adapter == "none" else ADAPTERS.index(adapter)
    model = oracle_of(tmp_path, tensors, given, load_file(folder / WEIGHTS), number)
    expected = hidden_states(model, rows)
    assert_rows_close(actual, expected, roundings=encoder_roundings(tmp_path / "oracle"))


def test_bf16_keeps_the_direction_of_vectors(hub_form, tmp_path, rng):
    folder, tensors, given = hub_form()
    rows = rows_of(rng)
    write_file(
        folder,
        "modules.json",
        [
            {**module("Transformer"), "type": "custom_st.Transformer"},
            module("Pooling", "1_Pooling"),
        ],
    )
    write_file(folder, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True})

    with Encoder.from_pretrained(folder, dtype="bf16", adapter=ADAPTERS[0]) as encoder:
        actual = np.stack(encoder.embed(rows, normalize=True))

    model = oracle_of(tmp_path, tensors, given, load_file(folder / WEIGHTS), 0)
    means = [states.mean(dim=0) for states in hidden_states(model, rows)]
    expected = np.stack([(mean / mean.norm()).numpy() for mean in means])
    assert (actual * expected).sum(axis=1).min() > 0.999


def save_reranker(folder):
    """Save a reranker of the same code, and return transformers' model of it."""
    kind = "XLMRobertaForSequenceClassification"
    save_checkpoint(folder, kind, num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    given = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / WEIGHTS)
    stored = {}
    for name, tensor in tensors.items():
        if ".self.query." in name:
            parts = [tensors[name.replace("query", part)] for part in ("query", "key", "value")]
            new = name.replace("attention.self.query", "mixer.Wqkv")
            stored[new] = torch.cat(parts)
        elif ".self." not in name:
            stored[name] = tensor
    for old, new in (
        ("embeddings.LayerNorm", "emb_ln"),
        ("encoder.layer.", "encoder.layers."),
        ("attention.output.dense", "mixer.out_proj"),
        ("attention.output.LayerNorm", "norm1"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.LayerNorm", "norm2"),
        ("output.dense", "mlp.fc2"),
    ):
        stored = {name.replace(old, new): tensor for name, tensor in stored.items()}
    save_file(stored, folder / WEIGHTS)
    config = {key: value for key, value in CONFIG.items() if not key.startswith("lora_")}
    more = {"architectures": [kind], "id2label": {"0": "LABEL_0"}, "pad_token_id": 4}
    sizes = {name: given[name] for name in SIZES}
    absolute = {"position_embedding_type": "absolute", "layer_norm_eps": given["layer_norm_eps"]}
    write_file(folder, "config.json", {**config, **more, **sizes, **absolute})
    return model


def test_a_reranker_of_the_same_code_has_a_position_table(tmp_path, rng):
    folder = tmp_path / "reranker"
    model = save_reranker(folder)
    rows = rows_of(rng)

    with Encoder.from_pretrained(folder, task="rerank", dtype="fp32") as encoder:
        actual = encoder.classify(rows)

    with torch.inference_mode():
        expected = [model(torch.tensor([row])).logits[0] for row in rows]
    assert_rows_close(actual, expected, roundings=encoder_roundings(folder))


def test_the_form_of_transformers_stays_as_it_is():
    native = to_native({**CONFIG, "max_position_embeddings": 64})

    assert to_native(native) == native
    assert native["architectures"] == ["JinaEmbeddingsV3Model"]
    assert native["lora_adaptations"] == ADAPTERS
    lora = to_native({**CONFIG, "architectures": ["XLMRobertaLoRA"]})
    assert lora["architectures"] == ["JinaEmbeddingsV3Model"]
    assert "lora_rank" not in to_native({**CONFIG, "load_trained_adapters": False})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"position_embedding_type": "alibi"}, 'position_embedding_type "alibi"; allowed: absolut'),
        ({"truncate_dim": 16}, "has truncate_dim 16; allowed: null"),
        ({"auto_map": {"AutoModel": "mine.Other"}}, 'auto_map with "mine.Other", code that is not'),
        ({"lora_adaptations": "query"}, 'has lora_adaptations "query"; allowed: a list of names'),
        ({"window": 7}, 'has the field "window" (7), which this version does not know'),
    ],
)
def test_refuses_what_is_not_served(hub_form, change, message):
    folder, *_ = hub_form()
    set_fields(folder, "config.json", **change)

    with refused(message):
        Checkpoint.open(folder)


def test_an_adapter_is_one_of_the_checkpoint(hub_form, small_bert):
    folder, *_ = hub_form()

    with refused(f'adapter is "rerank"; allowed: none, {", ".join(ADAPTERS)}'):
        Checkpoint.open(folder, adapter="rerank")
    (note,) = checkpoint_notes(Checkpoint.open(folder), "hidden", 64)
    assert f"({', '.join(ADAPTERS)}), and none is merged" in note
    assert checkpoint_notes(Checkpoint.open(folder, adapter=ADAPTERS[1]), "hidden", 64) == ()
    with refused('adapter is "rerank"; this checkpoint has none'):
        Checkpoint.open(small_bert, adapter="rerank")


def test_factors_of_another_rank_are_refused_before_a_load(hub_form):
    folder, *_ = hub_form()
    set_fields(folder, "config.json", lora_rank=5)
    Checkpoint.open(folder).check_task("embed")

    with refused("config.json implies [3, 1, 5]"):
        Checkpoint.open(folder, adapter=ADAPTERS[0]).check_task("embed")


FACTOR = ".parametrizations.weight.0.lora_"


def without_factors(tensors):
    for name in [name for name in tensors if FACTOR in name]:
        del tensors[name]


def without_one(tensors):
    del tensors[next(name for name in tensors if name.endswith("lora_B"))]


def of_a_vector(tensors):
    tensors[f"roberta.emb_ln{FACTOR}A"] = torch.zeros(3, 4, 4)


@pytest.mark.parametrize(
    "change, message",
    [
        (without_factors, "and the weights have no factors of adapters; leave adapter out"),
        (without_one, 'no tensor "roberta.'),
        (of_a_vector, 'has factors of "roberta.emb_ln.weight", which is no matrix'),
    ],
)
def test_an_adapter_needs_its_factors(hub_form, change, message):
    folder, *_ = hub_form()
    change_tensors(folder, change)

    with refused(message):
        Checkpoint.open(folder, adapter=ADAPTERS[0]).check_task("embed")
