"""Loads, fetch, doctor and serve refuse other forms in the same words."""

import pytest
from typer.testing import CliRunner

from tests.checkpoints import WEIGHTS, drop_field, leave_only_a_pickle, write_file
from varlen.errors import CheckpointError
from varlen.models.checkpoint_folder import Checkpoint
from varlen_client.cli.main import app
from varlen_tools.fetch import FetchError, fetch
from varlen_tools.serve.models import Fetching, ServeError, fetch_models, find_models

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


def only(*names):
    """Return a function that replaces the weights of a folder by other files."""

    def spoil(folder):
        (folder / WEIGHTS).unlink()
        for name in names:
            write_file(folder, name, "content")

    return spoil


def cut(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])


# How a folder is spoiled, and words of the refusal.
FORMS = {
    "pointer": (lambda folder: write_file(folder, WEIGHTS, POINTER), "lfs pull"),
    "pointer to a tokenizer": (
        lambda folder: write_file(folder, "tokenizer.json", POINTER),
        "tokenizer.json is a pointer of Git LFS, not the file itself",
    ),
    "half": (cut, "it was not downloaded whole; download it again"),
    # a load does not read it, fetch and serve do
    "gguf": (only("m-q4.gguf"), "m-q4.gguf"),
    "onnx": (only("onnx/model.onnx"), "holds only weights of ONNX (onnx/model.onnx); take"),
    "ctranslate2": (only("model.bin", "shared_vocabulary.json"), "holds a model of CTranslate2"),
    "shards": (only("model-00001-of-00002.safetensors"), "whose index is missing: download"),
    "pickle": (leave_only_a_pickle, "has pickled weights (pytorch_model.bin), which are not read"),
    "model_type": (
        lambda folder: drop_field(folder, "config.json", "model_type"),
        "config.json has no model_type, which names the architecture",
    ),
}


def load(folder):
    checkpoint = Checkpoint.open(folder)
    checkpoint.check_task(checkpoint.task)


def loaded(folder, _scratch):
    with pytest.raises(CheckpointError) as error:
        load(folder)
    return str(error.value)


def fetched(folder, scratch):
    with pytest.raises(FetchError) as error:
        fetch(str(folder), repository=scratch / "repository")
    assert not list((scratch / "repository").glob("*"))
    return str(error.value)


def examined(folder, _scratch):
    result = CliRunner(env={"COLUMNS": "1000"}).invoke(app, ["doctor", str(folder)])
    assert result.exit_code in (1, 2)
    return result.output


def served(folder, _scratch):
    how = Fetching(None, {})
    with pytest.raises(ServeError) as error:
        fetch_models(find_models([str(folder)], how, report=print), how, report=print)
    return str(error.value)


COMMANDS = {"load": loaded, "fetch": fetched, "doctor": examined, "serve": served}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_refused_with_what_it_holds(encoder, tmp_path, form, command):
    spoil, words = FORMS[form]
    spoil(encoder)

    message = COMMANDS[command](encoder, tmp_path)

    assert words in message
    assert "Traceback" not in message


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_in_place_of_a_folder_is_refused(encoder, tmp_path, command):
    message = COMMANDS[command](encoder / WEIGHTS, tmp_path)

    assert f"{WEIGHTS} is a file, not a folder; give the checkpoint folder" in message
