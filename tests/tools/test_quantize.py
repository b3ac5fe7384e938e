"""`quantize` stores a calibration with its quality, and says what is wrong with its texts."""

import pytest

from tests.checkpoints import save_checkpoint
from varlen.execution.int8.calibration import Calibration
from varlen.execution.int8.calibration_texts import TEXTS

from .commands import run_varlen


@pytest.fixture
def checkpoint(tmp_path):
    return save_checkpoint(tmp_path / "model")


def test_the_quality_is_shown_and_stored(checkpoint, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(TEXTS[:10]), encoding="utf-8")

    result = run_varlen("quantize", checkpoint, "--texts", texts)

    assert result.exit_code == 0, result.output
    # no bars in a pipe
    assert result.stderr == ""
    quality = Calibration.load(checkpoint).quality
    assert quality.texts == 5
    assert f"{quality.cosine_mean:.4f}" in result.output
    assert "8 of 8" in result.output


STAGES = ["loading", "choosing codes", "measuring the quality"]


def test_a_terminal_shows_each_stage(checkpoint, monkeypatch):
    # as a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")

    result = run_varlen("quantize", checkpoint)

    assert [stage for stage in STAGES if stage in result.stderr] == STAGES
    assert not any(stage in result.stdout for stage in STAGES)


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "MarianMTModel"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_model_that_generates_is_calibrated_too(tmp_path, kind, dtype):
    checkpoint = save_checkpoint(tmp_path / "model", kind)

    result = run_varlen("quantize", checkpoint, "--dtype", dtype)

    assert result.exit_code == 0, result.output
    stored = Calibration.load(checkpoint, f"{dtype}.safetensors")
    assert f"{stored.quality.kl_mean:.5f}" in result.output
    assert "none" in result.output
    largest = max(int(layer.codes.abs().max()) for layer in stored.layers)
    assert largest == {"int8": 127, "int4": 7}[dtype]


def test_an_encoder_has_no_weights_of_4_bits(checkpoint):
    result = run_varlen("quantize", checkpoint, "--dtype", "int4")

    assert result.exit_code == 2
    assert 'dtype is "int4"' in result.output
    assert 'the task is "embed"' in result.output
    assert not list(checkpoint.glob("int*.safetensors"))


@pytest.mark.parametrize(
    "content, message",
    [(b"one\ntwo\n", "has 2 texts; at least 8 are needed"), (b"\xff\n", "is not UTF-8")],
    ids=["few", "bytes"],
)
def test_texts_that_cannot_calibrate_are_refused(checkpoint, tmp_path, content, message):
    texts = tmp_path / "texts.txt"
    texts.write_bytes(content)

    result = run_varlen("quantize", checkpoint, "--texts", texts)

    assert result.exit_code == 2
    assert message in result.output


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    result = run_varlen("quantize", tmp_path)

    assert result.exit_code == 2
    assert "has neither config.pbtxt nor config.json" in result.output
