"""The table of tasks: their tensors, and what else holds for one of them.

Everything else that holds for some tasks only reads this table. The parameters of requests name their tasks themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal, TypeAlias

Task: TypeAlias = Literal[
    "embed",
    "sparse_embed",
    "fill_mask",
    "hidden",
    "classify",
    "rerank",
    "token_classify",
    "token_embed",
    "extract",
    "question_answer",
    "generate",
    "translate",
]
Width: TypeAlias = Literal["embedding", "hidden", "labels", "vocabulary", "top_k"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of requests or answers.

    Attributes:
        datatype: type, as KServe v2 names it.
        shape: names of the dimensions. `features` and `labels` are known for a model, others only for a request.
        meaning: a text in Markdown, for the reference page.
    """

    name: str
    datatype: str
    shape: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """What holds for one task.

    Attributes:
        inputs: tensors of a request, all optional.
        outputs: tensors in the order in which a response has them.
        answers: name of the answers in reports.
        width: length of a row of the engine's output; None where its tokens are the answer.
        has_token_rows: whether each token has a row of its own in the answer.
        takes_prompts: whether a text may have a prompt of the checkpoint before it: sentence-transformers defines the
            task.
        needs_masked_lm: whether the model needs the head of a masked language model.
        is_iterative: whether a sequence runs for many steps; else one batch answers it.
        further_prefix: beginning of the names of its tensors where it is a further output of a model; None where it can
            be none.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    answers: str
    width: Width | None = None
    has_token_rows: bool = False
    takes_prompts: bool = False
    needs_masked_lm: bool = False
    is_iterative: bool = False
    further_prefix: str | None = None

    @property
    def finds_rows(self) -> bool:
        """Whether its tensors hold what the model finds, such as terms or spans."""
        return not self.is_iterative and (self.needs_masked_lm or self.width is None)

    @property
    def has_labels(self) -> bool:
        """Whether its answers are logits, scores and labels of a classifier."""
        return self.width == "labels"


_TEXT = Tensor("text", "BYTES", ("rows", "1"), "UTF-8")
_TEXT_PAIR = Tensor(
    "text_pair",
    "BYTES",
    ("rows", "1"),
    "the second text of each row, such as a document to a query, or the context of a question",
)
_TOKEN_IDS = (
    Tensor(
        "input_ids",
        "INT64",
        ("rows", "tokens"),
        "ids of the checkpoint's tokenizer, special tokens included",
    ),
    Tensor(
        "attention_mask",
        "INT64",
        ("rows", "tokens"),
        "ones, then zeros over the padding on the right; without it no row has padding",
    ),
    Tensor("token_type_ids", "INT64", ("rows", "tokens"), "default: zeros"),
)
_TEXTS = (_TEXT, *_TOKEN_IDS)
_TEXTS_OR_PAIRS = (_TEXT, _TEXT_PAIR, *_TOKEN_IDS)

_NUM_TOKENS = Tensor(
    "num_tokens",
    "INT32",
    ("rows", "1"),
    "tokens of the row, special ones and tokens of expanded queries included, after truncation. Rows of `[tokens, …]`"
    " are padded with zeros behind them",
)
_LOGITS = Tensor(
    "logits", "FP32", ("rows", "labels"), "what the model gives, without an activation"
)
_SCORES = Tensor("scores", "FP32", ("rows", "labels"), "the logits after an activation")
_LABELS = Tensor(
    "labels",
    "BYTES",
    ("rows", "labels"),
    "names of the labels, `id2label` of config.json, in the order of logits and scores",
)
_ROW_LABELS = TaskFacts(
    inputs=_TEXTS_OR_PAIRS,
    outputs=(_LOGITS, _SCORES, _LABELS, _NUM_TOKENS),
    answers="logits",
    width="labels",
    further_prefix="",
)
_TOKEN_LABELS = ("rows", "tokens", "labels")
_MASKS = ("rows", "masks", "top_k")
_SPANS = ("rows", "spans")
_PAIR_SCORES = Tensor(
    "scores",
    "FP32",
    ("rows", "1"),
    "of a request with `text_pair`, which has no other output but `num_tokens`: MaxSim of the query `text` and the"
    " document `text_pair`. Absent without it",
)

_PROMPTS = (
    Tensor("text_input", "BYTES", ("1",), "the prompt as a text; this, `input_ids` or `messages`"),
    Tensor("input_ids", "INT64", ("tokens",), "the prompt as token ids"),
    Tensor(
        "messages",
        "BYTES",
        ("1",),
        "the prompt as a JSON list of chat messages, for the checkpoint's chat template",
    ),
)
# Outputs that a request asks for by the input `return_` and their name.
_OPTIONAL_OUTPUTS = (
    Tensor(
        "finish_reason", "BYTES", ("n",), "`stop`, `length`, or `None` while the sample continues"
    ),
    Tensor("cumulative_logprob", "FP32", ("n",), "the sum of the log probabilities up to now"),
    Tensor(
        "logprobs",
        "BYTES",
        ("n",),
        'JSON: per token, `{"id": {"logprob": …, "rank": …, "decoded_token": …, "bytes": […]}}`; `rank` is null for a'
        " chosen token outside the most likely ones; `bytes` are the UTF-8 that the token adds to the text, perhaps a"
        " part of a character",
    ),
    Tensor(
        "score",
        "FP32",
        ("n",),
        "of a [beam search](../tasks/translation.md#options), the score of each answer, the best first. It has no log"
        " probabilities",
    ),
    Tensor("num_input_tokens", "UINT32", ("1",), "length of the prompt, or of the source text"),
    Tensor("num_output_tokens", "UINT32", ("n",), "tokens of each sample in this response"),
    Tensor("output_ids", "INT64", ("tokens",), "these tokens, one sample after another"),
)
_GENERATED = TaskFacts(
    inputs=(
        *_PROMPTS,
        Tensor(
            "sampling_parameters",
            "BYTES",
            ("1",),
            "a JSON object of [options](#options-of-generation), also `request_priority` and `deadline_ms`; an unknown"
            " name is refused",
        ),
        Tensor("stream", "BOOL", ("1",), "whether the answer comes in parts"),
        Tensor(
            "exclude_input_in_output",
            "BOOL",
            ("1",),
            "false puts the text of the prompt before the answer, the default without `stream`; a stream and a"
            " translation have only the answer",
        ),
        *(
            Tensor(f"return_{output.name}", "BOOL", ("1",), f"sends `{output.name}` too")
            for output in _OPTIONAL_OUTPUTS
        ),
    ),
    outputs=(
        Tensor(
            "text_output",
            "BYTES",
            ("n",),
            "the text of each sample; in a stream, what came since the last response",
        ),
        *_OPTIONAL_OUTPUTS,
    ),
    answers="texts",
    is_iterative=True,
)

TASKS: Mapping[Task, TaskFacts] = MappingProxyType(
    {
        "embed": TaskFacts(
            inputs=_TEXTS,
            outputs=(
                Tensor(
                    "sentence_embedding",
                    "FP32",
                    ("rows", "features"),
                    "the vector; of a request with `spans` a row for each span",
                ),
                _NUM_TOKENS,
            ),
            answers="vectors",
            width="embedding",
            takes_prompts=True,
            further_prefix="",
        ),
        "sparse_embed": TaskFacts(
            inputs=_TEXTS,
            outputs=(
                Tensor(
                    "indices",
                    "INT32",
                    ("rows", "terms"),
                    "numbers of terms in the vocabulary, the largest weight first. Rows with fewer terms are padded"
                    " with zeros",
                ),
                Tensor("values", "FP32", ("rows", "terms"), "weights of these terms"),
                Tensor("terms", "BYTES", ("rows", "terms"), "texts of these terms"),
                Tensor("num_terms", "INT32", ("rows", "1"), "number of terms of the row"),
                _NUM_TOKENS,
            ),
            answers="term weights",
            width="vocabulary",
            takes_prompts=True,
            needs_masked_lm=True,
            further_prefix="sparse_",
        ),
        "fill_mask": TaskFacts(
            inputs=_TEXTS,
            outputs=(
                Tensor(
                    "token_ids",
                    "INT32",
                    _MASKS,
                    "the most likely tokens of each mask. Rows with fewer masks are padded with zeros",
                ),
                Tensor("scores", "FP32", _MASKS, "probabilities of the tokens of each mask"),
                Tensor("tokens", "BYTES", _MASKS, "texts of these tokens"),
                Tensor("num_masks", "INT32", ("rows", "1"), "number of masks of the row"),
                _NUM_TOKENS,
            ),
            answers="filled masks",
            width="top_k",
            needs_masked_lm=True,
        ),
        "hidden": TaskFacts(
            inputs=_TEXTS_OR_PAIRS,
            outputs=(
                Tensor(
                    "last_hidden_state",
                    "FP32",
                    ("rows", "tokens", "features"),
                    "a vector per token",
                ),
                _NUM_TOKENS,
            ),
            answers="hidden states",
            width="hidden",
            has_token_rows=True,
            further_prefix="",
        ),
        "classify": _ROW_LABELS,
        "rerank": _ROW_LABELS,
        "token_classify": TaskFacts(
            inputs=_TEXTS_OR_PAIRS,
            outputs=(
                replace(_LOGITS, shape=_TOKEN_LABELS),
                replace(_SCORES, shape=_TOKEN_LABELS),
                _LABELS,
                Tensor(
                    "tokens",
                    "BYTES",
                    ("rows", "tokens"),
                    "tokens of the row as the tokenizer writes them, such as `##ing`",
                ),
                Tensor(
                    "entities",
                    "BYTES",
                    ("rows", "1"),
                    "JSON: the [entities](../tasks/tokens.md#entities) of the text, if the request has"
                    " `aggregation_strategy`; else empty",
                ),
                _NUM_TOKENS,
            ),
            answers="logits",
            width="labels",
            has_token_rows=True,
        ),
        "token_embed": TaskFacts(
            inputs=_TEXTS_OR_PAIRS,
            outputs=(
                Tensor(
                    "token_embeddings",
                    "FP32",
                    ("rows", "vectors", "features"),
                    "a vector per token that counts in scores. Rows with fewer vectors are padded with zeros",
                ),
                Tensor("num_vectors", "INT32", ("rows", "1"), "number of vectors of the row"),
                _PAIR_SCORES,
                _NUM_TOKENS,
            ),
            answers="vectors of tokens",
            width="embedding",
            has_token_rows=True,
            takes_prompts=True,
            further_prefix="",
        ),
        "extract": TaskFacts(
            inputs=(_TEXT,),
            outputs=(
                Tensor(
                    "starts",
                    "INT32",
                    _SPANS,
                    "first character of each span, in the order of their beginnings. Rows with fewer spans are padded"
                    " with zeros",
                ),
                Tensor("ends", "INT32", _SPANS, "the character behind the last one of each span"),
                Tensor("spans", "BYTES", _SPANS, "text of each span"),
                Tensor("span_labels", "BYTES", _SPANS, "label of each span"),
                Tensor("scores", "FP32", _SPANS, "probability of this label"),
                Tensor("num_spans", "INT32", ("rows", "1"), "number of spans of the row"),
                Tensor(
                    "result",
                    "BYTES",
                    ("rows", "1"),
                    "JSON: what a [schema](../tasks/extraction.md#answer-to-a-schema) asks for; `{}` without one",
                ),
                _NUM_TOKENS,
            ),
            answers="spans",
        ),
        "question_answer": TaskFacts(
            inputs=(_TEXT, _TEXT_PAIR),
            outputs=(
                Tensor(
                    "answers",
                    "BYTES",
                    ("rows", "1"),
                    "JSON: a list of [answers](../tasks/question_answering.md#answer), the best first",
                ),
                _NUM_TOKENS,
            ),
            answers="answers to questions",
        ),
        "generate": _GENERATED,
        "translate": _GENERATED,
    }
)

ITERATIVE_TASKS = tuple(task for task, facts in TASKS.items() if facts.is_iterative)
ONE_SHOT_TASKS = tuple(task for task, facts in TASKS.items() if not facts.is_iterative)
PROMPTED_TASKS = tuple(task for task, facts in TASKS.items() if facts.takes_prompts)
LABEL_TASKS = tuple(task for task, facts in TASKS.items() if facts.has_labels)
FURTHER_TASKS = tuple(task for task, facts in TASKS.items() if facts.further_prefix is not None)
# Tasks of models that may have further outputs: a row of a request is one sequence.
_WITH_FURTHER: frozenset[Task] = frozenset((*FURTHER_TASKS, "token_classify"))


def further_names(task: Task) -> Mapping[str, Tensor]:
    """Return the tensors of a task as a further output, by their names there.

    `num_tokens`, which every task has, and scores of pairs are left out.
    """
    facts = TASKS[task]
    return {
        f"{facts.further_prefix}{tensor.name}": tensor
        for tensor in facts.outputs
        if tensor not in (_NUM_TOKENS, _PAIR_SCORES)
    }


def further_problem(task: Task, further: Sequence[Task]) -> str | None:
    """Return why a model cannot have the outputs of further tasks; None if it can."""
    if not further:
        return None
    if task not in _WITH_FURTHER:
        return (
            f"the task {task} has no further outputs; allowed: {', '.join(sorted(_WITH_FURTHER))}"
        )
    known = {tensor.name: task for tensor in TASKS[task].outputs}
    for index, other in enumerate(further):
        if other == task or other in further[:index]:
            return f"{other} is there already, and is named once"
        for name in further_names(other):
            if name in known:
                return f"{other} and {known[name]} both have an output {name}; allowed: one of them"
            known[name] = other
    return None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of config.pbtxt; `dims` do not include the rows."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    optional: bool = False


@cache
def input_specs(task: Task) -> tuple[TensorSpec, ...]:
    """Return the inputs of a task, all optional."""
    return tuple(_spec(tensor, optional=True) for tensor in TASKS[task].inputs)


@cache
def output_specs(task: Task, width: int = -1) -> tuple[TensorSpec, ...]:
    """Return the outputs of a task, in the order of a response.

    The width is the number of features or labels of the model.
    """
    return tuple(_spec(tensor, width) for tensor in TASKS[task].outputs)


def further_specs(task: Task, width: int) -> tuple[TensorSpec, ...]:
    """Return the outputs of a task as further outputs of a model."""
    names = further_names(task)
    return tuple(replace(_spec(names[name], width), name=name) for name in names)


def _spec(tensor: Tensor, width: int = -1, *, optional: bool = False) -> TensorSpec:
    sizes = {"1": 1, "features": width, "labels": width}
    dims = tuple(sizes.get(name, -1) for name in tensor.shape if name != "rows")
    data_type = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    return TensorSpec(tensor.name, f"TYPE_{data_type}", dims, optional)
