"""Pickled weights become safetensors with equal tensors; code in a pickle is not run."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.checkpoints import WEIGHTS
from varlen import Encoder
from varlen_tools.convert_pickle import PickleError, convert, main

PICKLE = "pytorch_model.bin"


class Code:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def pickled(encoder):
    """A checkpoint whose weights are pickled; and its tensors."""
    tensors = load_file(encoder / WEIGHTS)
    (encoder / WEIGHTS).unlink()
    torch.save(tensors, encoder / PICKLE)
    return encoder, tensors


def test_the_converted_weights_are_the_pickled_ones(pickled):
    folder, tensors = pickled

    assert convert(folder) == [folder / WEIGHTS]

    converted = load_file(folder / WEIGHTS)
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensors[name]) for name in tensors)
    Encoder.from_pretrained(folder).close()
    assert (folder / PICKLE).exists()


def test_shards_stay_shards(pickled):
    folder, tensors = pickled
    names = sorted(tensors)
    halves = {"00001": names[::2], "00002": names[1::2]}
    shard = "pytorch_model-{}-of-00002.bin".format
    for part, own in halves.items():
        torch.save({name: tensors[name] for name in own}, folder / shard(part))
    (folder / PICKLE).unlink()
    weight_map = {name: shard(part) for part, own in halves.items() for name in own}
    (folder / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    written = convert(folder)

    assert [path.name for path in written] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert load_file(written[0]).keys() == set(halves["00001"])
    Encoder.from_pretrained(folder).close()


def test_tied_tensors_are_both_kept(tmp_path):
    table = torch.arange(6.0).reshape(2, 3)
    torch.save({"state_dict": {"embeddings": table, "output": table}}, tmp_path / "model.ckpt")

    (path,) = convert(tmp_path)

    assert all(torch.equal(each, table) for each in load_file(path).values())
    assert load_file(path).keys() == {"embeddings", "output"}


def test_code_in_a_pickle_is_not_run(pickled, tmp_path):
    folder, tensors = pickled
    torch.save({**tensors, "more": Code(tmp_path / "ran")}, folder / PICKLE)

    result = CliRunner(env={"COLUMNS": "300"}).invoke(_app(), [str(folder)])

    assert result.exit_code == 2
    assert "pytorch_model.bin holds more than tensors" in result.stderr
    assert not (tmp_path / "ran").exists()
    assert not (folder / WEIGHTS).exists()


@pytest.mark.parametrize(
    "content, message",
    [
        (pickle.dumps({"a": 1}, protocol=2), "pytorch_model.bin"),
        (b"no pickle", "pytorch_model.bin"),
        (b"", "pytorch_model.bin cannot be read"),
    ],
    ids=["a plain pickle", "text", "empty"],
)
def test_refuses_a_file_without_tensors(tmp_path, content, message):
    (tmp_path / PICKLE).write_bytes(content)

    with pytest.raises(PickleError, match=message):
        convert(tmp_path)


def test_refuses_other_values_and_several_files(tmp_path):
    torch.save({"a": torch.ones(1), "b": 3}, tmp_path / "first.pt")
    with pytest.raises(PickleError, match="first.pt has 'b', which is no tensor"):
        convert(tmp_path)

    torch.save({"a": torch.ones(1)}, tmp_path / "second.pt")
    with pytest.raises(PickleError, match="the pickles first.pt, second.pt; allowed: pytorch_mod"):
        convert(tmp_path)


def test_does_not_overwrite(pickled):
    folder, _ = pickled
    convert(folder)

    with pytest.raises(PickleError, match="model.safetensors exists already"):
        convert(folder)


def _app():
    import typer

    app = typer.Typer(add_completion=False)
    app.command()(main)
    return app
