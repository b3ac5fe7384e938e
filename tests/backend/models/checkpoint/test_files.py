"""Files of a checkpoint folder: in the folder, regular, and read up to a limit."""

import os
import socket
from pathlib import Path

import pytest

from tests.checkpoints import save_checkpoint
from varlen.errors import CheckpointError
from varlen.models.checkpoint import files
from varlen.models.checkpoint.files import has_file, locate, read_bytes, read_json, read_text
from varlen.models.checkpoint.weights import _MOST_HEADER_BYTES, locate_weights, read_headers
from varlen.models.checkpoint_folder import Checkpoint

FILES = (
    "config.json",
    "modules.json",
    "adapter_config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("saved") / "bert")


@pytest.fixture
def folder(saved, tmp_path):
    """A checkpoint whose files can be changed."""
    copy = tmp_path / "bert"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def put(path, kind):
    """Put something that is no file of the folder in a file's place."""
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a socket":
        # a short path: sockets have no long ones
        short = Path("/tmp", f"varlen-{os.getpid()}.socket")
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(short))
        short.rename(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a link out":
        target = path.parent.parent / "elsewhere"
        target.write_text("{}")
        path.symlink_to(target)
    elif kind == "a link to nothing":
        path.symlink_to("absent")
    else:
        path.symlink_to(path.name)


def read_all(folder):
    """Return what a load does first, and `fetch` and `doctor` too."""
    Checkpoint.open(folder)
    read_headers(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a link out", "a link to nothing"])
def test_each_file_is_a_regular_file_of_the_folder(folder, name, kind):
    """A pipe held fetch and doctor for ever; a link to /dev/zero took 13 GB."""
    put(folder / name, kind)

    with pytest.raises(CheckpointError, match=name):
        read_all(folder)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("a pipe", "a.json is a pipe; allowed: a regular file"),
        ("a folder", "a.json is a folder; allowed: a regular file"),
        ("a socket", "a.json is a socket; allowed: a regular file"),
        ("a device", "a.json is a link that leads out of the checkpoint's folder"),
        ("a link out", "a.json is a link that leads out of the checkpoint's folder"),
        ("a link to nothing", "a.json is a link to a file that is absent"),
        ("a circle", "a.json cannot be read: "),
    ],
)
def test_the_message_says_what_came(tmp_path, kind, message):
    folder = tmp_path / "model"
    folder.mkdir()
    put(folder / "a.json", kind)

    assert has_file(folder, "a.json")
    for read in (locate, read_bytes, read_text, read_json):
        with pytest.raises(CheckpointError, match=message):
            read(folder, "a.json")


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "a\0b"])
def test_a_name_stays_in_the_folder(tmp_path, name):
    (tmp_path / "elsewhere").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()

    with pytest.raises(CheckpointError, match=r"outside the checkpoint folder|cannot be read"):
        read_bytes(folder, name)


def test_links_in_the_folder_are_followed(tmp_path):
    # as a ConfigMap of Kubernetes is mounted
    (tmp_path / "..data-1").mkdir()
    (tmp_path / "..data-1/config.json").write_text("{}")
    (tmp_path / "..data").symlink_to("..data-1")
    (tmp_path / "config.json").symlink_to("..data/config.json")

    assert read_json(tmp_path, "config.json") == {}


@pytest.mark.parametrize("module", ["", "1_Pooling"])
def test_links_to_the_blobs_of_a_snapshot_are_followed_and_to_those_of_another_model_not(
    tmp_path, module
):
    folder = tmp_path / "models--org--name/snapshots/5ead" / module
    folder.mkdir(parents=True)
    for model in ("name", "other"):
        blob = tmp_path / f"models--org--{model}/blobs/feed"
        blob.parent.mkdir(parents=True)
        blob.write_text("{}")
        (folder / f"{model}.json").symlink_to(os.path.relpath(blob, folder))

    assert read_json(folder, "name.json") == {}
    with pytest.raises(CheckpointError, match="leads out of the checkpoint's folder"):
        read_json(folder, "other.json")


def test_a_folder_may_be_a_link(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "1").symlink_to("model")

    assert read_json(tmp_path / "1", "config.json") == {}


@pytest.mark.parametrize(
    "name, most",
    [
        ("config.json", files._MOST_BYTES_OF_OTHERS),
        ("1_Pooling/config.json", files._MOST_BYTES_OF_OTHERS),
        ("tokenizer.json", files._MOST_BYTES["tokenizer.json"]),
    ],
)
def test_a_file_of_too_many_bytes_is_refused_with_the_limit(tmp_path, name, most):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        # takes no room on the disk
        file.truncate(most + 1)

    with pytest.raises(CheckpointError, match=f"{name} has more than {most} bytes; allowed"):
        read_json(tmp_path, name)


def test_a_file_of_too_many_values_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MOST_VALUES", 10)
    (tmp_path / "few.json").write_text("[" + "[]," * 4 + "[]]")
    (tmp_path / "many.json").write_text("[" * 11)

    assert read_json(tmp_path, "few.json") == [[]] * 5
    with pytest.raises(CheckpointError, match="many.json has too many values; allowed: at most 10"):
        read_json(tmp_path, "many.json")


def test_a_header_of_too_many_bytes_is_refused(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(_MOST_HEADER_BYTES.to_bytes(8, "little"))
        file.truncate(_MOST_HEADER_BYTES + 8)
    locate_weights(folder, "model.safetensors")

    with (folder / "model.safetensors").open("r+b") as file:
        file.write((_MOST_HEADER_BYTES + 1).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="its header has 33554433 bytes; allowed: at most"):
        locate_weights(folder, "model.safetensors")
