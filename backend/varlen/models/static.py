"""Static embeddings: a vector for each token, read from a table; `embed` pools them.

They are saved by StaticEmbedding of sentence-transformers, or by model2vec, where a row is
`embeddings[mapping[token]] * weights[token]`; `mapping` and `weights` may be absent. Source: both libraries; Tulkens
and van Dongen 2024 (weights of tokens by smooth inverse frequency, Arora et al. 2017, are in the table or beside it).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from varlen.errors import CheckpointError
from varlen.models.blocks import inputs
from varlen.models.blocks.heads import Heads
from varlen.models.checkpoint import config_fields as declare
from varlen.models.checkpoint.family import Family, HeadConfig
from varlen.models.checkpoint.files import Json, peek_json, read_flag, read_optional_object
from varlen.models.checkpoint.layers import LayerReader, TokenTable
from varlen.models.checkpoint.sentence_transformers import first_module
from varlen.models.checkpoint.weights import read_headers

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

# The `model_type` of the config.json that such a folder gets here.
STATIC = "static"
MODEL2VEC = "model2vec"
MODULE = "StaticEmbedding"
# Names of the tables, with the names of tensors that give each token its row.
_TABLES = {"embedding.weight": (), "embeddings": ("mapping", "weights")}
# A token that names a row takes a few bytes of the file, and a row of memory.
_MOST_MAPPED = 1 << 22


def static_folder(folder: Path) -> Path | None:
    """Return the folder with the table and the tokenizer of static embeddings.

    None where a checkpoint holds something else.

    Raises:
        CheckpointError: modules.json names a folder elsewhere.
    """
    first = first_module(folder, MODULE)
    if first is not None:
        path = Path(str(first.get("path") or ""))
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(
                f'modules.json names the folder "{path}"; allowed: a folder beside it'
            )
        return folder / path
    config = peek_json(folder, "config.json")
    is_model2vec = isinstance(config, dict) and config.get("model_type") == MODEL2VEC
    return folder if is_model2vec else None


def static_config(folder: Path) -> Json:
    """Return the config.json of static embeddings: sizes of the table, and whether vectors are normalized.

    Raises:
        CheckpointError: the folder has no table of vectors.
    """
    headers = read_headers(folder)
    name = next((name for name in _TABLES if name in headers), None)
    if name is None:
        raise CheckpointError(
            f"{folder} has no tensor {' or '.join(_TABLES)}, a vector for each token"
        )
    shape = headers[name].shape
    if len(shape) != 2:
        raise CheckpointError(f'the tensor "{name}" has shape {list(shape)}; allowed: two axes')
    by_token = [each for each in _TABLES[name] if each in headers]
    tokens = shape[0]
    if "mapping" in by_token:
        of_tokens = headers["mapping"].shape
        if len(of_tokens) != 1 or of_tokens[0] > _MOST_MAPPED:
            raise CheckpointError(
                f'the tensor "mapping" has shape {list(of_tokens)}; allowed: one axis of at most {_MOST_MAPPED}'
            )
        (tokens,) = of_tokens
    return {
        "model_type": STATIC,
        "architectures": [MODULE],
        "vocab_size": tokens,
        "hidden_size": shape[1],
        "rows": shape[0],
        "table": name,
        "by_token": by_token,
        # where there is no modules.json
        "normalize": read_flag(
            read_optional_object(folder, "config.json"), "normalize", default=False
        ),
    }


# Any length would do; it bounds the memory of one text.
_LONGEST = 32_768


@dataclass(frozen=True, slots=True)
class StaticConfig(declare.ConfigFields):
    """Sizes of the table."""

    vocab_size: int = declare.size("vocab_size")
    hidden: int = declare.size("hidden_size")
    rows: int = declare.size("rows")
    positions: int = declare.computed(lambda _: _LONGEST)


@dataclass(frozen=True, slots=True)
class StaticModel:
    """The vectors of all tokens."""

    token_table: TokenTable
    heads: Heads = Heads()
    type_vocab_size: int = 1

    def record(self, ops: Recorder) -> Value:
        return self.token_table.record(ops, inputs.token_ids(ops))


def load(read: LayerReader, fields: Json, head: HeadConfig) -> StaticModel:  # noqa: ARG001  # it has no head
    """Return the table of a checkpoint; see `Family`."""
    config = StaticConfig.read(fields)
    name, by_token = fields["table"], fields["by_token"]
    if not by_token:
        return StaticModel(read.token_table(name, config.rows, config.hidden))
    stored = read.fp32.tensor(name, config.rows, config.hidden)
    mapping = weights = None
    if "mapping" in by_token:
        mapping = read.indices("mapping", config.vocab_size, below=config.rows)
    if "weights" in by_token:
        weights = read.fp32.tensor("weights", config.vocab_size)

    def folded() -> Tensor:
        table = stored if mapping is None else stored[mapping]
        table = table if weights is None else table * weights[:, None]
        return read.as_read(table)

    return StaticModel(TokenTable(read.computed(folded), config.vocab_size))


FAMILY = Family(
    architectures={MODULE: "embed"},
    heads={},
    fields=declare.ENCODER,
    read_sizes=StaticConfig.read,
    load=load,
    is_unused=lambda _, __: False,
    tokenizer_class="PreTrainedTokenizerFast",
)
