"""Pickled weights become safetensors with equal tensors; code in a pickle is not run."""

import json
import pickle
import re
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import WEIGHTS
from varlen import Encoder
from varlen_tools import convert_pickle
from varlen_tools.convert_pickle import PickleError, convert

from .commands import run_varlen

PICKLE = "pytorch_model.bin"
INDEX = "model.safetensors.index.json"


class Code:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def refused(message):
    return pytest.raises(PickleError, match=re.escape(message))


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


@pytest.fixture
def sharded(pickled):
    """A checkpoint of two pickles; the tensors of each, and the names of both."""
    folder, tensors = pickled
    names = sorted(tensors)
    halves = {"00001": names[::2], "00002": names[1::2]}
    shard = "pytorch_model-{}-of-00002.bin".format
    for part, own in halves.items():
        torch.save({name: tensors[name] for name in own}, folder / shard(part))
    (folder / PICKLE).unlink()
    weight_map = {name: shard(part) for part, own in halves.items() for name in own}
    (folder / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder, list(halves.values()), [shard(part) for part in halves]


def test_shards_stay_shards(sharded):
    folder, (first, _), _ = sharded

    written = convert(folder)

    assert [path.name for path in written] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert load_file(written[0]).keys() == set(first)
    Encoder.from_pretrained(folder).close()


def test_a_shard_that_fails_leaves_nothing_behind(sharded):
    folder, _, (_, second) = sharded
    content = (folder / second).read_bytes()
    before = sorted(folder.rglob("*"))
    (folder / second).write_bytes(content[: len(content) // 2])

    with refused(f"{second} cannot be read"):
        convert(folder)

    assert sorted(folder.rglob("*")) == before
    (folder / second).write_bytes(content)
    assert len(convert(folder)) == 3


@pytest.mark.parametrize("is_link", [True, False], ids=["link", "file"])
def test_an_index_that_exists_is_not_overwritten(sharded, tmp_path, is_link):
    folder, _, _ = sharded
    outside = tmp_path / "outside.json"
    index = folder / INDEX
    if is_link:
        index.symlink_to(outside)
    else:
        index.write_text("{}")

    with refused(f"{INDEX} exists already; move it away first"):
        convert(folder)

    assert not outside.exists()
    assert is_link or index.read_text() == "{}"


def test_a_link_to_nowhere_counts_as_weights_that_exist(pickled, tmp_path):
    folder, _ = pickled
    (folder / WEIGHTS).symlink_to(tmp_path / "nowhere")

    with refused("model.safetensors exists already"):
        convert(folder)


def test_pickles_and_index_are_files_of_the_folder(sharded, tmp_path):
    folder, _, (first, _) = sharded
    for name in (first, f"{PICKLE}.index.json"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)

        with refused(f"{name} is a link that leads out of the checkpoint's folder"):
            convert(folder)


def test_a_link_inside_the_folder_is_followed(pickled):
    folder, _ = pickled
    (folder / PICKLE).rename(folder / "blob")
    (folder / PICKLE).symlink_to("blob")

    assert convert(folder) == [folder / WEIGHTS]


@pytest.mark.parametrize(
    "index, message",
    [
        ([], "holds a list, not an object"),
        ({"weight_map": {"a": 3}}, "is damaged"),
        ({"weight_map": {"a": "../a.bin"}}, "names ../a.bin; allowed: files beside it"),
        ({"weight_map": {"a": "a.bin", "b": "a.pt"}}, "several pickles that become a.safetensors"),
        ({"weight_map": {"a": "a\0.bin"}}, "cannot be read"),
        ({"weight_map": {"a": "absent.bin"}}, "has no absent.bin"),
    ],
)
def test_refuses_a_wrong_index(tmp_path, index, message):
    (tmp_path / f"{PICKLE}.index.json").write_text(json.dumps(index))

    with refused(message):
        convert(tmp_path)


def test_tied_tensors_are_both_kept(tmp_path):
    table = torch.arange(6.0).reshape(2, 3)
    torch.save({"state_dict": {"embeddings": table, "output": table}}, tmp_path / "model.ckpt")

    (path,) = convert(tmp_path)

    assert all(torch.equal(each, table) for each in load_file(path).values())
    assert load_file(path).keys() == {"embeddings", "output"}


def test_code_in_a_pickle_is_not_run(pickled, tmp_path):
    folder, tensors = pickled
    torch.save({**tensors, "more": Code(tmp_path / "ran")}, folder / PICKLE)

    result = run_varlen("convert-pickle", folder)

    assert result.exit_code == 2
    assert "pytorch_model.bin holds more than tensors" in result.stderr
    assert not (tmp_path / "ran").exists()
    assert not (folder / WEIGHTS).exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"a": 1}, protocol=2),
        b"no pickle",
        b"",
        b"\x80\x02h\x05.",
        b"\x80\x02}e.",
        b"\x80\x02K\x01K\x02K\x03s.",
        b"PK\x03\x04 and no archive",
    ],
    ids=[
        "a plain pickle",
        "text",
        "empty",
        "no memo",
        "no mark",
        "a number as a dict",
        "half a zip",
    ],
)
@pytest.mark.parametrize("is_archive", [False, True], ids=["file", "archive"])
def test_refuses_a_file_without_tensors(tmp_path, content, is_archive):
    if is_archive:
        with zipfile.ZipFile(tmp_path / PICKLE, "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")
    else:
        (tmp_path / PICKLE).write_bytes(content)

    with pytest.raises(PickleError, match=r"^pytorch_model\.bin "):
        convert(tmp_path)


@pytest.mark.parametrize(
    "tensor, message",
    [
        (torch.zeros(1).expand(2**42), "'a' of 17592186044416 bytes and stores 4 of them"),
        (torch.zeros(1).expand(2**31, 2**31), "stores 4 of them; allowed: tensors without rep"),
        (torch.eye(3).to_sparse(), "'a', which is torch.sparse_coo on cpu; allowed: plain ones"),
        (torch.empty(3, device="meta"), "'a', which is torch.strided on meta; allowed: plain ones"),
    ],
    ids=["expanded", "past 64 bits", "sparse", "meta"],
)
def test_refuses_a_tensor_whose_values_are_not_in_the_file(tmp_path, tensor, message):
    torch.save({"a": tensor}, tmp_path / PICKLE)

    with refused(message):
        convert(tmp_path)


def test_refuses_weights_that_are_much_larger_than_their_file(tmp_path):
    table = torch.ones(1000)
    torch.save({f"{index}": table for index in range(100)}, tmp_path / PICKLE)

    with refused("has tensors of 400000 bytes in"):
        convert(tmp_path)


def test_refuses_a_compressed_archive(tmp_path):
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "stored")
    with (
        zipfile.ZipFile(tmp_path / "stored") as stored,
        zipfile.ZipFile(tmp_path / PICKLE, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))

    with refused("is compressed ('stored/data.pkl'); allowed: archives as torch.save writes them"):
        convert(tmp_path)


@pytest.mark.parametrize("is_zip", [True, False], ids=["archive", "first releases"])
def test_parts_of_storages_and_parameters_keep_their_values(tmp_path, is_zip):
    table = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "part": table[1:3, ::2],
        "transposed": table.T,
        "half": table.bfloat16(),
        "parameter": torch.nn.Parameter(table),
        "empty": torch.empty(0, 3),
    }
    torch.save(tensors, tmp_path / PICKLE, _use_new_zipfile_serialization=is_zip)

    (path,) = convert(tmp_path)

    converted = load_file(path)
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensors[name]) for name in tensors)


def test_a_folder_that_cannot_be_written_is_named(pickled, monkeypatch):
    folder, _ = pickled

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(convert_pickle.tempfile, "TemporaryDirectory", refuse)

    with refused("cannot be written: [Errno 13] Permission denied"):
        convert(folder)


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
