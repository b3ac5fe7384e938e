"""Dense and LayerNorm modules, several poolings and prompts give the vectors of sentence-transformers."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer import modules

from tests.backend.refusals import refused_checkpoint as refused
from tests.backend.refusals import refused_request
from tests.checkpoints import END_OF_TEXT, set_fields
from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.errors import RequestError
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.vectors import VectorForm

TEXTS = ["the cat", "a", "river, the river! is it 42?"]
DENSE = "2_Dense/config.json"
PROMPTS = {"query": "the cat is: ", "document": ""}


def save(folder, target, *, pooling="mean", dense=(), normalize=True, prompts=None):
    """Save a checkpoint of these modules, and return it as sentence-transformers loads it."""
    torch.manual_seed(1)
    transformer = modules.Transformer(str(folder))
    stack = [transformer, modules.Pooling(transformer.get_embedding_dimension(), pooling)]
    for options in dense:
        features = stack[-1].get_embedding_dimension()
        stack.append(norm_of(features) if options == "norm" else Dense(features, **options))
    if normalize:
        stack.append(Normalize())
    made = SentenceTransformer(modules=stack, device="cpu", prompts=prompts)
    made.save_pretrained(str(target))
    return SentenceTransformer(str(target), device="cpu")


def norm_of(features):
    """Return a LayerNorm with random weights."""
    layer = modules.LayerNorm(features)
    torch.nn.init.normal_(layer.norm.weight)
    torch.nn.init.normal_(layer.norm.bias)
    return layer


@pytest.fixture
def saved(small_bert, tmp_path):
    """Return a checkpoint with one Dense module, which a test may change."""
    save(small_bert, tmp_path / "saved", dense=[{"out_features": 10}])
    return tmp_path / "saved"


# vectors as long as they are show more; all other tests normalize
@pytest.mark.parametrize("normalize", [pytest.param(True, marks=pytest.mark.full), False])
@pytest.mark.parametrize(
    "pooling, dense",
    [
        ("cls", [{"out_features": 10}]),
        ("mean", [{"out_features": 31, "activation_function": torch.nn.Identity(), "bias": False}]),
        ("max", [{"out_features": 24, "activation_function": torch.nn.GELU()}]),
        (("mean", "cls"), []),
        ("weightedmean", []),
        (("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"), []),
        (("lasttoken", "max", "mean"), [{"out_features": 5, "activation_function": None}]),
        (
            "mean",
            [{"out_features": 40, "activation_function": torch.nn.ReLU()}, {"out_features": 7}],
        ),
        # a residual of another width has a layer of its own
        ("cls", [{"out_features": 24, "use_residual": True}]),
        (
            ("mean", "max"),
            [
                {"out_features": 10, "use_residual": True},
                {"out_features": 10, "use_residual": True, "activation_function": torch.nn.GELU()},
            ],
        ),
        ("mean", ["norm"]),
        ("cls", ["norm", {"out_features": 9, "use_residual": True}, "norm"]),
    ],
    ids=str,
)
def test_vectors_are_those_of_sentence_transformers(
    small_bert, tmp_path, pooling, dense, normalize
):
    folder = tmp_path / "saved"
    made = save(small_bert, folder, pooling=pooling, dense=dense, normalize=normalize)
    expected = made.encode(TEXTS)

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        actual = encoder.embed(TEXTS)
        alone = np.concatenate([encoder.embed([text]) for text in TEXTS])

    roundings = encoder_roundings(folder) + 100
    assert_close(actual, expected, roundings=roundings)
    assert_close(alone, expected, roundings=roundings)
    checkpoint = Checkpoint.open(folder)
    assert (checkpoint.embedding_size, checkpoint.normalize) == (expected.shape[1], normalize)


def test_an_encoder_of_t5_with_a_dense_module_is_that_of_sentence_transformers(
    make_checkpoint, tmp_path
):
    folder = make_checkpoint("T5EncoderModel")
    tokens = {"pad_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    set_fields(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **tokens)
    dense = {"out_features": 12, "activation_function": torch.nn.Identity(), "bias": False}
    expected = save(folder, tmp_path / "saved", dense=[dense]).encode(TEXTS, batch_size=1)

    with Encoder.from_pretrained(tmp_path / "saved", dtype="fp32", threads=1) as encoder:
        actual = encoder.embed(TEXTS)

    assert_close(actual, expected, roundings=encoder_roundings(tmp_path / "saved") + 100)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bf16"},
        pytest.param({"dtype": "int8", "warmup_seconds": 1}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_layers_stay_in_fp32_in_other_dtypes(small_bert, tmp_path, settings):
    layers = [{"out_features": 10, "use_residual": True}, "norm", {"out_features": 10}]
    made = save(small_bert, tmp_path / "saved", dense=layers)
    save(small_bert, tmp_path / "pooled", normalize=False)
    expected = made.encode(TEXTS)

    with Encoder.from_pretrained(tmp_path / "saved", threads=1, **settings) as encoder:
        actual = encoder.embed(TEXTS)
    with Encoder.from_pretrained(tmp_path / "pooled", threads=1, **settings) as encoder:
        pooled = encoder.embed(TEXTS)

    # the layers lose nothing: what differs from the model in fp32 came before them
    features = {"sentence_embedding": torch.from_numpy(pooled).double()}
    for module in [*made.double()][2:]:
        features = module(features)
    assert_close(actual, features["sentence_embedding"], roundings=100)
    cosines = (actual * expected).sum(1) / np.linalg.norm(actual, axis=1)
    assert cosines.min() > 0.99


@pytest.mark.parametrize(
    "kind, start",
    [
        ("BertModel", 0),
        ("DistilBertModel", 2),
        pytest.param("AlbertModel", 1, marks=pytest.mark.full),
        pytest.param("MPNetModel", 1, marks=pytest.mark.full),
        pytest.param("DebertaV2Model", 1, marks=pytest.mark.full),
    ],
)
def test_outputs_of_layers_are_mixed_as_by_sentence_transformers(
    make_checkpoint, tmp_path, kind, start
):
    expected = save_mix(make_checkpoint(kind), tmp_path, start).encode(TEXTS)

    with Encoder.from_pretrained(tmp_path, dtype="fp32", threads=1) as encoder:
        mixed = encoder.embed(TEXTS)
        alone = np.concatenate([encoder.embed([text]) for text in TEXTS])
    with Encoder.from_pretrained(tmp_path, dtype="bf16", threads=1) as encoder:
        half = encoder.embed(TEXTS)

    roundings = encoder_roundings(tmp_path) + 100
    assert_close(mixed, expected, roundings=roundings)
    assert_close(alone, expected, roundings=roundings)
    assert (half * expected).sum(1).min() > 0.999


def save_mix(folder, target, start):
    """Save a checkpoint with WeightedLayerPooling, and return it as sentence-transformers loads it."""
    set_fields(folder, "config.json", output_hidden_states=True)
    tokens = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    set_fields(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **tokens)
    transformer = modules.Transformer(str(folder))
    features = transformer.get_embedding_dimension()
    config = transformer.auto_model.config
    mix = modules.WeightedLayerPooling(features, config.num_hidden_layers, start)
    torch.nn.init.uniform_(mix.layer_weights.data, 0.2, 2)
    stack = [transformer, mix, modules.Pooling(features), Normalize()]
    SentenceTransformer(modules=stack, device="cpu").save_pretrained(str(target))
    set_fields(target, "config.json", output_hidden_states=True)
    return SentenceTransformer(str(target), device="cpu")


def test_a_mix_that_gets_no_outputs_has_no_effect_as_in_sentence_transformers(
    make_checkpoint, tmp_path
):
    save_mix(make_checkpoint(), tmp_path, 0)
    set_fields(tmp_path, "config.json", output_hidden_states=False)
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)

    with Encoder.from_pretrained(tmp_path, dtype="fp32", threads=1) as encoder:
        assert_close(encoder.embed(TEXTS), expected, roundings=encoder_roundings(tmp_path) + 100)


def test_refuses_a_mix_of_other_layers_and_in_other_families(make_checkpoint, tmp_path):
    save_mix(make_checkpoint("BertModel"), tmp_path / "bert", 0)
    set_fields(tmp_path / "bert", "1_WeightedLayerPooling/config.json", layer_start=3)
    with refused("num_hidden_layers 2 and layer_start 3; allowed: 2, the layers of the model, and"):
        Checkpoint.open(tmp_path / "bert")

    save_mix(make_checkpoint("ModernBertModel"), tmp_path / "modern", 0)
    with refused('"WeightedLayerPooling", which is not served with model_type "modernbert"'):
        Checkpoint.open(tmp_path / "modern")


def test_the_rounding_of_pplx_embed_is_its_arithmetic(small_bert, tmp_path):
    save(small_bert, tmp_path, normalize=False)
    modules_of = json.loads((tmp_path / "modules.json").read_text())
    own = {"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer"}
    with Encoder.from_pretrained(tmp_path, dtype="fp32", threads=1) as encoder:
        pooled = encoder.embed(TEXTS)
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS).astype(np.float64)
    (tmp_path / "modules.json").write_text(
        json.dumps([*modules_of, {**own, "kwargs": ["quantization"]}])
    )

    with Encoder.from_pretrained(tmp_path, dtype="fp32", threads=1) as encoder:
        rounded = encoder.embed(TEXTS)
        unit = encoder.embed(TEXTS, normalize=True)

    np.testing.assert_array_equal(rounded, np.round(rounded))
    # a number beside the middle of two may go either way
    assert np.abs(rounded - 127 * np.tanh(expected)).max() < 0.5 + 1e-3
    np.testing.assert_allclose(
        unit, rounded / np.linalg.norm(rounded, axis=1, keepdims=True), rtol=1e-5
    )
    np.testing.assert_array_equal(VectorForm(dtype="int8", is_rounded=True).of(rounded), rounded)
    bits = VectorForm(dtype="ubinary", is_rounded=True).of(rounded)
    np.testing.assert_array_equal(bits, np.packbits(pooled >= 0, axis=1))
    short = VectorForm(8, dtype="binary", is_rounded=True).of(rounded)
    np.testing.assert_array_equal(short, np.packbits(pooled[:, :8] >= 0, axis=1).astype(int) - 128)


def test_a_request_decides_about_normalization_after_the_layers(saved):
    with Encoder.from_pretrained(saved, dtype="fp32", threads=1) as encoder:
        plain = encoder.embed(TEXTS, normalize=False)
        unit = encoder.embed(TEXTS)
        short = encoder.embed(TEXTS, dimensions=4)
        with refused_request("dimensions is 11; allowed: whole numbers from 1 to 10"):
            encoder.embed(TEXTS, dimensions=11)

    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert abs(lengths - 1).min() > 1e-3
    np.testing.assert_allclose(unit, plain / lengths, rtol=1e-5)
    lengths = np.linalg.norm(plain[:, :4], axis=1, keepdims=True)
    np.testing.assert_allclose(short, plain[:, :4] / lengths, rtol=1e-4)


def test_flags_of_pooling_are_concatenated_in_the_order_of_sentence_transformers(
    small_bert, tmp_path
):
    folder = tmp_path / "saved"
    save(small_bert, folder)
    flags = {"word_embedding_dimension": 24}
    chosen = "lasttoken weightedmean_tokens mean_sqrt_len_tokens mean_tokens cls_token".split()
    flags |= {f"pooling_mode_{each}": True for each in chosen}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)

    with Encoder.from_pretrained(folder, dtype="fp32", threads=1) as encoder:
        np.testing.assert_allclose(encoder.embed(TEXTS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"use_residual": 1}, "has use_residual 1; allowed: true, false"),
        ({"module_input_name": "token_embeddings"}, 'has module_input_name "token_embeddings"'),
        ({"activation_function": "torch.nn.Softplus"}, "allowed: Identity, Tanh, GELU, ReLU, SiLU"),
        ({"in_features": 23}, "has in_features 23; allowed: 24, the features of the vector"),
        ({"out_features": 0}, "has out_features 0; allowed: whole numbers from 1"),
        ({"scale": 2}, 'has the field "scale" (2)'),
    ],
)
def test_refuses_a_field_of_a_dense_module_that_is_not_served(saved, fields, message):
    set_fields(saved, DENSE, **fields)

    with refused(message) as caught:
        Checkpoint.open(saved)
    assert str(caught.value).startswith(f"{DENSE} has")


def test_refuses_a_norm_of_another_width_or_with_another_field(small_bert, tmp_path):
    folder = tmp_path / "saved"
    save(small_bert, folder, dense=["norm"])
    for fields, message in (
        ({"dimension": 23}, "2_LayerNorm/config.json has dimension 23; allowed: 24, the features"),
        ({"dimension": 24, "eps": 1e-6}, '2_LayerNorm/config.json has the field "eps" (1e-06)'),
    ):
        set_fields(folder, "2_LayerNorm/config.json", **fields)
        with refused(message):
            Checkpoint.open(folder)


def test_refuses_tensors_that_are_not_those_of_the_config(saved):
    weights = load_file(saved / "2_Dense" / "model.safetensors")
    save_file({**weights, "linear.scale": torch.ones(3)}, saved / "2_Dense" / "model.safetensors")
    with refused('the checkpoint has the tensor "linear.scale"'):
        Checkpoint.open(saved).check_task("embed")
    # another task does without it
    Checkpoint.open(saved).check_task("hidden")

    (saved / "2_Dense" / "model.safetensors").unlink()
    with refused("has no model.safetensors"):
        Checkpoint.open(saved).check_task("embed")


def test_refuses_a_pooling_that_does_not_exist(saved):
    set_fields(saved, "1_Pooling/config.json", pooling_mode=["mean", "median"])

    with refused(
        "1_Pooling/config.json has the pooling ['mean', 'median']; allowed: one or more of ['cls', 'mean'"
    ):
        Checkpoint.open(saved)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_named_prompt_gives_the_vectors_of_sentence_transformers(small_bert, tmp_path, name):
    made = save(small_bert, tmp_path / "saved", prompts=PROMPTS)
    made.default_prompt_name = "query"
    made.save_pretrained(str(tmp_path / "saved"))
    expected = made.encode(TEXTS, prompt_name=name)

    with Encoder.from_pretrained(tmp_path / "saved", dtype="fp32", threads=1) as encoder:
        actual = encoder.embed(TEXTS, prompt_name=name)
        with pytest.raises(RequestError, match="prompt_name is 'q'; this model has the prompts"):
            encoder.embed(TEXTS, prompt_name="q")

    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
