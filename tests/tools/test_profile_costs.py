"""Costs are measured under the server's settings, cached where it looks, and shown."""

from pathlib import Path

import numpy as np
import pytest

from varlen.config import EngineConfig
from varlen.costs.model import BatchShape, MeasuredBatch
from varlen.costs.store import CostStore, Measurement, StoredCosts
from varlen.errors import CheckpointError, ConfigError
from varlen_tools.model_source import find_source
from varlen_tools.profile_costs.__main__ import Profile, batch_table, three_digits

from .commands import run_varlen

KEY = {
    "checkpoint": "0123456789abcdef",
    "model": "bert, 2 layers of 16",
    "task": "embed",
    "device": "A <CPU> & more, 2 cores",
    "threads": "2",
    "dtype": "float32",
    "execution": "packed",
    "max_batch_sequences": "4",
    "max_batch_tokens": "64",
    "max_sequence_tokens": "32",
    "torch": "2.9",
    "varlen": "abc",
}
SECONDS = {(8,): 1e-3, (8, 8): 1.5e-3, (5, 9): 2e-3, (8, 20, 30): 4e-3, (32,): 3e-3}
MEASUREMENT = Measurement(
    tuple(MeasuredBatch(lengths, seconds) for lengths, seconds in SECONDS.items()), True, 0.25
)
SETTINGS = {
    "device": "cpu",
    "dtype": "fp32",
    "threads": 1,
    "max_batch_sequences": 4,
    "max_batch_tokens": 64,
    "warmup_seconds": 30,
}


@pytest.fixture
def costs():
    return StoredCosts.now(KEY, 20.0, MEASUREMENT)


@pytest.fixture
def profile(costs):
    return Profile.of(costs)


@pytest.fixture
def model(tmp_path, encoder):
    """A model of a repository, with two versions of one checkpoint and its own settings."""
    folder = tmp_path / "models/tiny"
    folder.mkdir(parents=True)
    for version in ("2", "10"):
        (folder / version).symlink_to(encoder, target_is_directory=True)
    settings = {**SETTINGS, "cache_folder": str(tmp_path / "cache")}
    lines = [
        "# a comment",
        'backend: "varlen"',
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
        *(
            f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
            for key, value in settings.items()
        ),
    ]
    (folder / "config.pbtxt").write_text("\n".join(lines))
    return folder


def test_a_profile_has_the_predicted_cost_of_every_batch_of_one_length(profile):
    model = MEASUREMENT.model("packed")
    grids = profile.grids()

    assert profile.counts == [1, 2, 4]
    assert profile.lengths == [1, 2, 4, 8, 16, 32]
    for (row, column), seconds in np.ndenumerate(profile.seconds):
        length, count = profile.lengths[row], profile.counts[column]
        assert seconds == model.seconds(BatchShape.of([length] * count))
        assert profile.is_allowed[row, column] == (count * length <= 64)
        assert grids["milliseconds per batch"][row, column] == 1e3 * seconds
        per_token = grids["microseconds per token"][row, column]
        assert per_token == pytest.approx(1e6 * seconds / (count * length))


def test_measured_batches_are_shown_beside_their_prediction(profile):
    model = MEASUREMENT.model("packed")

    assert [batch.shape.tokens for batch, _ in profile.batches] == [8, 14, 16, 32, 58]
    for (batch, predicted), row in zip(profile.batches, batch_table(profile).lines, strict=True):
        assert predicted == model.seconds(batch.shape)
        assert row[-1] == f"{predicted / batch.seconds - 1:+.1%}"
    assert 0 < profile.median_error() < 0.5
    assert batch_table(profile).caption == f"median error {profile.median_error():.1%}"


@pytest.mark.parametrize(
    "value, text",
    [(0.123, "0.12"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (4321, "4321")],
)
def test_figures_have_three_digits(value, text):
    assert three_digits(value) == text


def test_a_model_of_a_repository_is_profiled_with_its_settings_and_latest_version(model, tmp_path):
    source = find_source(model, {"max_batch_sequences": "8"})

    assert source.name == "tiny"
    assert source.checkpoint.name == "10"
    changed = {"max_batch_sequences": 8, "cache_folder": str(tmp_path / "cache")}
    assert source.config == EngineConfig(**(SETTINGS | changed))


def test_a_checkpoint_folder_is_profiled_with_default_settings(encoder, model):
    assert find_source(encoder, {}).config == EngineConfig()
    assert find_source(encoder, {}).name == "Tiny-Encoder"
    assert find_source(model / "2", {"threads": "1"}).config == EngineConfig(threads=1)


def test_what_cannot_be_profiled_is_refused(tmp_path, model):
    with pytest.raises(CheckpointError, match="neither config.pbtxt nor config.json"):
        find_source(tmp_path, {})
    with pytest.raises(ConfigError, match="unknown parameter"):
        find_source(model, {"thread": "1"})
    (model / "config.pbtxt").write_text("parameters {")
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_source(model, {})
    (model / "config.pbtxt").write_text('backend: "varlen"')
    for version in ("2", "10"):
        (model / version).unlink()
    with pytest.raises(CheckpointError, match="has no version"):
        find_source(model, {})


@pytest.mark.full
def test_the_command_measures_once_and_prints(model, tmp_path):
    first = run_varlen("costs", model)

    assert first.exit_code == 0, first.output
    for text in ("milliseconds per batch", "microseconds per token", "measured batches"):
        assert text in first.output
    (kept,) = CostStore(tmp_path / "cache").entries()
    assert kept.allowed_seconds == 30
    assert kept.key["workers"] == "1"

    assert run_varlen("costs", model).exit_code == 0
    assert CostStore(tmp_path / "cache").entries() == [kept]
    assert run_varlen("costs", model, "--again", "--seconds", "20").exit_code == 0
    (new,) = CostStore(tmp_path / "cache").entries()
    assert new.measured_at > kept.measured_at
    assert new.allowed_seconds == 20


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "Missing argument"),
        (["nowhere"], "neither config.pbtxt nor config.json"),
        (["MODEL", "--set", "threads"], "allowed: key=value"),
        (["MODEL", "--set", "threads=many"], "allowed: whole numbers"),
        (["MODEL", "--seconds", "0"], "--seconds"),
    ],
)
def test_what_cannot_be_done_is_refused(model, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)

    done = run_varlen("costs", *(str(model) if word == "MODEL" else word for word in arguments))

    assert done.exit_code == 2, done.output
    assert says in done.output
    assert "Traceback" not in done.output
    assert not Path("cache").exists()
