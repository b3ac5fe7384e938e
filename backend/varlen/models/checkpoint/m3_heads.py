"""The heads of bge-m3 for terms and for tokens.

One gives a weight to each term of a text, the other one a vector to each token.

`varlen convert-pickle` writes sparse_linear.pt and colbert_linear.pt as folders of these names, each in the form of a
Dense module. A weight of a term is the largest of its tokens, special tokens left out; the first token has no vector.
Source: Chen et al. 2024, arXiv:2402.03216, and inference/embedder/encoder_only/m3.py of FlagEmbedding.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import read_object, show
from varlen.models.checkpoint.files import TOKENIZER, has_file
from varlen.models.checkpoint.vector_layers import DenseConfig, read_dense

SPARSE, VECTORS = "sparse_linear", "colbert_linear"
# Tokens without a weight, by their names in tokenizer_config.json.
_UNWEIGHTED = ("cls_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class M3Heads:
    """The heads that a checkpoint has.

    Attributes:
        sparse: layer of the weight of a token, of `sparse_embed`.
        vectors: layer of its vector, of `token_embed`.
        unweighted: tokens without a weight.
    """

    sparse: DenseConfig | None
    vectors: DenseConfig | None
    unweighted: tuple[int, ...]


def read_m3_heads(
    folder: Path, hidden_size: int, special_tokens: Mapping[str, str]
) -> M3Heads | None:
    """Return the heads in a checkpoint folder, None without any.

    Args:
        hidden_size: features that they read.
        special_tokens: texts of special tokens by name.

    Raises:
        CheckpointError: a file of them is damaged, or does not fit the model.
    """
    sparse = _read(folder, SPARSE, hidden_size, "relu", 1)
    vectors = _read(folder, VECTORS, hidden_size, "identity", None)
    if sparse is None and vectors is None:
        return None
    texts = {special_tokens[name] for name in _UNWEIGHTED if name in special_tokens}
    return M3Heads(sparse, vectors, _ids_of(folder, texts) if sparse else ())


def _read(
    folder: Path, path: str, hidden_size: int, activation: str, features: int | None
) -> DenseConfig | None:
    if not has_file(folder, f"{path}/config.json"):
        return None
    layer = read_dense(folder, path)
    fits = layer.in_features == hidden_size and features in (None, layer.out_features)
    if not fits or layer.activation != activation or layer.has_residual:
        raise CheckpointError(
            f"{path}/config.json has the layer {layer.shown}; allowed: {hidden_size} to"
            f" {'any number' if features is None else features}, {activation}"
        )
    return layer


def _ids_of(folder: Path, texts: Collection[str]) -> tuple[int, ...]:
    """Return the ids of tokens by their texts, in tokenizer.json."""
    tokenizer: Any = read_object(folder, TOKENIZER)
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = vocabulary if isinstance(vocabulary, dict) else {}
    try:
        ids = {**ids, **{str(token["content"]): int(token["id"]) for token in added or ()}}
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{TOKENIZER} has added_tokens {show(added)}; allowed: a list of objects with content and id"
        ) from None
    return tuple(sorted(ids[text] for text in texts if text in ids))
