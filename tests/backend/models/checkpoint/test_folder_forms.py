"""Other forms of models and half downloads are refused with a remedy."""

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.backend.refusals import refused_checkpoint as refused
from tests.checkpoints import WEIGHTS, drop_field, leave_only_a_pickle, set_fields, write_file
from varlen.models.checkpoint.folder_forms import check_form
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.notes import checkpoint_notes

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
ORIGINAL = "take the checkpoint of transformers that it was made of, which its model card names"


def load(folder):
    """Open a checkpoint as a load does, and return what is known of it."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.check_task(checkpoint.task)
    return checkpoint


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named_with_the_command_that_gets_the_file(folder, name):
    write_file(folder, name, POINTER)

    with refused(
        f"{name} is a pointer of Git LFS, not the file itself; get the files: git -C {folder} lfs pull"
    ):
        load(folder)


def test_a_pointer_to_a_pickle_counts_if_there_is_nothing_else(folder):
    leave_only_a_pickle(folder)
    write_file(folder, "pytorch_model.bin", POINTER)

    with refused("pytorch_model.bin is a pointer of Git LFS"):
        load(folder)


def test_pointers_to_files_that_serving_does_not_need_stop_nothing(folder):
    before = load(folder)
    for name in ("pytorch_model.bin", "model.onnx", "rust_model.ot"):
        write_file(folder, name, POINTER)

    assert load(folder) == before


def test_a_pipe_is_no_pointer(folder):
    before = load(folder)
    os.mkfifo(folder / "other.json")

    assert load(folder) == before


@pytest.mark.parametrize(
    "bytes_left", [0, 5, 8, 60, -1], ids="none length header tensors last".split()
)
def test_weights_that_end_too_early_are_to_be_downloaded_again(folder, bytes_left):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:bytes_left])

    with refused("it was not downloaded whole; download it again"):
        load(folder)


def test_the_size_of_half_a_file_is_named(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-10])

    with refused(f"{WEIGHTS} has {len(whole) - 10} bytes and needs {len(whole)}: it was not"):
        load(folder)


def test_weights_that_are_damaged_in_another_way_are_no_half_download(folder):
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")

    with refused(f"{WEIGHTS} cannot be read: Error while deserializing header"):
        load(folder)


def test_shards_without_their_index_name_it(folder):
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    save_file({"x": np.zeros(1)}, folder / "model-00002-of-00002.safetensors")

    with refused(
        "has no model.safetensors and no model.safetensors.index.json; it has 2 shards"
        " (model-00001-of-00002.safetensors), whose index is missing: download model.safetensors.index.json too"
    ):
        load(folder)


def test_weights_of_another_name_are_to_be_renamed(folder):
    (folder / WEIGHTS).rename(folder / "weights.safetensors")

    with refused("it has weights.safetensors: if that file has all weights, rename it to model.sa"):
        load(folder)


def test_a_shard_that_the_index_names_and_that_is_absent_is_to_be_downloaded(folder):
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_file(folder, "model.safetensors.index.json", {"weight_map": names})

    with refused(
        "has no model-00002-of-00002.safetensors, which model.safetensors.index.json names (1 of 2 files are"
        " missing): it was not downloaded whole; download it again"
    ):
        load(folder)


# Files of each form, and what the refusal says.
FORMS = {
    "GGUF": (["model-q4_k_m.gguf"], "(model-q4_k_m.gguf); varlen fetch FILE.gguf makes"),
    "ONNX": (["model.onnx"], "holds only weights of ONNX (model.onnx); take the checkpoint"),
    "ONNX folder": (["onnx/model.onnx"], "holds only weights of ONNX (onnx/model.onnx); take"),
    "OpenVINO": (
        ["openvino_model.xml", "openvino_model.mapping"],
        "holds only weights of OpenVINO",
    ),
    "TensorFlow": (["tf_model.h5"], "holds only weights of TensorFlow (tf_model.h5); save them"),
    "Flax": (["flax_model.msgpack"], "from_pretrained(FOLDER, from_flax=True).save_pretrained"),
    "CTranslate2": (
        ["model.bin", "shared_vocabulary.json"],
        f"holds a model of CTranslate2, whose weights are no pickle and are not read (model.bin); {ORIGINAL}",
    ),
    "CTranslate2 of two": (["model.bin", "source_vocabulary.txt"], "holds a model of CTranslate2"),
}


@pytest.mark.parametrize("files, message", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("has_config", [True, False], ids=["config", "alone"])
def test_another_form_is_named_with_what_to_do(folder, files, message, has_config):
    (folder / WEIGHTS).unlink()
    if not has_config:
        (folder / "config.json").unlink()
    for name in files:
        write_file(folder, name, "content")

    with refused(message):
        load(folder)


@pytest.mark.parametrize("files, message", FORMS.values(), ids=FORMS)
def test_the_names_that_the_hub_gives_are_enough(files, message):
    with refused(f"someone/model {message}" if message.startswith("holds") else message):
        check_form("someone/model", ["config.json", "README.md", *files])


def test_other_forms_beside_safetensors_stop_nothing(folder):
    before = load(folder)
    for name in ("model.gguf", "onnx/model.onnx", "tf_model.h5", "model.bin"):
        write_file(folder, name, "content")

    assert load(folder) == before


@pytest.mark.parametrize(
    "name, message",
    [
        ("model.gguf", "holds weights of llama.cpp (model.gguf); varlen fetch FILE"),
        (WEIGHTS, "is a file, not a folder; give the checkpoint folder that holds it: "),
        ("absent", "is not a folder; give a Hugging Face checkpoint folder"),
    ],
)
def test_a_path_that_is_no_folder_is_named(folder, name, message):
    write_file(folder, "model.gguf", "GGUF")

    with refused(message):
        Checkpoint.open(folder / name)


def test_a_config_without_a_model_type_is_named(folder):
    drop_field(folder, "config.json", "model_type")

    with refused(
        "config.json has no model_type, which names the architecture in a checkpoint of transformers; copy"
    ):
        Checkpoint.open(folder)


@pytest.mark.parametrize("value", ["none", 5, ["bert"]], ids=str)
def test_a_model_type_that_is_not_served_is_shown_as_in_the_file(folder, value):
    set_fields(folder, "config.json", model_type=value)
    shown = {"none": '"none"', "5": "5"}.get(str(value), '["bert"]')

    with refused(f"config.json has model_type {shown}; this version serves: bert, "):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["model_head.pkl", "config_setfit.json"])
def test_a_classifier_of_setfit_is_noted(folder, name):
    write_file(folder, name, {})

    [note] = checkpoint_notes(Checkpoint.open(folder), "embed", 64)

    assert note == (
        "model_head.pkl is not read: the classifier of SetFit is a pickle and is left out. Texts are embedded and not"
        " classified; apply the classifier to the vectors in the client"
    )


def test_the_configuration_of_an_adapter_in_a_whole_checkpoint_is_noted(folder):
    write_file(folder, "adapter_config.json", {"peft_type": "LORA"})

    [note] = checkpoint_notes(Checkpoint.open(folder), "embed", 64)

    assert note.startswith("adapter_config.json is not read: the checkpoint's own weights are")
