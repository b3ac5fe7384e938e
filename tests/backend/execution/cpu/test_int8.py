"""Encoders in int8: calibration, the programs they run, and vectors close to fp32."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from weakref import ref

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.closeness import assert_close, encoder_roundings
from varlen import Encoder
from varlen.config import EngineConfig
from varlen.errors import CheckpointError, ConfigError
from varlen.execution.cpu.linear_paths import paths_of, torch_threads
from varlen.execution.device import choose_dtype
from varlen.execution.int8 import calibration as quality
from varlen.execution.int8 import int8_model
from varlen.execution.int8.calibration import (
    Calibration,
    QuantizedLayer,
    VectorQuality,
    compare_vectors,
    file_name,
    layer_key,
    linear_weights,
    product_of,
    use_int8,
    weights_hash,
)
from varlen.execution.int8.calibration_texts import TEXTS
from varlen.execution.int8.layer_inputs import CalibratedEncoder, calibrate_layers
from varlen.execution.runner import Runner
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_encoder
from varlen.program.recorder import Recorder
from varlen_kernels.cpu import int8_products
from varlen_kernels.cpu.bodies.panel_layout import HAS_PAIRS
from varlen_kernels.cpu.int8_products import Int8Product
from varlen_kernels.reference.linear_int8 import OUTLIERS, REDUCED_LEVELS, nearest_codes

TEXT = ["the cat", "a river, the river and a cat?", "x", "the 39 cats are at the river again!"]
CPU = torch.device("cpu")
PANELS = Int8Product("linear_int8_panels", REDUCED_LEVELS)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache_home"))


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    monkeypatch.setattr(int8_model, "TEXTS", TEXTS[:16])


@pytest.fixture(scope="module")
def calibration(small_bert):
    """The calibration of the checkpoint in `folder`."""
    checkpoint = Checkpoint.open(small_bert)
    return int8_model.calibrate(load_model(checkpoint), TEXTS[:12])


def load_model(checkpoint):
    return CalibratedEncoder(lambda dtype: load_encoder(checkpoint, dtype, CPU), checkpoint)


def test_a_load_leaves_new_threads_as_many_cores_as_before(small_bert):
    with torch_threads(3):
        load_model(Checkpoint.open(small_bert))
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(torch.get_num_threads).result() == 3


def packed(weight, bias=None):
    product, outliers = product_of(8), torch.arange(OUTLIERS)
    operand = product.quantize(weight, bias, outliers, nearest_codes(weight, outliers))
    return QuantizedLayer(product.kernel, operand)


def change_fields(path, change):
    """Change fields of a stored calibration."""
    with safe_open(path, framework="pt") as file:
        fields = json.loads(file.metadata()["calibration"]) | change
    save_file(load_file(path), path, {"calibration": json.dumps(fields)})


def change_codes(path, change):
    """Change the codes of the first layer of a stored calibration, not the hash."""
    with safe_open(path, framework="pt") as file:
        fields = file.metadata()
    tensors = load_file(path)
    tensors["0.codes"] = change(tensors["0.codes"])
    save_file(tensors, path, fields)


def cosines(vectors, expected):
    norms = np.linalg.norm(vectors, axis=-1) * np.linalg.norm(expected, axis=-1)
    return (vectors * expected).sum(-1) / norms


def embeddings(folder, dtype, texts=TEXT):
    with Encoder.from_pretrained(folder, dtype=dtype, device="cpu") as encoder:
        return encoder.embed(texts)


def linear_program(hidden=40, features=24, layers=2):
    """Return a program of linear layers and a weak reference to each weight."""
    ops, numbers = Recorder(), torch.Generator().manual_seed(0)
    x = ops.input("x", ("tokens", hidden), torch.float32)
    weights = []
    for _ in range(layers):
        weights.append(torch.randn(hidden, features, generator=numbers))
        output = ops.linear(x, weights[-1], None)
    return ops.finish(output), [ref(weight) for weight in weights]


def test_quantized_layers_replace_fp32_weights_and_take_less_memory(monkeypatch):
    monkeypatch.setattr(int8_products, "int8_product", lambda bits: PANELS)
    program, weights = linear_program(hidden=400, features=240)
    before = program.weight_bytes
    layers = {layer_key(weight(), None): packed(weight()) for weight in weights[:1]}

    program = use_int8(program, layers)

    assert [op.kernel for op in program.ops] == [PANELS.kernel, "linear"]
    assert program.ops[0].operands[1].levels == PANELS.levels
    assert [weight() is None for weight in weights] == [True, False]
    assert program.weight_bytes < 0.65 * before


def recorded_layers(follow):
    """Return the kernels of an int8 layer and of what `follow` records behind it."""
    ops = Recorder()
    x, weight = ops.input("x", ("tokens", 8), torch.float32), torch.ones(8, 8)
    program = ops.finish(*follow(ops, x, ops.linear(x, weight, None)))
    layers = {layer_key(weight, None): packed(weight)}
    return [op.kernel for op in use_int8(program, layers).ops]


@pytest.mark.parametrize(
    "follow, kernels",
    [
        (lambda ops, x, y: [ops.activate(y, kind="gelu")], ["linear_int8_panels_activate"]),
        (lambda ops, x, y: [ops.tanh(y)], ["linear_int8_panels", "tanh"]),
        (lambda ops, x, y: [y, ops.activate(y, kind="gelu")], ["linear_int8_panels", "activate"]),
        (
            lambda ops, x, y: [ops.activate(y, kind="gelu"), ops.tanh(y)],
            ["linear_int8_panels", "activate", "tanh"],
        ),
        (
            lambda ops, x, y: [ops.add_layer_norm(y, x, torch.ones(8), None, eps=1e-5)],
            ["linear_int8_panels", "add_layer_norm"],
        ),
    ],
    ids=["activation", "another-op", "output", "two-readers", "norm"],
)
def test_a_layer_runs_what_follows_it_if_nothing_else_reads_it(monkeypatch, follow, kernels):
    monkeypatch.setattr(int8_products, "int8_product", lambda bits: PANELS)

    assert recorded_layers(follow) == kernels


def test_layers_that_share_a_weight_keep_their_biases():
    ops = Recorder()
    x = ops.input("x", ("tokens", 8), torch.float32)
    weight, biases = torch.ones(8, 8), [torch.zeros(8), torch.ones(8)]
    program = ops.finish(ops.linear(ops.linear(x, weight, biases[0]), weight, biases[1]))
    layers = {layer_key(weight, bias): packed(weight, bias) for bias in biases}

    program = use_int8(program, layers)

    for op, bias in zip(program.ops, biases, strict=True):
        _, layer = op.operands
        assert torch.equal(layer.fp32_rows[1], bias)


def test_the_largest_columns_are_the_outliers(folder):
    checkpoint = Checkpoint.open(folder)
    encoder = load_encoder(checkpoint, torch.float32, CPU)
    large = [3, 7, 11, 20]
    encoder.embedding_norm.weight[large] = 50.0
    model = CalibratedEncoder(lambda _: encoder, checkpoint)
    prompts = model.prompts([np.arange(9, dtype=np.int32)])

    layers = calibrate_layers(
        model.programs,
        model.served,
        lambda kernels: [*model.run(model.served, kernels, prompts)],
    )

    assert next(iter(layers.values())).outliers.tolist() == large


def test_vectors_are_close_to_fp32(folder):
    assert cosines(embeddings(folder, "int8"), embeddings(folder, "fp32")).min() > 0.995


def test_heads_are_not_in_int8(make_checkpoint):
    classifier = make_checkpoint("BertForSequenceClassification", num_labels=3)
    logits = []
    for dtype in ("fp32", "int8"):
        with Encoder.from_pretrained(classifier, dtype=dtype, device="cpu") as encoder:
            logits.append(encoder.classify(TEXT))
    checkpoint = Checkpoint.open(classifier)
    runner = Runner(checkpoint, EngineConfig(dtype="int8", device="cpu"))
    kernels = [op.kernel for op in runner.program.ops if op.kernel.startswith("linear")]
    # four layers of the encoder twice, then pooler and classifier
    product = int8_products.int8_product(8).kernel
    assert all(kernel.startswith(product) for kernel in kernels[:8])
    assert kernels[8:] == [paths_of(torch.float32)[-1]] * 2
    assert runner.info.cost_fields["int8"] == f"{product} of {choose_dtype('int8', CPU)}"
    np.testing.assert_allclose(*logits, rtol=0, atol=0.1 * np.abs(logits[0]).max())


def test_codes_of_7_bits_serve_an_encoder(folder, monkeypatch):
    monkeypatch.setattr(int8_products, "int8_product", lambda bits: PANELS)

    assert cosines(embeddings(folder, "int8"), embeddings(folder, "fp32")).min() > 0.99


def test_a_decoder_that_embeds_runs_in_int8(make_checkpoint):
    decoder = make_checkpoint("LlamaForCausalLM")
    vectors = []
    for dtype in ("int8", "fp32"):
        with Encoder.from_pretrained(decoder, task="embed", dtype=dtype, device="cpu") as encoder:
            vectors.append(encoder.embed(TEXT))

    assert cosines(*vectors).min() > 0.99


def test_a_vector_does_not_depend_on_other_texts(folder):
    with Encoder.from_pretrained(folder, dtype="int8", device="cpu", threads=1) as encoder:
        together = encoder.embed(TEXT)
        alone = np.concatenate([encoder.embed([text]) for text in TEXT])

    # attention and norms in fp32 may round in another order
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-2 * np.abs(alone).max())


def test_layers_with_large_errors_are_not_in_int8(folder, monkeypatch, caplog):
    monkeypatch.setattr(int8_model, "MAX_LAYER_ERROR", {8: 0.0})
    caplog.set_level(logging.INFO)

    vectors = embeddings(folder, "int8"), embeddings(folder, "bf16" if HAS_PAIRS else "fp32")
    assert_close(*vectors, roundings=encoder_roundings(folder))

    assert "int8: 0 of 8 linear layers of the encoder" in caplog.text


def test_a_low_quality_is_a_warning(folder, monkeypatch, caplog):
    monkeypatch.setattr(quality, "LEAST_COSINE", 1.1)

    embeddings(folder, "int8")

    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "int8 changes the answers of this checkpoint: cosine to fp32" in warning.getMessage()


def test_a_quality_of_nan_is_a_warning(folder, calibration, monkeypatch, caplog):
    nan = replace(calibration, quality=VectorQuality(8, float("nan"), float("nan"), float("nan")))
    monkeypatch.setattr(int8_model, "calibrate", lambda *_, **__: nan)
    checkpoint = Checkpoint.open(folder)
    model = load_model(checkpoint)

    int8_model.to_int8(model, model.served)

    assert "int8 changes the answers of this checkpoint: cosine to fp32 nan" in caplog.text


def test_few_texts_leave_the_quality_to_random_tokens(folder):
    checkpoint = Checkpoint.open(folder)

    measured = int8_model.calibrate(load_model(checkpoint), TEXTS[:4]).quality

    assert measured.texts == len(int8_model._RANDOM_TOKENS)
    assert -1 <= measured.spearman <= 1


@pytest.mark.parametrize("cores", [1, 3])
def test_a_calibration_does_not_depend_on_the_number_of_cores(folder, calibration, cores):
    model = load_model(Checkpoint.open(folder))

    again = int8_model.calibrate(model, TEXTS[:12], cores=cores)

    assert again == calibration
    for layer, expected in zip(again.layers, calibration.layers, strict=True):
        assert torch.equal(layer.outliers, expected.outliers)
        assert torch.equal(layer.scale, expected.scale)
        assert torch.equal(layer.codes, expected.codes)


def test_the_hash_of_weights_changes_with_one_of_them(folder):
    checkpoint = Checkpoint.open(folder)
    programs = load_model(checkpoint).programs
    before = weights_hash(programs)
    *_, (weight, _) = linear_weights(programs).values()

    weight[-1, 3] += 1

    assert weights_hash(programs) != before


def test_a_calibration_that_cannot_be_saved_leaves_the_old_one(folder, calibration, monkeypatch):
    path = calibration.save(folder)
    before = path.read_bytes()

    def fail(self, target):
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        replace(calibration, levels=3).save(folder)

    assert path.read_bytes() == before
    assert not list(folder.glob(".int8*"))


def test_a_calibration_is_stored_with_the_checkpoint_and_read_again(folder, calibration, caplog):
    caplog.set_level(logging.INFO)
    measured = embeddings(folder, "int8")
    path = calibration.save(folder)

    assert path == folder / "int8.safetensors"
    stored = Calibration.load(folder)
    assert stored == calibration
    for layer, expected in zip(stored.layers, calibration.layers, strict=True):
        assert torch.equal(layer.outliers, expected.outliers)
        assert torch.equal(layer.scale, expected.scale)
        assert torch.equal(layer.codes, expected.codes)
    assert cosines(embeddings(folder, "int8"), measured).min() > 0.99
    assert "measured in" in caplog.messages[0]
    assert "(6 texts), stored with the checkpoint" in caplog.text


@pytest.mark.parametrize("warmup_seconds", [0, 1])
def test_a_second_load_reads_the_calibration_from_the_cache(
    folder, tmp_path, caplog, warmup_seconds
):
    caplog.set_level(logging.INFO)
    cache = tmp_path / "cache"

    def load():
        caplog.clear()
        config = EngineConfig(
            dtype="int8", device="cpu", warmup_seconds=warmup_seconds, cache_folder=str(cache)
        )
        Runner(Checkpoint.open(folder), config, measures=True).close()
        return caplog.text

    assert "(8 texts), measured in" in load()
    (file,) = cache.glob("int8-*.safetensors")
    written = file.read_bytes()
    assert "(8 texts), from the cache" in load()

    for damage in (
        lambda: file.write_bytes(b"{"),
        lambda: change_fields(file, {"errors": []}),
        lambda: change_codes(file, lambda codes: -codes),
    ):
        damage()
        assert "(8 texts), measured in" in load()
        assert file.read_bytes() == written


@pytest.mark.parametrize(
    "change",
    [{"checkpoint": "another"}, {"weights": "another"}, {"levels": 3}],
    ids=["checkpoint", "weights", "levels"],
)
def test_a_calibration_that_does_not_fit_is_measured_again(folder, calibration, caplog, change):
    caplog.set_level(logging.INFO)
    change_fields(calibration.save(folder), change)

    embeddings(folder, "int8")

    assert "the stored calibration is of another checkpoint, task or CPU" in caplog.text
    assert "(8 texts), measured in" in caplog.text


def test_a_calibration_of_another_version_is_ignored(folder, calibration):
    change_fields(calibration.save(folder), {"version": 0})

    assert Calibration.load(folder) is None


@pytest.mark.parametrize(
    "change",
    [
        {"errors": [0.1]},
        {"errors": [0.1] * 9},
        {"errors": {"0": 0.1}},
        {"errors": [float("inf")] * 8},
        {"errors": [10**400] * 8},
        {"tensors": "another"},
        {"quality": {"texts": 3}},
        {"quality": {"texts": 3, "cosine_mean": float("nan"), "cosine_min": 1, "spearman": 1}},
        {"quality": {"texts": 3, "cosine_mean": "1", "cosine_min": 1, "spearman": 1}},
        {"quality": []},
        {"unknown": 1},
    ],
    ids=[
        "few-errors",
        "many-errors",
        "no-list",
        "infinite",
        "huge",
        "hash",
        "quality",
        "nan",
        "text",
        "no-object",
        "unknown",
    ],
)
def test_a_damaged_calibration_is_refused(folder, calibration, change):
    change_fields(calibration.save(folder), change)

    with pytest.raises(CheckpointError, match=r"int8.safetensors cannot be read"):
        embeddings(folder, "int8")


@pytest.mark.parametrize(
    "outliers",
    [torch.tensor([1, 2]), torch.tensor([4, 3, 2, 1]), torch.tensor([0.1, 1, 2, 3])],
    ids=["two", "order", "fraction"],
)
def test_a_calibration_without_ascending_columns_is_refused(folder, calibration, outliers):
    layers = tuple(replace(layer, outliers=outliers.clone()) for layer in calibration.layers)
    replace(calibration, layers=layers).save(folder)

    with pytest.raises(CheckpointError, match=r"allowed: 4 ascending columns"):
        Calibration.load(folder)


@pytest.mark.parametrize(
    "fields", [None, {}, {"calibration": "[]"}, {"calibration": "[" * 100_000}]
)
def test_a_calibration_without_fields_is_refused(folder, fields):
    save_file({"0.codes": torch.ones(2, 2)}, folder / file_name(8), fields)

    with pytest.raises(CheckpointError, match=r"int8.safetensors cannot be read"):
        Calibration.load(folder)


@pytest.mark.parametrize("content", [b"", b"{", bytes(99)], ids=["empty", "cut", "zeros"])
def test_a_calibration_in_another_format_is_refused(folder, content):
    (folder / file_name(8)).write_bytes(content)

    with pytest.raises(CheckpointError, match=r"int8.safetensors cannot be read"):
        Calibration.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"outliers": torch.tensor([0, 1, 2, 9999])},
        {"codes": torch.ones(3, 3, dtype=torch.int8)},
        {"scale": torch.ones(3)},
    ],
    ids=["columns", "codes", "scale"],
)
def test_a_calibration_of_other_layers_is_measured_again(folder, calibration, caplog, change):
    caplog.set_level(logging.INFO)
    layers = tuple(
        replace(layer, **{name: each.clone() for name, each in change.items()})
        for layer in calibration.layers
    )
    replace(calibration, layers=layers).save(folder)

    embeddings(folder, "int8")

    assert "the stored calibration is of another checkpoint, task or CPU" in caplog.text
    assert "(8 texts), measured in" in caplog.text


def test_equal_vectors_have_the_best_quality_and_noise_lowers_it(rng):
    vectors = rng.normal(size=(10, 8)).astype(np.float32)
    noisy = vectors + rng.normal(size=vectors.shape).astype(np.float32)

    best, worse = compare_vectors(3 * vectors, vectors), compare_vectors(noisy, vectors)

    assert (best.texts, best.cosine_min, best.spearman) == (10, pytest.approx(1), pytest.approx(1))
    assert worse.cosine_min < worse.cosine_mean < 0.99
    assert worse.spearman < 0.99


def test_the_built_in_texts_differ_and_have_many_lengths():
    assert len(set(TEXTS)) == len(TEXTS) == 64
    words = [len(text.split()) for text in TEXTS]
    assert min(words) < 3
    assert max(words) > 100


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_activations_are_bf16_where_compiled_code_multiplies_it(dtype):
    expected = torch.bfloat16 if HAS_PAIRS else torch.float32
    assert choose_dtype(dtype, CPU) is expected


def test_encoders_have_no_int4(folder):
    with pytest.raises(
        ConfigError, match='dtype is "int4", which the tasks generate and translate'
    ):
        embeddings(folder, "int4")


def test_int8_needs_compiled_ops(monkeypatch):
    monkeypatch.setattr(int8_model, "has_compiled_ops", lambda: False)

    with pytest.raises(ConfigError, match='dtype is "int8", whose ops are compiled'):
        int8_model.check_int8()
