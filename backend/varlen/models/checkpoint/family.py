"""What the checks of a checkpoint need to know of its model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from varlen.models.checkpoint.config_fields import FieldRules
from varlen.models.checkpoint.config_file import Json
from varlen.models.checkpoint.masked_lm_layout import MaskedLMLayout
from varlen.models.checkpoint.weights import TensorHeader
from varlen.tasks import Task

# A decoder generates text after its input; a model with both parts generates from the encoder's result.
Kind: TypeAlias = Literal["encoder", "decoder", "encoder_decoder"]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes that config.json of every family gives, under its own names.

    Attributes:
        hidden: features of a token.
        positions: longest sequence that has positions, in tokens: of a source, and of a target.
        first_position: row of the first token in the position table. Above 0, the row before it is that of the padding
            token, whose id is the number of that row.
    """

    hidden: int
    positions: int
    first_position: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Family:
    """The checks of one `model_type`.

    Attributes:
        architectures: default task of each architecture that is served; the first one where config.json names none.
        heads: the architecture with the head of a task; `embed` and `hidden` need none.
        fields: the fields of config.json that it knows.
        read_sizes: returns the sizes in config.json; raises CheckpointError for a configuration that is not served.
        check_tensors: raises CheckpointError unless the tensors, by name, are those of config.json, architecture
            and task.
        tokenizer_class: the class that transformers takes where tokenizer_config.json names none.
        kind: the parts of its models.
        has_token_types: whether its models tell the two texts of a pair apart by token types.
        masked_lm: returns the head of its masked language models; None if it is not served.
        has_unread_tokens: whether a token that no token reads may read others.
    """

    architectures: Mapping[str, Task]
    heads: Mapping[Task, str]
    fields: FieldRules
    read_sizes: Callable[[Json], ModelSizes]
    check_tensors: Callable[[Mapping[str, TensorHeader], Json, str, Task], None]
    tokenizer_class: str
    kind: Kind = "encoder"
    has_token_types: bool = False
    masked_lm: Callable[[Json], MaskedLMLayout] | None = None
    has_unread_tokens: bool = True

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that its checkpoints may serve."""
        vectors: tuple[Task, ...] = () if self.kind == "encoder_decoder" else ("embed", "hidden")
        of_tokens: tuple[Task, ...] = ("token_embed",) if self.kind == "encoder" else ()
        return (*vectors, *of_tokens, *self.heads)
