"""What is known of a model family: fields, tasks, tensors, heads, labels, loading, checks.

The head of a masked language model: a dense layer, an activation and a norm make a row of each token; its product with
a table gives a logit for each term of the vocabulary. Mostly that table is the one of the token embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_fields import FieldRules
from varlen.models.checkpoint.files import Json, is_causal, read_num_labels, show
from varlen.models.checkpoint.layers import GroupLinear, LayerReader, Linear, Split, TokenTable
from varlen.models.checkpoint.lora_folder import same_layer
from varlen.models.checkpoint.ranking import LogitScore
from varlen.models.checkpoint.weights import (
    TensorHeader,
    check_indices,
    check_tensor,
    check_unused,
    is_quantized,
)
from varlen.request.vectors import ScoreFunction
from varlen.tasks import Task
from varlen_kernels import Activation, Pooling


@dataclass(frozen=True, slots=True)
class MaskedLMNames:
    """Names of the head's tensors.

    Attributes:
        dense, norm: the layers in front of the product.
        decoder: the product; its weight is stored if it is not the table of embeddings.
        biases: names that the bias of the product may have; the last one is its own, if the table is too.
        activation: activation between dense layer and norm; None for the encoder's.
    """

    dense: str
    norm: str
    decoder: str
    biases: tuple[str, ...]
    activation: Activation | None = None


BERT_MASKED_LM = MaskedLMNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
)


@dataclass(frozen=True, slots=True)
class MaskedLMLayout:
    """The head of one checkpoint.

    Attributes:
        features: features of a row in front of the product.
        is_tied: whether the product reads the table of token embeddings.
    """

    names: MaskedLMNames
    hidden: int
    features: int
    vocabulary: int
    activation: Activation
    norm_eps: float
    is_tied: bool
    has_dense_bias: bool = True
    has_norm_bias: bool = True
    has_bias: bool = True

    def bias_name(self, stored: Container[str]) -> str | None:
        """Return the name of the product's bias, None if it has none.

        Raises:
            CheckpointError: it is missing.
        """
        if not self.has_bias:
            return None
        names = self.names.biases if self.is_tied else self.names.biases[::-1]
        found = next((name for name in names if name in stored), None)
        if found is None:
            raise CheckpointError(f'the checkpoint has no tensor "{self.names.biases[0]}"')
        return found


# Stands for a tensor that is not read.
NOTHING: Any = None


class HeaderReader(LayerReader):
    """Checks each tensor that a family's `load` asks for, without torch; returns None."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self._headers = headers
        self._read: set[str] = set()
        self._linears: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._headers

    @property
    def fp32(self) -> LayerReader:
        """This reader: dtypes come from the files."""
        return self

    @property
    def last(self) -> LayerReader:
        return self

    @property
    def floats(self) -> LayerReader:
        return self

    def tensor(self, name: str, *shape: int) -> Any:
        check_tensor(self._headers, name, shape)
        self._read.add(name)

    def rows(self, name: str, *shape: int, of: Sequence[int]) -> Any:  # noqa: ARG002  # no row is read
        self.tensor(name, *shape)

    def indices(self, name: str, count: int, *, below: int) -> Any:  # noqa: ARG002  # no number is read
        check_indices(self._headers, name, count)
        self._read.add(name)

    def head_columns(self, name: str, rows: int, heads: int) -> Any:
        self.tensor(name, rows, heads)

    def token_table(self, name: str, *shape: int) -> TokenTable:
        self.tensor(name, *shape)
        return TokenTable(NOTHING, shape[0])

    def vocabulary_bias(self, name: str, *shape: int) -> Any:
        self.tensor(name, *shape)

    def output(self, name: str, hidden: int, vocabulary: int) -> Linear:
        self.tensor(f"{name}.weight", vocabulary, hidden)
        return Linear(NOTHING, NOTHING)

    def linear(
        self,
        names: Sequence[str],
        fan_in: int,
        fan_outs: Sequence[int],
        *,
        bias: bool = True,
        is_saved_by_input: bool = False,
        **_: object,
    ) -> Linear:
        for name, fan_out in zip(names, fan_outs, strict=True):
            weight, shape = f"{name}.weight", (fan_out, fan_in)
            if is_saved_by_input and not is_quantized(self._headers, weight):
                shape = fan_in, fan_out
            self.tensor(weight, *shape)
            self._linears.add(name)
            if bias:
                self.tensor(f"{name}.bias", fan_out)
        return Linear(NOTHING, NOTHING)

    def group_linear(
        self,
        names: Sequence[Sequence[str]],
        fan_in: int,
        fan_out: int,
        **_: object,
    ) -> GroupLinear:
        for name in (name for layers in names for name in layers):
            self.tensor(f"{name}.weight", fan_out, fan_in)
        return GroupLinear(NOTHING)

    def stacked_group_linear(
        self, name: str, groups: int, fan_in: int, fan_out: int, *, split: Split
    ) -> GroupLinear:
        size, width = (fan_out, fan_in) if split == "outputs" else (fan_in, fan_out)
        self.tensor(name, groups * size, width)
        return GroupLinear(NOTHING)

    def computed(self, compute: Callable[[], Any]) -> Any:
        """Compute nothing."""

    def may_be_left_out(self, layer: str, is_unused: Callable[[str], bool]) -> bool:
        """Return whether a layer that a program does not run changes no result of it.

        It is a linear layer of a head of another task, or none that was asked for. A layer of a stack never is: it may
        run in another form.

        Args:
            layer: name of the layer, perhaps with or without a prefix that the checkpoint has.
            is_unused: whether a tensor that was not asked for changes no result.
        """
        layers = [each.removesuffix(".weight") for each in self._headers]
        own = same_layer(layer, layers) or layer
        if any(each.isdigit() for each in own.split(".")):
            return False
        return own in self._linears or is_unused(f"{own}.weight")

    def check_unread(self, is_harmless: Callable[[str], bool]) -> None:
        """Raise CheckpointError unless all tensors that were not asked for are harmless."""
        check_unused(self._headers, self._read, is_harmless)


# A decoder generates text after its input; a model with both parts generates from the encoder's result.
Kind: TypeAlias = Literal["encoder", "decoder", "encoder_decoder"]
Model_co = TypeVar("Model_co", covariant=True)


class ModelSizes(Protocol):
    """Sizes that config.json of every family gives, under its own names."""

    @property
    def hidden(self) -> int:
        """Features of a token."""

    @property
    def positions(self) -> int:
        """Longest sequence that has positions, in tokens: of a source, and of a target."""

    @property
    def uncounted_token(self) -> int | None:
        """The padding token, where transformers does not count it as a position."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What a checkpoint has on top of the layers that its config.json describes.

    Attributes:
        task: task of that class's head, `embed` without one.
        num_labels: outputs of a classifier, 0 without one.
        masked_tokens: tokens whose logits are -inf.
    """

    architecture: str
    task: Task
    num_labels: int = 0
    logit_score: LogitScore | None = None
    masked_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Family(Generic[Model_co]):
    """A `model_type`: how its checkpoints are checked and loaded.

    Attributes:
        architectures: default task of each architecture that is served; the first one where config.json names none.
        heads: the architecture with the head of a task; `embed` and `hidden` need none.
        read_sizes: returns the sizes in config.json; raises CheckpointError for a configuration that is not served.
        load: returns the model, given content of config.json; asks the reader for all of its tensors.
        is_unused: whether a tensor that `load` does not ask for changes no result, given the names of all tensors.
        tokenizer_class: the class that transformers takes where tokenizer_config.json names none.
        has_token_types: whether its models tell the two texts of a pair apart by token types.
        masked_lm: returns the head of its masked language models; None if it is not served.
        may_have_unattended_tokens: whether sequences may end with unattended tokens, which attend to others.
        own_transformer: a module of its checkpoints that stands for Transformer of sentence-transformers, if they have
            one.
        names_layers: whether its models tell the recorder the output of each layer.
        is_divisible: whether ranks may divide its models: its linear layers say how, see `LayerReader.linear`.
        read_pooling: returns the pooling that config.json names for `embed`; None if it names none.
        takes_adapters: whether requests may choose adapters of its linear layers.
    """

    architectures: Mapping[str, Task]
    heads: Mapping[Task, str]
    fields: FieldRules
    read_sizes: Callable[[Json], ModelSizes]
    load: Callable[[LayerReader, Json, HeadConfig], Model_co]
    is_unused: Callable[[str, Container[str]], bool]
    tokenizer_class: str
    kind: Kind = "encoder"
    has_token_types: bool = False
    masked_lm: Callable[[Json], MaskedLMLayout] | None = None
    may_have_unattended_tokens: bool = True
    own_transformer: str = ""
    names_layers: bool = False
    is_divisible: bool = False
    read_pooling: Callable[[Json], Pooling | None] = lambda _: None
    takes_adapters: bool = True
    is_causal: Callable[[Json], bool] = is_causal

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that its checkpoints may serve."""
        vectors: tuple[Task, ...] = () if self.kind == "encoder_decoder" else ("embed", "hidden")
        of_tokens: tuple[Task, ...] = ("token_embed", "extract") if self.kind == "encoder" else ()
        return (*vectors, *of_tokens, *self.heads)

    def check_tensors(
        self,
        headers: Mapping[str, TensorHeader],
        config: Json,
        head: HeadConfig,
        load_more: Callable[[LayerReader], object] | None = None,
    ) -> None:
        """Raise CheckpointError unless the tensors are exactly those that config.json requires.

        Args:
            load_more: reads a head that no family knows.
        """
        reader = HeaderReader(headers)
        self.load(reader, config, head)
        if load_more is not None:
            load_more(reader)
        reader.check_unread(lambda name: self.is_unused(name, headers))


def encoder_classes(name: str, *more: str) -> tuple[dict[str, Task], dict[Task, str]]:
    """Return `architectures` and `heads` of an encoder with the usual classes of transformers.

    Args:
        name: the beginning of its classes, such as Bert of BertModel.
        more: classes with only the encoder, or with a head that is not served.
    """
    masked, sequences, tokens, questions = (
        f"{name}For{head}"
        for head in (
            "MaskedLM",
            "SequenceClassification",
            "TokenClassification",
            "QuestionAnswering",
        )
    )
    architectures: dict[str, Task] = {
        **dict.fromkeys((f"{name}Model", masked, *more), "embed"),
        sequences: "classify",
        tokens: "token_classify",
        questions: "question_answer",
    }
    heads: dict[Task, str] = {
        "sparse_embed": masked,
        "fill_mask": masked,
        "classify": sequences,
        "rerank": sequences,
        "token_classify": tokens,
        "question_answer": questions,
    }
    return architectures, heads


# The tasks of the usual heads of a decoder, beside `generate`.
CLASSIFIERS: tuple[Task, ...] = ("classify", "rerank", "token_classify")


def decoder_classes(
    name: str, classifiers: Collection[Task] = CLASSIFIERS, base: str | None = None
) -> tuple[dict[str, Task], dict[Task, str]]:
    """Return `architectures` and `heads` of a decoder with the usual classes of transformers.

    Args:
        name: the beginning of the class that generates, such as Llama of LlamaForCausalLM.
        classifiers: the tasks of its other heads.
        base: the beginning of its other classes; None for the same.
    """
    base = base or name
    generator, sequences = f"{name}ForCausalLM", f"{base}ForSequenceClassification"
    classes = dict(
        zip(CLASSIFIERS, (sequences, sequences, f"{base}ForTokenClassification"), strict=True)
    )
    own = {task: classes[task] for task in classifiers}
    architectures: dict[str, Task] = {generator: "generate", f"{base}Model": "embed"}
    architectures |= {own[task]: task for task in own if task != "rerank"}
    return architectures, {"generate": generator, **own}


# By `problem_type` of config.json.
_FUNCTION_OF_PROBLEM: Mapping[str, ScoreFunction] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# By the last part of a class name that sentence-transformers stores.
_FUNCTION_OF_CLASS: Mapping[str, ScoreFunction] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}


@dataclass(frozen=True, slots=True)
class Labels:
    """What the outputs of a classification head are.

    Attributes:
        function: makes scores of logits, unless a request names another.
    """

    names: tuple[str, ...]
    function: ScoreFunction


NO_LABELS = Labels((), "none")


def read_labels(config: Json, activation_class: str | None) -> Labels:
    """Return the labels of a checkpoint, with the scores that the original libraries give.

    The function comes from CrossEncoder in sentence-transformers if a file has it, else from the pipeline
    `text-classification` in transformers.

    Args:
        activation_class: the class in config_sentence_transformers.json, which comes first, if the file has one.

    Raises:
        CheckpointError: `id2label` does not number its labels from 0, or the stored function is not one of ours.
    """
    count = read_num_labels(config)
    function = _stored_function(config, activation_class) or _function(config, count)
    return Labels(_names(config, count), function)


def _names(config: Json, count: int) -> tuple[str, ...]:
    names = config.get("id2label")
    if not isinstance(names, dict):
        return tuple(f"LABEL_{label}" for label in range(count))
    by_number = {str(number): str(name) for number, name in names.items()}
    if by_number.keys() != {str(label) for label in range(count)}:
        raise CheckpointError(
            f"config.json has id2label {show(names)}; allowed: labels numbered from 0 to {count - 1}"
        )
    return tuple(by_number[str(label)] for label in range(count))


def _stored_function(config: Json, name: object) -> ScoreFunction | None:
    stored = config.get("sentence_transformers")
    name = name or (stored.get("activation_fn") if isinstance(stored, dict) else None)
    name = name or config.get("sbert_ce_default_activation_function")
    if name is None:
        return None
    function = _FUNCTION_OF_CLASS.get(str(name).rpartition(".")[-1])
    if function is None:
        raise CheckpointError(
            f"the scores of this checkpoint are made by {show(name)}; allowed: {', '.join(_FUNCTION_OF_CLASS)}"
        )
    return function


def _function(config: Json, count: int) -> ScoreFunction:
    problem = config.get("problem_type")
    if count == 1 and problem != "regression":
        return "sigmoid"
    return _FUNCTION_OF_PROBLEM.get(str(problem), "softmax")
