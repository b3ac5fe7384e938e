"""Static embeddings: a vector for each token, read from a table; `embed` pools them.

Source: StaticEmbedding of sentence-transformers and Tulkens and van Dongen 2024, model2vec (weights of tokens by smooth
inverse frequency, Arora et al. 2017, are in the table or beside it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from varlen.models.blocks import inputs
from varlen.models.blocks.heads import Heads
from varlen.models.checkpoint import declared_fields as declare
from varlen.models.checkpoint import kind_fields
from varlen.models.checkpoint.family import Family, HeadConfig
from varlen.models.checkpoint.layers import LayerReader, TokenTable
from varlen.models.checkpoint.static_files import MODULE

if TYPE_CHECKING:
    from torch import Tensor

    from varlen.models.checkpoint.config_file import Json
    from varlen.program.program import Value
    from varlen.program.recorder import Recorder

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
    fields=kind_fields.ENCODER,
    read_sizes=StaticConfig.read,
    load=load,
    is_unused=lambda _, __: False,
    tokenizer_class="PreTrainedTokenizerFast",
)
