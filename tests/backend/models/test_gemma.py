"""Gemma: tokens that read later ones, files of multimodal models, and what is refused."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer import modules

from tests.checkpoints import SMALL_DECODERS, WEIGHTS, drop_field, set_fields
from tests.closeness import assert_close, assert_rows_close, encoder_roundings
from varlen import Encoder
from varlen.models import gemma
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_decoder

from ..refusals import refused_checkpoint as refused
from .oracle import assert_states_equal, decoded, load_oracle
from .paged import run_in_chunks

CPU = torch.device("cpu")
GEMMA2, GEMMA3, MODEL = "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3TextModel"
BOTH_WAYS = {"use_bidirectional_attention": True, "sliding_window": 9}
CONFIG = "config.json"
END = "<|endoftext|>"
BYTE_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": END,
    "eos_token": END,
}
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
TEXTS = ["the cat", "a", "river, the river! is it 42? " * 4, "thé 河", ""]
LENGTHS = [1, 2, 40, 100]


def rows_of(rng):
    return [rng.integers(0, 250, length).tolist() for length in LENGTHS]


def expected_hidden(folder, kind, rows):
    return decoded(load_oracle(folder, kind), rows)[0]


def windows_of(folder):
    return gemma.GemmaConfig.read(Checkpoint.open(folder).config).windows


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_key_value_heads": 1, "head_dim": 20, "num_hidden_layers": 7, "layer_types": None},
        # an odd window, and one that is wider than every text on both sides
        {"sliding_window": 8},
        {"sliding_window": 5000},
        {"is_causal": False},
        {"is_causal": False, "use_bidirectional_attention": False},
    ],
    ids=["", "pattern", "odd", "wide", "both fields", "the field of every decoder"],
)
def test_tokens_may_read_later_ones_too(make_checkpoint, rng, options):
    folder = make_checkpoint(MODEL, **{**BOTH_WAYS, **options})
    rows = rows_of(rng)

    assert_states_equal(folder, expected_hidden(folder, MODEL, rows), rows)


def test_the_window_of_a_file_has_both_sides_if_tokens_read_later_ones(make_checkpoint):
    both, causal = make_checkpoint(MODEL, **BOTH_WAYS), make_checkpoint(MODEL, sliding_window=9)

    assert json.loads((both / CONFIG).read_text())["sliding_window"] == 8
    assert windows_of(both) == (5, 0, 5, 0)
    assert windows_of(causal) == (9, 0, 9, 0)


def test_a_model_whose_tokens_read_later_ones_does_not_generate(make_checkpoint):
    folder = make_checkpoint(GEMMA3, **BOTH_WAYS)
    checkpoint = Checkpoint.open(folder)

    assert (checkpoint.task, checkpoint.tasks) == ("embed", ("embed", "hidden"))
    with refused('task "generate" needs a model whose tokens read only earlier ones'):
        checkpoint.check_task("generate")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_embedding_gemma_has_the_vectors_of_sentence_transformers(
    make_checkpoint, tmp_path, dtype
):
    base, folder = make_checkpoint(MODEL, **BOTH_WAYS), tmp_path / "saved"
    set_fields(base, "tokenizer_config.json", **BYTE_TOKENIZER)
    transformer = modules.Transformer(str(base), model_kwargs={"dtype": torch.float32})
    hidden = transformer.get_embedding_dimension()
    layers = [
        Dense(hidden, 150, bias=False, activation_function=torch.nn.Identity()),
        Dense(150, 48, bias=False, activation_function=torch.nn.Identity()),
    ]
    pool = modules.Pooling(hidden, pooling_mode="mean")
    made = SentenceTransformer(
        modules=[transformer, pool, *layers, Normalize()], prompts=PROMPTS, device="cpu"
    )
    made.save_pretrained(str(folder), create_model_card=False)
    made = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})

    with Encoder.from_pretrained(folder, dtype=dtype, threads=1) as encoder:
        for name in PROMPTS:
            expected = made.encode(TEXTS, prompt_name=name)
            actual = encoder.embed(TEXTS, prompt_name=name)
            alone = np.concatenate([encoder.embed([text], prompt_name=name) for text in TEXTS])
            if dtype == "bf16":
                assert ((actual * expected).sum(axis=1) > 0.999).all()
                continue
            assert_close(actual, expected, roundings=encoder_roundings(folder) + 200)
            assert_close(alone, expected, roundings=encoder_roundings(folder) + 200)
        if dtype == "fp32":
            made.truncate_dim = 16
            expected = made.encode(TEXTS, prompt_name="query", normalize_embeddings=True)
            actual = encoder.embed(TEXTS, prompt_name="query", dimensions=16)
            assert_close(actual, expected, roundings=encoder_roundings(folder) + 200)


@pytest.mark.parametrize("kind", ["Gemma2Model", MODEL], ids=["gemma2", "gemma3"])
def test_a_causal_gemma_embeds_by_its_last_token(make_checkpoint, tmp_path, kind):
    """As bge-multilingual-gemma2 and harrier do."""
    base, folder = make_checkpoint(kind), tmp_path / "saved"
    set_fields(base, "tokenizer_config.json", **BYTE_TOKENIZER)
    transformer = modules.Transformer(str(base), model_kwargs={"dtype": torch.float32})
    pool = modules.Pooling(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
    instruct = {"web": "<instruct>Given a query, retrieve passages.\n<query>"}
    made = SentenceTransformer(
        modules=[transformer, pool, Normalize()], prompts=instruct, device="cpu"
    )
    made.save_pretrained(str(folder), create_model_card=False)
    texts = TEXTS[:-1]

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        actual = encoder.embed(texts, prompt_name="web")

    expected = made.encode(texts, prompt_name="web")
    assert_close(actual, expected, roundings=encoder_roundings(folder) + 100)


def save_multimodal(folder, **text):
    """Save a Gemma 3 that reads images, and return the oracle of its text part."""
    # files have what differs from the defaults of transformers
    config = transformers.Gemma3Config(
        text_config={
            "vocab_size": 263,
            "initializer_range": 0.2,
            **SMALL_DECODERS["Gemma3"],
            **text,
        },
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 20,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return model


def with_names(folder, rename):
    tensors = {rename(name): each.clone() for name, each in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)


def new_name(name):
    """Return the name of a tensor in transformers 5, given its name in files."""
    name = name.replace("language_model.model.", "model.language_model.")
    return name if name.startswith("model.") else f"model.{name}"


@pytest.mark.parametrize("rename", [str, new_name], ids=["saved", "modules"])
def test_the_text_part_of_a_multimodal_file_generates(tmp_path, rng, make_checkpoint, rename):
    model = save_multimodal(tmp_path)
    with_names(tmp_path, rename)
    tokenizer = make_checkpoint(GEMMA3) / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    rows = rows_of(rng)

    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.task, checkpoint.config["model_type"]) == ("generate", "gemma3_text")
    checkpoint.check_task("generate")
    _, logits = run_in_chunks(tmp_path, rows, sizes=[1, 1, 7, 33])

    with torch.inference_mode():
        expected = [model(torch.tensor([row])).logits[0] for row in rows]
    shape = SMALL_DECODERS["Gemma3"]
    write_as = tmp_path / "as_text"
    write_as.mkdir()
    set_fields(write_as, CONFIG, model_type="gemma3_text", **shape)
    assert_rows_close(logits, expected, roundings=encoder_roundings(write_as))


def test_a_multimodal_file_says_only_what_differs_from_the_defaults_of_transformers():
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    given = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "rope_scaling": scaling, **text},
        "vision_config": {"image_size": 896},
        # transformers does not read them here
        "hidden_size": 7,
        "sliding_window": 3,
        "is_causal": False,
    }

    config = gemma.text_part(given)
    mine = gemma.GemmaConfig.read(config)

    theirs = transformers.Gemma3TextConfig(rope_scaling=dict(scaling), **text)
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["eos_token_id"] == [1, 106]
    assert "is_causal" not in config
    for name, field in {"vocab_size": "vocab_size", "hidden": "hidden_size"}.items():
        assert getattr(mine, name) == getattr(theirs, field)
    assert (mine.inner, mine.positions) == (theirs.intermediate_size, 131_072)
    heads = theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim
    assert (mine.heads.queries, mine.heads.keys, mine.heads.dim) == heads
    assert mine.windows == tuple(
        1024 if kind == "sliding_attention" else 0 for kind in theirs.layer_types
    )
    of_kind = theirs.rope_parameters
    for rotary, kind in zip(mine.rotary, theirs.layer_types, strict=True):
        assert rotary.theta == of_kind[kind]["rope_theta"]
        assert rotary.scaling.factor == of_kind[kind].get("factor", 1.0)


def test_a_text_part_of_another_model_is_refused(make_checkpoint):
    folder = make_checkpoint(GEMMA3)
    set_fields(folder, CONFIG, model_type="gemma3", text_config={"model_type": "llama"})

    with refused('allowed: an object with model_type "gemma3_text"'):
        Checkpoint.open(folder)


def test_names_of_transformers_4_mean_the_same(make_checkpoint, rng):
    positions = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    folder = make_checkpoint(GEMMA3, rope_parameters=positions)
    rows = rows_of(rng)
    _, expected = decoded(load_oracle(folder, GEMMA3), rows)

    for name in ("rope_parameters", "layer_types", "dtype"):
        drop_field(folder, CONFIG, name)
    old = {"rope_theta": 5e5, "rope_local_base_freq": 300.0}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2}
    set_fields(folder, CONFIG, **old, torch_dtype="float32", cache_implementation="hybrid")

    _, logits = run_in_chunks(folder, rows, sizes=[1, 1, 7, 33])
    assert_rows_close(logits, expected, roundings=encoder_roundings(folder))
    _, of_theirs = decoded(load_oracle(folder, GEMMA3), rows)
    assert_rows_close(logits, of_theirs, roundings=encoder_roundings(folder))


def test_layers_of_one_kind_share_a_table_of_positions(make_checkpoint):
    decoder = load_decoder(Checkpoint.open(make_checkpoint(GEMMA3)), torch.float32, CPU)

    first, second, third, fourth = decoder.cos_sin
    assert (first is third, second is fourth, first is second) == (True, True, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_factor_of_embeddings_has_the_dtype_of_the_model(make_checkpoint, dtype):
    decoder = load_decoder(Checkpoint.open(make_checkpoint(GEMMA3)), dtype, CPU)

    assert decoder.embedding_scale == float(torch.tensor(6.0, dtype=dtype))
    assert gemma._rounded(3072**0.5, torch.empty(1, dtype=torch.bfloat16)) == 55.5


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "allowed: false"),
        (GEMMA2, {"use_bidirectional_attention": True}, "allowed: false"),
        (GEMMA2, {"sliding_window": None}, "has sliding_window None"),
        (GEMMA2, {"final_logit_softcapping": -1.0}, "allowed: numbers above 0"),
        (GEMMA2, {"query_pre_attn_scalar": 0}, "allowed: numbers above 0"),
        (GEMMA2, {"layer_types": ["chunked_attention"] * 3}, "allowed: 3 names, each of"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "softcapping 50.0; allowed: null"),
        (GEMMA3, {"max_position_embeddings": 10**9}, "asks for more than 16777216 positions"),
        (GEMMA3, {"rope_parameters": {"rope_theta": 1e4}}, "has rope_parameters"),
        (GEMMA3, {"sliding_window_pattern": 0}, "has sliding_window_pattern 0"),
        (GEMMA3, {"hidden_activation": "tanh"}, 'has hidden_activation "tanh"'),
    ],
)
def test_refuses_what_would_change_results(make_checkpoint, kind, fields, message):
    folder = make_checkpoint(kind)
    set_fields(folder, CONFIG, **fields)

    with refused(message):
        Checkpoint.open(folder)
