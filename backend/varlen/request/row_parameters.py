"""Parameters of requests to tasks of one step; every task has two of them."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from varlen.errors import RequestError
from varlen.parameter import (
    FLAG,
    MAX_INT32,
    parameter_field,
    parameters_of,
    real_field,
    refuse,
    whole_field,
    word_field,
)
from varlen.request.generation import GenerationOptions
from varlen.request.request import RequestOptions
from varlen.request.schema import SCHEMA_TEXT, Schema, read_schema
from varlen.request.spans import (
    DEFAULT_ANSWER_TOKENS,
    DEFAULT_THRESHOLD,
    LABELS_TEXT,
    MAX_ANSWER_TOKENS,
    MAX_LABELS,
    read_labels,
)
from varlen.request.vectors import (
    MAX_SPANS,
    SPANS_TEXT,
    VECTOR_DTYPES,
    ScoreFunction,
    VectorDType,
    read_spans,
)
from varlen.tasks import LABEL_TASKS, ONE_SHOT_TASKS, PROMPTED_TASKS, Task

MAX_PRIORITY = 9
MAX_TENANT_CHARACTERS = 128
MAX_SALT_CHARACTERS = 256

Operation: TypeAlias = Literal["infer", "tokenize", "detokenize", "adapters"]

TruncationSide: TypeAlias = Literal["right", "left"]
AggregationStrategy: TypeAlias = Literal["none", "simple", "first", "average", "max"]
Activation: TypeAlias = Literal["auto"] | ScoreFunction
InputType: TypeAlias = Literal[
    "query",
    "passage",
    "search_query",
    "search_document",
    "document",
    "classification",
    "clustering",
]

# Tasks of models that may read an instruction, and of those that take any text before a text.
_INSTRUCTED_TASKS: tuple[Task, ...] = ("embed", "sparse_embed", "rerank")
_ANY_PROMPT_TASKS: tuple[Task, ...] = ("embed", "sparse_embed")
MAX_PROMPT_CHARACTERS = 4096

# Parameters of the answer, which outputs of further tasks read too.
_OF_ANSWERS = ("normalize", "dimensions", "output_dtype", "activation", "max_active_dims")
NO_FURTHER: Mapping[Task, int] = MappingProxyType({})
# Parameters whose largest value is the width of the model's output.
_UP_TO_WIDTH = ("dimensions", "max_active_dims", "top_k")


@dataclass(frozen=True, slots=True)
class TextPrefix:
    """What a request puts before its texts.

    Attributes:
        prompt_name: name of a prompt of the checkpoint; None selects its default one.
        input_type: meaning of the prompt, instead of its name.
        instruction: task in words, in the place of the prompt's own.
    """

    prompt_name: str | None = None
    input_type: InputType | None = None
    instruction: str | None = None
    prompt: str | None = None

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(each.name for each in fields(self) if getattr(self, each.name) is not None)

    def check_has_texts(self) -> None:
        """Raise RequestError if there is one: the request has token ids."""
        if self.given:
            raise RequestError(
                f"the request has {self.given[0]} and input_ids; a prompt is put before texts: send text"
            )

    def check(self) -> None:
        """Raise RequestError if two of them contradict each other."""
        names = [name for name in self.given if self.prompt is not None or name != "instruction"]
        if len(names) > 1:
            raise RequestError(
                f"the request has both {names[0]} and {names[1]}; send one or the other"
            )


NO_PREFIX = TextPrefix()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParameters:
    """Checked parameters of one request. Each field describes itself."""

    truncate: bool = word_field(
        False,
        FLAG,
        "cut a text that is too long; otherwise it is an error",
        tasks=ONE_SHOT_TASKS,
    )
    truncate_prompt_tokens: int | None = whole_field(
        None,
        1,
        MAX_INT32,
        "cut a text to this many tokens, special tokens included, as vLLM does; at most the longest sequence of the"
        " model. Not needed with `truncate`, which cuts to the longest sequence",
        tasks=ONE_SHOT_TASKS,
    )
    truncation_side: TruncationSide | None = word_field(
        None,
        get_args(TruncationSide),
        "which end is cut; default: `truncation_side` in tokenizer_config.json, else `right`",
        tasks=ONE_SHOT_TASKS,
    )
    normalize: bool | None = word_field(
        None,
        FLAG,
        "scale each vector of `embed` and `token_embed` to length 1; default: the checkpoint's",
        tasks=ONE_SHOT_TASKS,
    )
    prompt_name: str | None = parameter_field(
        None,
        "the prompt of this name, in `prompts` of config_sentence_transformers.json, is put before each text; default:"
        " its `default_prompt_name`. Not with `input_ids`. Of `token_embed` also `query` and `document`, which have"
        " [lengths and vectors of their own](../tasks/late_interaction.md#roles)",
        pattern="(?s).*",
        allowed_text="a string",
        tasks=PROMPTED_TASKS,
    )
    input_type: InputType | None = word_field(
        None,
        get_args(InputType),
        "what the texts are for, in the names of Cohere and NVIDIA NIM: chooses the checkpoint's prompt"
        " [of this meaning](../tasks/embeddings.md#input-types). Not with `prompt_name` or `input_ids`",
        tasks=PROMPTED_TASKS,
    )
    instruction: str | None = parameter_field(
        None,
        "what the model has to find, of a model [trained to read it](../tasks/reranking.md#instructions), such"
        " as Qwen3-Reranker and Qwen3-Embedding; default: the checkpoint's. `embed` replaces the instruction of a"
        " prompt with `Instruct: … Query:`: the one of `prompt_name` or `input_type`, else the first",
        pattern=rf"(?s).{{1,{MAX_PROMPT_CHARACTERS}}}",
        allowed_text=f"a string of 1 to {MAX_PROMPT_CHARACTERS} characters",
        tasks=_INSTRUCTED_TASKS,
    )
    prompt: str | None = parameter_field(
        None,
        "this text is put before each text, as `prompt` of `encode` in sentence-transformers. Not with `prompt_name`,"
        " `input_type`, `instruction` or `input_ids`",
        pattern=rf"(?s).{{0,{MAX_PROMPT_CHARACTERS}}}",
        allowed_text=f"a string of at most {MAX_PROMPT_CHARACTERS} characters",
        tasks=_ANY_PROMPT_TASKS,
    )
    dimensions: int | None = parameter_field(
        None,
        "keep only the first features, at most all; scaled to length 1 again if the vector is normalized. For models"
        " trained for it (Matryoshka)",
        lowest=1,
        tasks=("embed",),
    )
    output_dtype: VectorDType = word_field(
        "float32",
        VECTOR_DTYPES,
        "[data type](#data-types-of-vectors) of `sentence_embedding`",
        tasks=("embed",),
    )
    spans: tuple[int, ...] | None = parameter_field(
        None,
        "a vector for each of these [parts of one text](../tasks/long_documents.md), which the model reads as a whole"
        " (late chunking)",
        allowed_text=SPANS_TEXT,
        lowest=0,
        highest=MAX_INT32,
        max_items=2 * MAX_SPANS,
        read=read_spans,
        tasks=("embed",),
    )
    windows: bool = word_field(
        False,
        FLAG,
        "a text that is longer than the model is read in [windows](../tasks/long_documents.md#windows), and its vector"
        " is the mean of theirs. With `spans`, each token counts in one window",
        tasks=("embed",),
    )
    window_overlap: int | None = whole_field(
        None,
        0,
        MAX_INT32,
        "tokens that two windows share; default: 256, or a quarter of a window",
        tasks=("embed",),
    )
    activation: Activation = word_field(
        "auto",
        ("auto", *get_args(ScoreFunction)),
        "makes `scores` of logits. `auto` is what the original library does: the activation that a CrossEncoder has"
        " stored in config.json, else by `problem_type`, else sigmoid for one label and softmax for several",
        tasks=LABEL_TASKS,
    )
    aggregation_strategy: AggregationStrategy | None = word_field(
        None,
        get_args(AggregationStrategy),
        "how tokens become [entities](../tasks/tokens.md#entities), as in the pipeline of transformers; only with"
        " single texts",
        tasks=("token_classify",),
    )
    max_active_dims: int | None = parameter_field(
        None,
        "keep only the terms of the largest weights, at most the size of the vocabulary; default: the checkpoint's"
        " number, else all",
        lowest=1,
        tasks=("sparse_embed",),
    )
    top_k: int | None = parameter_field(
        None,
        "tokens of each mask, at most 100 or the size of the vocabulary; default: 5. Answers to each question, at most"
        " 100; default: 1",
        lowest=1,
        tasks=("fill_mask", "question_answer"),
    )
    max_answer_len: int = whole_field(
        DEFAULT_ANSWER_TOKENS,
        1,
        MAX_ANSWER_TOKENS,
        "longest answer to a question, in tokens",
        tasks=("question_answer",),
    )
    handle_impossible_answer: bool = word_field(
        False,
        FLAG,
        "that the context has no answer is an answer too, without characters",
        tasks=("question_answer",),
    )
    align_to_words: bool = word_field(
        True,
        FLAG,
        "answers begin and end with whole words",
        tasks=("question_answer",),
    )
    max_seq_len: int | None = whole_field(
        None,
        1,
        MAX_INT32,
        "longest [window](../tasks/question_answering.md#long-contexts) of a context with its question, in tokens, at"
        " most the longest sequence; default: 384, or the longest sequence",
        tasks=("question_answer",),
    )
    doc_stride: int | None = whole_field(
        None,
        0,
        MAX_INT32,
        "tokens of a long context that two windows share; default: 128, or half of `max_seq_len`",
        tasks=("question_answer",),
    )
    labels: tuple[str, ...] | None = parameter_field(
        None,
        "labels of the spans that `extract` finds, in the words of the model's authors, such as `person`. Needed with"
        " `extract`, or `schema`",
        allowed_text=LABELS_TEXT,
        max_items=MAX_LABELS,
        pattern="(?s).+",
        read=read_labels,
        tasks=("extract",),
    )
    schema: Schema | None = parameter_field(
        None,
        "what `extract` finds with a model of GLiNER2: [entities, classes, structures and"
        " relations](../tasks/extraction.md#schemas), in place of `labels`",
        allowed_text=SCHEMA_TEXT,
        read=read_schema,
        tasks=("extract",),
    )
    threshold: float = real_field(
        DEFAULT_THRESHOLD,
        0,
        1,
        "spans have scores above this",
        tasks=("extract",),
    )
    flat_ner: bool = word_field(
        True,
        FLAG,
        "no two spans share a word; with false a span may contain another one",
        tasks=("extract",),
    )
    multi_label: bool = word_field(
        False, FLAG, "a span may have several labels", tasks=("extract",)
    )
    operation: Operation = word_field(
        "infer",
        get_args(Operation),
        "`tokenize` answers the tokens of texts, and `detokenize` the texts of token ids,"
        " [without running the model](../tasks/tokenizer.md). `adapters` answers the model's"
        " [adapters](../concepts/adapters.md#names-of-adapters)",
    )
    add_special_tokens: bool | None = word_field(
        None,
        FLAG,
        "whether `tokenize` adds special tokens; default: true for texts, false for `messages`",
    )
    skip_special_tokens: bool | None = word_field(
        None, FLAG, "whether `detokenize` leaves special tokens out; default: true"
    )
    # the reader of messages checks it: `wire.generate`
    chat_template_kwargs: str | None = parameter_field(
        None,
        "variables of the chat template beside `messages`, such as `enable_thinking`; only with `messages`. A variable"
        " that the template does not read is refused, or ignored if `ignore_unread` is true. `chat_template` is the"
        " name of one of the checkpoint's templates; default: `default`",
        allowed_text="a JSON object, or a text that holds one",
        tasks=("generate",),
    )
    request_priority: int = whole_field(
        0, 0, MAX_PRIORITY, "larger runs sooner. The server reserves the name `priority`"
    )
    deadline_ms: float | None = real_field(
        None,
        math.nextafter(0, 1),
        sys.float_info.max,
        "latest time of the answer, in milliseconds after the request arrives. A request that cannot meet it is"
        " refused as soon as that is known",
        allowed_text="numbers above 0",
    )
    tenant: str = parameter_field(
        "",
        "name of the client for whom the request is. Each has an equal share of the model, however many requests it"
        " sends; requests without a name share one part",
        pattern=rf"(?s).{{0,{MAX_TENANT_CHARACTERS}}}",
        allowed_text=f"a string of at most {MAX_TENANT_CHARACTERS} characters",
    )
    cache_salt: str = parameter_field(
        "",
        "requests share entries of the [prefix cache](../tasks/generation.md#memory) and of the response cache only"
        " with requests of the same salt, as with vLLM. Requests without one share with each other",
        pattern=rf"(?s).{{0,{MAX_SALT_CHARACTERS}}}",
        allowed_text=f"a string of at most {MAX_SALT_CHARACTERS} characters",
    )
    adapter: str = parameter_field(
        "",
        "name of the [adapter](../concepts/adapters.md) that changes the model for this request. Requests of other"
        " adapters and of none share its batches",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        allowed_text="the name of an adapter of the model",
    )
    probe: bool = word_field(
        False,
        FLAG,
        "asks whether this replica takes work, for [health checks](../operating/scaling.md#health-checks): one row of"
        " at most 256 tokens, answered by the model and not by a cache, also when the queue is full. Refused while the"
        " replica drains",
    )

    @classmethod
    def read(
        cls,
        given: Mapping[str, object],
        task: Task,
        *,
        width: int | None = None,
        further: Mapping[Task, int] = NO_FURTHER,
    ) -> "RowParameters":
        """Return the parameters in a JSON object, whose other names are ignored.

        Args:
            width: width of the model's output; 0 and None have none.
            further: widths of further outputs by task.

        Raises:
            RequestError: a parameter is for another task, or its value is not allowed.
        """
        values = {name: value for name, value in given.items() if name in ROW_PARAMETERS}
        for name, value in values.items():
            parameter = ROW_PARAMETERS[name]
            of_further = [each for each in further if reads(name, each)]
            if task not in parameter.tasks and not of_further:
                raise RequestError(
                    f"the parameter {name} is for the task {' or '.join(parameter.tasks)};"
                    f" this model has the task {task}"
                )
            most = width if task in parameter.tasks else further[of_further[0]]
            if most and name in _UP_TO_WIDTH:
                parameter = parameter.up_to(most)
            if value is None:
                refuse(name, value, parameter.allowed)
            if parameter.read is not None:
                values[name] = parameter.read(value)
            parameter.check(name, values[name])
        # most requests have none
        return cls(**values) if values else DEFAULT_PARAMETERS  # type: ignore[arg-type]  # every value is checked

    @property
    def prefix(self) -> TextPrefix:
        return TextPrefix(self.prompt_name, self.input_type, self.instruction, self.prompt)

    @property
    def is_cut(self) -> bool:
        return self.truncate or self.truncate_prompt_tokens is not None

    @property
    def reads_parts(self) -> bool:
        """Whether texts are embedded in parts: spans or windows."""
        return self.spans is not None or self.windows or self.window_overlap is not None

    def options(
        self,
        deadline_seconds: float | None,
        *,
        normalize: bool = False,
        outputs: tuple[Task, ...] = (),
        generation: GenerationOptions | None = None,
        streams: bool = False,
    ) -> RequestOptions:
        """Return the options of the request.

        Args:
            deadline_seconds: the earliest of its deadlines, in seconds from now; None is none.
        """
        return RequestOptions(
            normalize=normalize,
            outputs=outputs,
            priority=MAX_PRIORITY if self.probe else self.request_priority,
            deadline_seconds=deadline_seconds,
            generation=generation,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            streams=streams,
            probe=self.probe,
            adapter=self.adapter,
        )


def reads(name: str, further: Task) -> bool:
    """Return whether a further output of this task reads a parameter.

    Parameters of texts are for the model's own task.
    """
    return name in _OF_ANSWERS and further in ROW_PARAMETERS[name].tasks


DEFAULT_PARAMETERS = RowParameters()
ROW_PARAMETERS = parameters_of(RowParameters)
# Parameters of every task; `skip_special_tokens` is also an option of generation.
COMMON_PARAMETERS = MappingProxyType(
    {
        name: ROW_PARAMETERS[name]
        for name in (
            "operation",
            "add_special_tokens",
            "request_priority",
            "deadline_ms",
            "tenant",
            "cache_salt",
            "adapter",
            "probe",
        )
    }
)
