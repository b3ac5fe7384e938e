"""How the existing model is asked: its tensors of texts, token ids and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tritonclient.grpc import InferInput, InferRequestedOutput

from varlen_tools.adopt.wish import AdoptError

# Names of outputs that are answers, the first one there counts; else there has to be only one.
_ANSWERS = ("sentence_embedding", "embedding", "pooler", "logits", "scores", "last_hidden_state")


@dataclass(frozen=True, slots=True)
class Request:
    """One text as a request to a model."""

    model: str
    inputs: Sequence[InferInput]
    output: str
    parameters: Mapping[str, Any]

    @property
    def outputs(self) -> list[InferRequestedOutput]:
        """The outputs, as tritonclient takes them."""
        return [InferRequestedOutput(self.output)]


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input of the model."""

    name: str
    datatype: str
    rank: int


@dataclass(frozen=True, slots=True)
class Existing:
    """A model of the repository, as a client sees it.

    Attributes:
        text: the input of texts; None if it takes token ids.
        token_tensors: inputs of token ids, by what they are: `ids`, `attention_mask`, `type_ids`.
    """

    name: str
    text: Tensor | None
    token_tensors: Mapping[str, Tensor]
    output: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def request(self, text: str, tokenizer: Tokenizer, longest: int) -> Request:
        """Return the request for one text.

        Args:
            tokenizer: tokenizer of the checkpoint, for a model that takes token ids.
            longest: number of tokens after which ids are cut.
        """
        if self.text is not None:
            words = np.array([text.encode()], dtype=np.object_)
            return Request(self.name, [_filled(self.text, words)], self.output, self.parameters)
        tokenizer.enable_truncation(longest)
        encoding = tokenizer.encode(text)
        inputs = [
            _filled(tensor, np.array(getattr(encoding, role)))
            for role, tensor in self.token_tensors.items()
        ]
        return Request(self.name, inputs, self.output, self.parameters)


def _filled(tensor: Tensor, row: npt.NDArray[Any]) -> InferInput:
    values = row if tensor.rank < 2 else row[None]
    if tensor.datatype in {"INT32", "INT64"}:
        values = values.astype(np.int32 if tensor.datatype == "INT32" else np.int64)
    made = InferInput(tensor.name, list(values.shape), tensor.datatype)
    made.set_data_from_numpy(values)
    return made


def read_existing(
    name: str, metadata: Mapping[str, Any], optional: Sequence[str], output: str | None
) -> Existing:
    """Return how a model is asked, from the metadata that the server gives.

    Args:
        metadata: its metadata as JSON: `inputs` and `outputs` with `name`, `datatype` and `shape`.
        optional: names of inputs that a request may leave out.

    Raises:
        AdoptError: an input is neither a text nor token ids, or no output is an answer.
    """
    tensors = _tensors(metadata["inputs"])
    texts = [tensor for tensor in tensors if tensor.datatype == "BYTES"]
    ids = {role: tensor for tensor in tensors if (role := _role(tensor)) is not None}
    chosen = texts[:1] or list(ids.values())
    if len(texts) > 1:
        chosen = [tensor for tensor in texts if tensor.name not in optional][:1] or texts[:1]
    others = [each.name for each in tensors if each not in chosen and each.name not in optional]
    if others or not chosen or not (texts or "ids" in ids):
        shown = ", ".join(f"{each.name} {each.datatype}" for each in tensors)
        raise AdoptError(
            f"{name} takes {shown}; adopt knows models of one text, or of input_ids with attention_mask and"
            " token_type_ids"
        )
    return Existing(
        name, chosen[0] if texts else None, {} if texts else ids, _answer(name, metadata, output)
    )


def read_tokenizer(name: str, metadata: Mapping[str, Any]) -> Existing | None:
    """Return how a tokenizer is asked for ids; None for other models."""
    inputs = _tensors(metadata["inputs"])
    ids = [each.name for each in _tensors(metadata["outputs"]) if _role(each) == "ids"]
    if [each.datatype for each in inputs] != ["BYTES"] or not ids:
        return None
    return Existing(name, inputs[0], {}, ids[0])


def _tensors(metadata: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [Tensor(each["name"], each["datatype"], len(each["shape"])) for each in metadata]


def _role(tensor: Tensor) -> str | None:
    """Return the attribute of an encoding of `tokenizers` that an input takes."""
    if tensor.datatype not in {"INT32", "INT64"}:
        return None
    name = tensor.name.lower()
    if "type" in name or "segment" in name:
        return "type_ids"
    if "mask" in name:
        return "attention_mask"
    return "ids" if "id" in name or "token" in name else None


def _answer(name: str, metadata: Mapping[str, Any], output: str | None) -> str:
    names = [each["name"] for each in metadata["outputs"] if each["datatype"].startswith("FP")]
    if output is not None:
        found = [each for each in names if each == output]
    else:
        known = [each for part in _ANSWERS for each in names if part in each.lower()]
        found = known[:1] or (names if len(names) == 1 else [])
    if not found:
        raise AdoptError(
            f"{name} has the outputs {', '.join(names) or 'without numbers'}; name the answer with --output"
        )
    return str(found[0])
