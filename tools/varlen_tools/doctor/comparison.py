"""Compares answers with the original libraries: largest difference and least cosine, and what is allowed.

transformers and sentence-transformers answer in fp32 on the CPU, one input at a time. They load a folder of links
without code, whose config.json is in today's fields: checkpoints of first releases run in transformers' own models, and
no code of a checkpoint runs.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from varlen.config import DType
from varlen.errors import CheckpointError
from varlen.intake.tokenization import Text
from varlen.models.checkpoint.files import locate, read_optional_object
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Float32Array
from varlen.tasks import TASKS, Task

# In fp32, the largest difference that rounding explains, relative to the largest value.
FP32_DIFFERENCE = 1e-3
# In other dtypes, the least cosine of vectors, and the largest difference of logits.
LEAST_COSINE: Mapping[DType, float] = {"bf16": 0.995, "fp16": 0.999, "int8": 0.98, "fp8": 0.98}
LARGEST_DIFFERENCE: Mapping[DType, float] = {"bf16": 0.05, "fp16": 0.01, "int8": 0.2, "fp8": 0.2}
# In every dtype, the largest difference of a score that rounding explains, relative to the score: the libraries compute
# them in fp32. Smaller scores than the least normal number are equal.
SCORE_DIFFERENCE = 1e-5
_LEAST_SCORE = 2.0**-126
# What is compared, where it is the tokenizer.
TOKENIZATION = "token ids"
_NAMES: Mapping[str, DType] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "int8": "int8",
    "fp8": "fp8",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers of two programs to the same inputs.

    Attributes:
        what: name of the answers, such as vectors in bf16.
        original: library and version of the other program; empty if none was asked.
        agrees: whether the difference is one of rounding; None if that could not be judged.
        difference: the largest one, relative to the largest value.
        cosine: the least one, of vectors.
        remark: the first input that differs, or why there is no comparison.
        missing: the library that would have made the answers, if it is not installed.
    """

    what: str
    original: str
    count: int
    agrees: bool | None
    difference: float | None = None
    cosine: float | None = None
    remark: str = ""
    missing: str = ""


def without_library(what: str, library: str, instead: str = "") -> Comparison:
    """Return an entry for answers that were not compared, since a library is not installed."""
    remark = f"{library} is not installed" + (f": {instead}" if instead else "")
    return Comparison(what, "", 0, None, remark=remark, missing=library)


def short_dtype(name: str) -> DType:
    """Return the name of a dtype in settings, given torch's."""
    return _NAMES[name]


def compare_values(
    what: str,
    original: str,
    *,
    actual: Sequence[Float32Array],
    expected: Sequence[Float32Array],
    dtype: DType,
) -> Comparison:
    """Return the comparison of one array per input.

    Args:
        actual, expected: per input `[features]`, or `[tokens, features]`.
        dtype: dtype of `actual`, in the words of the settings.
    """
    what = f"{what} in {dtype}"
    pairs = list(zip(actual, expected, strict=True))
    fault = _fault(pairs, original)
    if fault is not None:
        agrees, remark = fault
        return Comparison(what, original, len(pairs), agrees, remark=remark)
    largest = float(max(np.abs(theirs).max() for _, theirs in pairs)) or 1.0
    differences = [float(np.abs(ours - theirs).max()) / largest for ours, theirs in pairs]
    cosine = float(np.min([_least_cosine(*pair) for pair in pairs]))
    # the cosine of few numbers says little
    has_cosine = pairs[0][1].shape[-1] > 2
    worst = int(np.argmax(differences))
    if dtype == "fp32":
        agrees = differences[worst] <= FP32_DIFFERENCE
    elif has_cosine:
        agrees = cosine >= LEAST_COSINE[dtype]
    else:
        agrees = differences[worst] <= LARGEST_DIFFERENCE[dtype]
    return Comparison(
        what,
        original,
        len(pairs),
        agrees,
        differences[worst],
        cosine if has_cosine else None,
        "" if agrees else f"input {worst} differs most",
    )


def compare_scores(
    original: str,
    *,
    logits: Sequence[tuple[Float32Array, Float32Array]],
    actual: Sequence[Float32Array],
    expected: Sequence[Float32Array],
    dtype: DType,
    is_relative: bool = True,
) -> Comparison:
    """Return the comparison of the scores of a classifier.

    They may differ by what the difference of their logits explains. Differences are relative to each score, since small
    scores order documents too.

    Args:
        logits: per input, the logits of both programs.
        actual, expected: per input, the scores that each program makes of its own logits, of the same shape.
        is_relative: false for scores that are the logits.
    """
    worst, most, agrees = 0, 0.0, True
    for index, (pair, ours, theirs) in enumerate(zip(logits, actual, expected, strict=True)):
        # no activation has a steeper relative slope than 1 in each logit, or 2 in the largest change of all
        explained = np.expm1(2 * np.abs(np.subtract(*pair, dtype=np.float64)).max())
        difference = np.abs(np.subtract(ours, theirs, dtype=np.float64))
        if is_relative:
            difference /= np.maximum(theirs, _LEAST_SCORE, dtype=np.float64)
        if difference.max() > explained + SCORE_DIFFERENCE:
            agrees = False
        if difference.max() > most:
            worst, most = index, float(difference.max())
    remark = "" if agrees else f"input {worst} differs by more than its logits explain"
    return Comparison(f"scores in {dtype}", original, len(actual), agrees, most, None, remark)


def _fault(
    pairs: Sequence[tuple[Float32Array, Float32Array]], original: str
) -> tuple[bool | None, str] | None:
    for index, (ours, theirs) in enumerate(pairs):
        if ours.shape != theirs.shape:
            return False, f"input {index} has the shape {ours.shape}, and there {theirs.shape}"
    # a difference to NaN is not above any limit
    for index, (ours, theirs) in enumerate(pairs):
        for values, agrees, owner in ((theirs, None, original), (ours, False, "varlen")):
            if not np.isfinite(values).all():
                return agrees, f"input {index} has NaN or infinite values in {owner}"
    return None


def compare_ids(
    what: str,
    original: str,
    *,
    actual: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
) -> Comparison:
    """Return the comparison of one list of token ids per input."""
    pairs = list(zip(actual, expected, strict=True))
    for index, (ours, theirs) in enumerate(pairs):
        if list(ours) != list(theirs):
            remark = f"input {index} has {list(ours)[:8]} ..., and there {list(theirs)[:8]} ..."
            return Comparison(what, original, len(pairs), False, remark=remark)
    return Comparison(what, original, len(pairs), True)


def _least_cosine(ours: Float32Array, theirs: Float32Array) -> float:
    ours, theirs = np.atleast_2d(ours).astype(np.float64), np.atleast_2d(theirs).astype(np.float64)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(((ours * theirs).sum(axis=1) / np.maximum(lengths, 1e-30)).min())


NEW_TOKENS = 16
_ONE_BY_ONE: Mapping[str, Any] = {"batch_size": 1, "show_progress_bar": False}


def has_library(name: str) -> bool:
    """Return whether a library is installed."""
    return find_spec(name.replace("-", "_")) is not None


def named(library: str) -> str:
    """Return name and version of an installed library."""
    return f"{library} {version(library)}"


@contextmanager
def readable_folder(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield a folder from which the libraries load a checkpoint."""
    with TemporaryDirectory(prefix="varlen-doctor-") as scratch:
        for path in checkpoint.folder.iterdir():
            if path.suffix in (".py", ".bin", ".pt", ".pth", ".ckpt") or path.name == "config.json":
                continue
            # what is no regular file of the folder is left out
            with suppress(CheckpointError):
                real = path.resolve() if path.is_dir() else locate(checkpoint.folder, path.name)
                Path(scratch, path.name).symlink_to(real)
        # a field without which WeightedLayerPooling has no effect, and which no model reads
        more = {} if checkpoint.layer_mix is None else {"output_hidden_states": True}
        content = json.dumps(checkpoint.config | more)
        Path(scratch, "config.json").write_text(content, encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield Path(scratch)


def stores_activation(checkpoint: Checkpoint) -> bool:
    """Return whether sentence-transformers has stored the activation of a CrossEncoder."""
    settings = read_optional_object(checkpoint.folder, "config_sentence_transformers.json")
    names = ("sentence_transformers", "sbert_ce_default_activation_function")
    return "activation_fn" in settings or any(checkpoint.config.get(name) for name in names)


class Transformers:
    """A checkpoint in transformers."""

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._library: Any = transformers
        self._folder = str(folder)
        self._checkpoint = checkpoint
        self._model: Any = None
        self._adapter: Path | None = None
        given = read_optional_object(checkpoint.folder, "config.json")
        self._is_translated = checkpoint.config != given and checkpoint.adds_special_tokens
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            self._folder, trust_remote_code=False, local_files_only=True
        )

    def set_adapter(self, folder: Path) -> None:
        self._adapter = folder

    def check_comparable(self, task: Task) -> None:
        """Raise LookupError if transformers has no such model for a task."""
        config, traits = self._checkpoint.config, TASKS[task]
        if config.get("projection_size") is not None:
            raise LookupError("transformers has no model with this layer behind the last norm")
        if traits.has_labels and config.get("pair_prefixes"):
            raise LookupError("the classifier of transformers pools tokens in another way")
        if traits.takes_prompts and self._is_translated:
            # sentence-transformers would load it without a word
            self._load("AutoModel")

    def token_ids(self, inputs: Sequence[Text], limit: int | None) -> list[list[int]]:
        """Return the token ids of each input, cut to `limit` tokens."""
        return [self._encode(each, limit)["input_ids"] for each in inputs]

    def values(self, task: Task, inputs: Sequence[Text], limit: int) -> list[Float32Array]:
        """Return the logits of each input, or its hidden states, `[tokens, hidden]`."""
        has_logits = TASKS[task].has_labels
        name = self._checkpoint.architecture if has_logits else "AutoModel"
        self._model = model = self._load(name)
        # some models have no such argument
        has_types = "token_type_ids" in signature(model.forward).parameters
        answers = []
        with torch.inference_mode():
            for each in inputs:
                encoded = self._encode(each, limit)
                if not has_types:
                    encoded.pop("token_type_ids", None)
                output = model(**{key: torch.tensor([row]) for key, row in encoded.items()})
                answer = output.logits if has_logits else output.last_hidden_state
                answers.append(answer[0].float().numpy())
        return answers

    def scores(self, task: Task, logits: Sequence[Float32Array]) -> list[Float32Array]:
        """Return the scores that a pipeline makes of the logits of each input.

        `values` has loaded the model.
        """
        if task == "token_classify":
            return [softmax(each) for each in logits]
        pipeline = self._library.pipeline(
            "text-classification", model=self._model, tokenizer=self._tokenizer, device="cpu"
        )
        made = [
            pipeline.postprocess({"logits": torch.from_numpy(each)[None]}, top_k=None)
            for each in logits
        ]
        return [np.array([label["score"] for label in each], np.float32) for each in made]

    def generated(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the new tokens of each prompt, by greedy or the checkpoint's beam search."""
        is_translation = self._checkpoint.translate is not None
        model = self._load("AutoModelForSeq2SeqLM" if is_translation else "AutoModelForCausalLM")
        answers = []
        for prompt in prompts:
            encoded = self._tokenizer(prompt, return_tensors="pt")
            begin = 1 if is_translation else encoded["input_ids"].shape[1]
            encoded.pop("token_type_ids", None)
            with torch.inference_mode():
                output = model.generate(**encoded, do_sample=False, max_new_tokens=NEW_TOKENS)
            answers.append(output[0, begin:].tolist())
        return answers

    def _load(self, name: str) -> Any:
        loader = getattr(self._library, name)
        options = {"trust_remote_code": False} if name.startswith("Auto") else {}
        model, info = loader.from_pretrained(
            self._folder,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
        # poolers, which a model without a head has and nothing reads
        missing = [each for each in info["missing_keys"] if "pooler." not in each]
        if self._is_translated and missing:
            raise LookupError(
                f"transformers has no model of this form: the checkpoint lacks {len(missing)} weights of"
                f" {type(model).__name__}, such as {min(missing)}"
            )
        if self._adapter is not None:
            import peft

            model = peft.PeftModel.from_pretrained(model, str(self._adapter)).merge_and_unload()
        return model.eval()

    def _encode(self, each: Text, limit: int | None) -> dict[str, list[int]]:
        parts = (each,) if isinstance(each, str) else each
        cut = {} if limit is None else {"truncation": True, "max_length": limit}
        return dict(self._tokenizer(*parts, **cut))


def sentence_vectors(
    folder: Path, texts: Sequence[str], limit: int, *, is_sparse: bool = False
) -> list[Float32Array]:
    """Return the vector of each text in sentence-transformers, sparse ones with all their zeros."""
    model = _load("SparseEncoder" if is_sparse else "SentenceTransformer", folder)
    if model.max_seq_length == inf:
        # static embeddings have no limit of their own
        model[0].tokenizer.enable_truncation(limit)
    else:
        model.max_seq_length = limit
    options = {"convert_to_sparse_tensor": False} if is_sparse else {}
    vectors = model.encode(list(texts), **_ONE_BY_ONE, **options)
    return [np.asarray(vector, dtype=np.float32) for vector in vectors]


def token_vectors(folder: Path, texts: Sequence[str], limit: int) -> list[Float32Array]:
    """Return the vectors of each text as a query, then as a document, in sentence-transformers."""
    model = _load("MultiVectorEncoder", folder)
    for name in ("query_length", "document_length"):
        length = getattr(model[0], name)
        setattr(model[0], name, limit if length is None else min(length, limit))
    options = {**_ONE_BY_ONE, "convert_to_numpy": True}
    queries = model.encode_query(list(texts), **options)
    return [*queries, *model.encode_document(list(texts), **options)]


def softmax(logits: Float32Array) -> Float32Array:
    """Return the softmax over the last axis, as the pipeline of tokens does."""
    found: Float32Array = torch.softmax(torch.from_numpy(logits), dim=-1).numpy()
    return found


def activated(folder: Path, logits: Sequence[Float32Array]) -> list[Float32Array]:
    """Return the scores that CrossEncoder of sentence-transformers makes of the logits of each input."""
    activation = _load("CrossEncoder", folder).activation_fn
    return [activation(torch.from_numpy(each)).numpy() for each in logits]


def pair_scores(folder: Path, pairs: Sequence[Text], limit: int) -> list[Float32Array]:
    """Return the score of each pair in sentence-transformers, without an activation."""
    model = _load("CrossEncoder", folder)
    model.max_seq_length = limit
    scores = model.predict(list(pairs), activation_fn=torch.nn.Identity(), **_ONE_BY_ONE)
    return [np.array([score], dtype=np.float32) for score in scores]


def _load(kind: str, folder: Path) -> Any:
    import sentence_transformers

    return getattr(sentence_transformers, kind)(
        str(folder),
        device="cpu",
        local_files_only=True,
        trust_remote_code=False,
        model_kwargs={"dtype": torch.float32},
    )
