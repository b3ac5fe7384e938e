"""Forms of models that are not served, by the names of their files."""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from varlen.errors import CheckpointError
from varlen.models.checkpoint.extraction import config_name
from varlen.models.checkpoint.files import check_no_pointers, has_file, peek_json, show
from varlen.models.checkpoint.sentence_transformers import has_router
from varlen.models.checkpoint.weights import INDEX, SINGLE, is_pickle
from varlen.models.static import static_folder

GGUF = ".gguf"
ORIGINAL = "take the checkpoint of transformers that it was made of, which its model card names"


@dataclass(frozen=True, slots=True)
class _Form:
    """One form of models.

    Attributes:
        patterns: names of files; a folder of this form has one of each.
        what: content of the folder. The name of the first file follows.
    """

    patterns: tuple[str, ...]
    what: str
    remedy: str

    def find(self, names: Collection[str]) -> str | None:
        """Return the first file of this form; None unless the folder has all of them."""
        found = [
            min((name for name in names if fnmatchcase(name, pattern)), default=None)
            for pattern in self.patterns
        ]
        return None if None in found else found[0]


# Their config.json is no encoder's, or none is there.
_OTHER_MODELS = tuple(
    _Form(
        ("model.bin", vocabulary),
        "a model of CTranslate2, whose weights are no pickle and are not read",
        ORIGINAL,
    )
    for vocabulary in ("shared_vocabulary.*", "source_vocabulary*", "vocabulary.*")
)
# Weights that are served in another form only.
_OTHER_WEIGHTS = (
    _Form(
        ("*.gguf",),
        "weights of llama.cpp",
        "varlen fetch FILE.gguf makes a checkpoint of it",
    ),
    *(
        _Form(
            (pattern,),
            "only weights of ONNX",
            f"{ORIGINAL}, or serve this file by the ONNX Runtime backend of the server",
        )
        for pattern in ("*.onnx", "onnx/*.onnx")
    ),
    _Form(("openvino_model.xml",), "only weights of OpenVINO", ORIGINAL),
    *(
        _Form(
            (name,),
            f"only weights of {library}",
            f'save them with transformers 4: AutoModel.from_pretrained(FOLDER, {option}=True).save_pretrained("NEW")',
        )
        for name, library, option in (
            ("tf_model.h5", "TensorFlow", "from_tf"),
            ("flax_model.msgpack", "Flax", "from_flax"),
        )
    ),
)


def check_form(shown: str | Path, names: Collection[str]) -> None:
    """Raise CheckpointError if a folder holds a model of another form.

    Args:
        names: names of its files, and of files in its folders with a slash.
    """
    forms = _OTHER_MODELS
    if not _has_weights(names):
        forms += _OTHER_WEIGHTS
    for form in forms:
        if name := form.find(names):
            raise CheckpointError(f"{shown} holds {form.what} ({name}); {form.remedy}")


def choose_gguf(source: str, names: Collection[str], part: str = "") -> str | None:
    """Return the name of a source's GGUF file; None without one.

    Args:
        part: part of the name, such as Q4_K_M. If it is empty, other weights come first.

    Raises:
        CheckpointError: not one file has this part, or it is one of several that make a model.
    """
    found = sorted(name for name in names if name.endswith(GGUF) and "mmproj" not in name)
    if not part and (_has_weights(names) or not found):
        return None
    fit = [name for name in found if part.lower() in name.lower()]
    if len(fit) != 1:
        raise CheckpointError(
            f"{source} has {len(fit)} GGUF files{part and f' with {part} in the name'}; give one, as FOLDER/FILE.gguf"
            f" or org/name:PART, a part of its name. It has {', '.join(found)}"
        )
    return fit[0]


def _has_weights(names: Collection[str]) -> bool:
    return any(name.endswith(".safetensors") or is_pickle(PurePath(name).name) for name in names)


def check_is_folder(path: Path) -> None:
    """Raise CheckpointError unless a path is a folder."""
    if path.is_dir():
        return
    if path.is_file():
        check_form(path.parent, [path.name])
        raise CheckpointError(
            f"{path} is a file, not a folder; give the checkpoint folder that holds it:"
            f" {path.resolve().parent}"
        )
    raise CheckpointError(f"{path} is not a folder; give a Hugging Face checkpoint folder")


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder and in its folder `onnx`."""
    found = (path for pattern in ("*", "onnx/*") for path in folder.glob(pattern))
    return sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())


def check_is_transformer(folder: Path) -> None:
    """Raise CheckpointError with the remedy if a folder cannot be served.

    It may hold another kind of model, pointers instead of files, or a link out of it.
    """
    check_no_pointers(folder)
    check_form(folder, names_in(folder))
    adapter = peek_json(folder, "adapter_config.json")
    if isinstance(adapter, dict) and not _has_model(folder):
        base = show(adapter.get("base_model_name_or_path"))
        raise CheckpointError(
            f"{folder} holds an adapter of peft for the model {base}, not the model itself; put it beside"
            " its model (varlen fetch MODEL --adapter FOLDER); or load both with peft, merge them with"
            " merge_and_unload, and save the result and its tokenizer with save_pretrained"
        )


def has_checkpoint(folder: Path) -> bool:
    """Return whether a folder looks like a checkpoint.

    One of static embeddings or routes may have no config.json.
    """
    if has_file(folder, config_name(folder)):
        return True
    return static_folder(folder) is not None or has_router(folder)


def _has_model(folder: Path) -> bool:
    has_weights = has_file(folder, SINGLE) or has_file(folder, INDEX)
    return has_weights and has_file(folder, "config.json")
