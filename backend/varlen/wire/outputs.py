"""The outputs of tasks of one step: their tensors, and the arrays of a response.

A response holds the outputs that the request names. All of them are made of the engine's fp32 outputs by sender
threads. A model may have the outputs of further tasks, each in the form of its own task.

Scores of pairs by late interaction (MaxSim) are computed here. A pair is no sequence of the model: its query and its
document are two. Equal texts of a request run once. Source: Khattab, Zaharia 2020, arXiv:2004.12832.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.intake.checks import Intake
from varlen.intake.found import Found
from varlen.intake.long_texts import LongTexts
from varlen.intake.tokenization import Text
from varlen.models.checkpoint.family import Labels
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Float32Array, Output, Request, TokenizationTask, split_outputs
from varlen.request.row_parameters import NO_PREFIX, RowParameters, TextPrefix
from varlen.request.vectors import (
    DEFAULT_TOP_K,
    ScoreFunction,
    VectorForm,
    largest_top_k,
    mask_tensors,
    scores_of,
    sparse_tensors,
    sparse_vector,
)
from varlen.tasks import (
    TASKS,
    Task,
    TaskFacts,
    TensorSpec,
    Width,
    further_names,
    further_specs,
    output_specs,
)
from varlen.wire.entities import EntityReader

# Outputs of pairs; every task has the second.
SCORES, LENGTHS = "scores", "num_tokens"


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutputs:
    """What a model answers.

    Attributes:
        width: features of a vector or a token; labels of a classifier; terms of a sparse vector; most tokens that
            fill a mask; 0 where tokens are the answer.
        normalize: whether embeddings are normalized, unless a request says otherwise.
        rounds: whether embeddings have whole numbers, before they are normalized.
        max_active_dims: most terms of a sparse vector, unless a request says otherwise; None is all.
        term_text: returns the text of an entry of the vocabulary.
        token_text: returns the text of a token as it reads in a text.
        first_vector: tokens at the beginning of a text that have no vector.
    """

    task: Task
    width: int
    labels: Labels
    normalize: bool
    max_active_dims: int | None = None
    term_text: Callable[[int], str] = str
    token_text: Callable[[int], str] = str
    rounds: bool = False
    first_vector: int = 0
    further: tuple["ModelOutputs", ...] = ()

    @classmethod
    def of(cls, task: Task, checkpoint: Checkpoint, further: Sequence[Task] = ()) -> "ModelOutputs":
        widths: Mapping[Width, int] = {
            "embedding": checkpoint.vector_size(task),
            "hidden": checkpoint.hidden_size,
            "labels": checkpoint.num_labels,
            "vocabulary": checkpoint.vocab_size,
            "top_k": largest_top_k(checkpoint.vocab_size),
        }
        width = TASKS[task].width
        return cls(
            task,
            0 if width is None else widths[width],
            checkpoint.labels,
            checkpoint.normalize,
            checkpoint.splade.max_active_dims,
            rounds=checkpoint.rounds,
            first_vector=int(task == "token_embed" and checkpoint.m3 is not None),
            further=tuple(cls.of(each, checkpoint) for each in further),
        )

    def with_texts(
        self, term_text: Callable[[int], str], token_text: Callable[[int], str]
    ) -> "ModelOutputs":
        further = tuple(each.with_texts(term_text, token_text) for each in self.further)
        return replace(self, term_text=term_text, token_text=token_text, further=further)

    @property
    def facts(self) -> TaskFacts:
        return TASKS[self.task]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        others = chain.from_iterable(further_specs(each.task, each.width) for each in self.further)
        return (*output_specs(self.task, self.width), *others)

    def first_of(self, requested: Collection[str]) -> str:
        """Return the first of the requested outputs, in the order of `specs`."""
        return next(spec.name for spec in self.specs if spec.name in requested)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a request asks of its answer.

    Attributes:
        function: makes `scores` of logits.
        max_active_dims: most terms of a sparse vector; None is all.
        entities: reader of the entities of texts; None leaves them empty.
        found: rows of a task that finds parts of texts.
        long: texts that are embedded in parts.
        further: options of the outputs of further tasks, by names that they have alone.
    """

    names: frozenset[str]
    vectors: VectorForm = field(default_factory=VectorForm)
    function: ScoreFunction = "none"
    max_active_dims: int | None = None
    top_k: int = DEFAULT_TOP_K
    entities: EntityReader | None = None
    found: Found | None = None
    long: LongTexts | None = None
    further: Mapping[Task, "AnswerOptions"] = field(default_factory=dict)

    @classmethod
    def of(
        cls, given: RowParameters, outputs: ModelOutputs, requested: Collection[str]
    ) -> "AnswerOptions":
        """Return the answer that parameters and the names of outputs ask for.

        Raises:
            RequestError: the model has no vectors of this form.
        """
        normalize = outputs.normalize if given.normalize is None else given.normalize
        vectors = VectorForm(given.dimensions, normalize, given.output_dtype, outputs.rounds)
        if outputs.task == "embed":
            vectors.check(outputs.width)
        return cls(
            frozenset(requested),
            vectors,
            outputs.labels.function if given.activation == "auto" else given.activation,
            given.max_active_dims or outputs.max_active_dims,
            given.top_k or min(DEFAULT_TOP_K, outputs.width),
            further={
                each.task: cls.of(given, each, names)
                for each in outputs.further
                if (names := own_names(each.task, requested))
            },
        )

    def tasks(self, outputs: ModelOutputs) -> tuple[Task, ...]:
        """Return the tasks whose outputs the request asks for; none is the model's own."""
        if not self.further:
            return ()
        own = {spec.name for spec in output_specs(outputs.task)} - {LENGTHS}
        has_own = not own.isdisjoint(self.names)
        return (*([outputs.task] if has_own else []), *self.further)


@dataclass(frozen=True, slots=True)
class ArrayAnswer:
    """Makes the response to a request, which holds all rows.

    Attributes:
        num_tokens: length of each row, in tokens.
        num_vectors: rows of the answer to each row, of tasks with an output for each token.
        tokens: UTF-8 texts of the tokens of each row, if the request asks for them.
    """

    outputs: ModelOutputs
    options: AnswerOptions
    num_tokens: Sequence[int]
    num_vectors: Sequence[int]
    tokens: Sequence[Sequence[bytes]] = ()
    streams: bool = field(default=False, init=False)

    @classmethod
    def to(cls, request: Request, outputs: ModelOutputs, options: AnswerOptions) -> "ArrayAnswer":
        prompts, found = request.prompts, options.found or options.long
        num_tokens = [prompt.num_tokens for prompt in prompts]
        return cls(
            outputs,
            options,
            num_tokens if found is None else found.count(num_tokens),
            [prompt.num_vectors - outputs.first_vector for prompt in prompts],
            [
                [outputs.term_text(token_id).encode() for token_id in prompt.token_ids.tolist()]
                for prompt in prompts
                if "tokens" in options.names and outputs.facts.has_token_rows
            ],
        )

    @property
    def num_bytes(self) -> int:
        """Size of the tensors whose shapes follow from the lengths of the rows."""
        rows, width = len(self.num_tokens), self.outputs.width
        vectors = rows if self.options.long is None else self.options.long.num_vectors
        if self.outputs.facts.finds_rows:
            # the others depend on what the model finds, and are checked before they are sent
            return 4 * rows if LENGTHS in self._names else 0
        longest = max(self.num_vectors) if self.outputs.facts.has_token_rows else 1
        numbers = 4 * rows * longest * width
        sizes = {
            "sentence_embedding": vectors * self.options.vectors.num_bytes(width),
            "num_vectors": 4 * rows,
            "labels": rows * sum(4 + len(name.encode()) for name in self.outputs.labels.names),
            "tokens": 4 * rows * longest + sum(len(text) for row in self.tokens for text in row),
            "num_tokens": 4 * rows,
            "entities": self._num_entity_bytes(),
        }
        return sum(sizes.get(name, numbers) for name in self._names)

    def tensors(self, outputs: Sequence[tuple[int, Output]]) -> Mapping[str, npt.NDArray[Any]]:
        rows = rows_in_order(outputs)
        names = self._names
        if self.outputs.facts.finds_rows:
            tensors = self._found_tensors(rows) | {"num_tokens": column(self.num_tokens)}
            return {name: tensors[name] for name in names}
        main = self._stack(rows)
        return {name: self._tensor(name, main) for name in names}

    @property
    def _names(self) -> list[str]:
        """The outputs that the request names, in the model's order."""
        specs = output_specs(self.outputs.task)
        names = [spec.name for spec in specs if spec.name in self.options.names]
        # single texts have no scores
        return [name for name in names if self.outputs.task != "token_embed" or name != SCORES]

    def _tensor(self, name: str, main: Float32Array) -> npt.NDArray[Any]:
        match name:
            case "sentence_embedding":
                return self.options.vectors.of(main)
            case "scores":
                return self._scores(main)
            case "labels" | "tokens" | "entities":
                return self._texts(name, main)
            case "num_tokens" | "num_vectors":
                return column(self.num_tokens if name == "num_tokens" else self.num_vectors)
        return main

    def _texts(self, name: str, main: Float32Array) -> npt.NDArray[np.object_]:
        if name == "entities":
            return self._entities(main)
        if name == "tokens":
            return self._token_texts(longest=main.shape[1])
        names = [label.encode() for label in self.outputs.labels.names]
        return np.array([names] * len(main), dtype=np.object_)

    def _num_entity_bytes(self) -> int:
        reader = self.options.entities
        if reader is None:
            return 4 * len(self.num_tokens)
        longest = max(len(name.encode()) for name in self.outputs.labels.names)
        return sum(
            reader.num_bytes(row, tokens, longest) for row, tokens in enumerate(self.num_tokens)
        )

    def _entities(self, logits: Float32Array) -> npt.NDArray[np.object_]:
        found = np.full((len(logits), 1), b"", dtype=np.object_)
        reader = self.options.entities
        if reader is not None:
            scores = scores_of(logits, "softmax")
            for row, tokens in enumerate(self.num_tokens):
                found[row, 0] = reader.json_of(row, scores[row, :tokens], self.outputs.labels.names)
        return found

    def _token_texts(self, *, longest: int) -> npt.NDArray[np.object_]:
        """Return the texts of the tokens, `[rows, longest]`, padded with empty ones."""
        texts = np.full((len(self.tokens), longest), b"", dtype=np.object_)
        for filled, row in zip(texts, self.tokens, strict=True):
            filled[: len(row)] = row
        return texts

    def _found_tensors(self, rows: Sequence[Float32Array]) -> dict[str, npt.NDArray[Any]]:
        outputs, options = self.outputs, self.options
        if options.found is not None:
            return dict(options.found.tensors(rows))
        if outputs.task == "sparse_embed":
            vectors = [sparse_vector(row, options.max_active_dims) for row in rows]
            return sparse_tensors(vectors, outputs.term_text if "terms" in options.names else None)
        text = outputs.token_text if "tokens" in options.names else None
        return mask_tensors(rows, options.top_k, text)

    def _scores(self, logits: Float32Array) -> Float32Array:
        scores = scores_of(logits, self.options.function)
        if self.outputs.facts.has_token_rows and scores is not logits:
            # padding has no scores
            for row, tokens in zip(scores, self.num_tokens, strict=True):
                row[tokens:] = 0
        return scores

    def _stack(self, rows: Sequence[Float32Array]) -> Float32Array:
        """Return a new array of all rows: `[rows, width]` or `[rows, longest, width]`.

        Rows of tasks with an output per token are padded with zeros to the longest.
        """
        if self.options.long is not None:
            return self.options.long.vectors(rows)
        if not self.outputs.facts.has_token_rows:
            return np.array(rows)
        longest = max(len(row) for row in rows)
        filled = np.zeros((len(rows), longest, rows[0].shape[1]), dtype=np.float32)
        for index, row in enumerate(rows):
            filled[index, : len(row)] = row
        return filled


@dataclass(frozen=True, slots=True)
class SeveralAnswers:
    """Makes the response to a request for the outputs of further tasks.

    Attributes:
        answers: makers of the outputs of each task, and the names of these in the response, in the order of the engine.
        lengths: length of each row, in tokens; None if the request does not ask for it.
    """

    answers: Sequence[tuple[ArrayAnswer, Mapping[str, str]]]
    lengths: Sequence[int] | None
    streams: bool = field(default=False, init=False)

    @classmethod
    def to(
        cls, request: Request, outputs: ModelOutputs, options: AnswerOptions
    ) -> "SeveralAnswers":
        answers: list[tuple[ArrayAnswer, Mapping[str, str]]] = []
        for task in request.options.outputs:
            if task == outputs.task:
                own = replace(options, names=options.names - {LENGTHS})
                answers.append((ArrayAnswer.to(request, outputs, own), {}))
                continue
            of_task = next(each for each in outputs.further if each.task == task)
            answer = ArrayAnswer.to(request, of_task, options.further[task])
            renamed = {tensor.name: name for name, tensor in further_names(task).items()}
            answers.append((answer, renamed))
        has_lengths = LENGTHS in options.names
        lengths = [prompt.num_tokens for prompt in request.prompts] if has_lengths else None
        return cls(answers, lengths)

    @property
    def num_bytes(self) -> int:
        lengths = 4 * len(self.lengths or ())
        return lengths + sum(answer.num_bytes for answer, _ in self.answers)

    def tensors(self, outputs: Sequence[tuple[int, Output]]) -> Mapping[str, npt.NDArray[Any]]:
        rows = [(row, split_outputs(cast(Float32Array, output))) for row, output in outputs]
        found: dict[str, npt.NDArray[Any]] = {}
        for number, (answer, names) in enumerate(self.answers):
            of_task = [(row, parts[number]) for row, parts in rows]
            for name, tensor in answer.tensors(of_task).items():
                found[names.get(name, name)] = tensor
        if self.lengths is not None:
            found[LENGTHS] = column(self.lengths)
        return found


def own_names(task: Task, requested: Collection[str]) -> frozenset[str]:
    """Return the outputs of a further task that a request names.

    The names are the ones of a model that has no other alone.
    """
    return frozenset(
        tensor.name for name, tensor in further_names(task).items() if name in requested
    )


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """Pairs of a request, as the texts that pass the model.

    Attributes:
        rows: numbers of query and document of each row.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    rows: Sequence[tuple[int, int]]
    names: frozenset[str]

    @classmethod
    def of(
        cls, pairs: Sequence[Text], requested: Collection[str], given: RowParameters
    ) -> "ScoredPairs":
        """Return the texts of pairs.

        Raises:
            RequestError: the request names no scores, or a prompt: each side has its own.
        """
        if SCORES not in requested:
            raise RequestError(
                f"the request has text_pair, whose answer is {SCORES}; name that output, or send text alone"
            )
        if given.prefix.given:
            raise RequestError(
                f"the request has {given.prefix.given[0]} and text_pair; text is a query and text_pair a document:"
                " leave it out"
            )
        sides = [
            dict.fromkeys(cast("tuple[str, str]", pair)[at] for pair in pairs) for at in (0, 1)
        ]
        queries, documents = ({text: at for at, text in enumerate(side)} for side in sides)
        rows = [
            (queries[query], documents[document])
            for query, document in cast("Sequence[tuple[str, str]]", pairs)
        ]
        return cls(tuple(queries), tuple(documents), rows, frozenset(requested))

    def steps(self, given: RowParameters, intake: Intake) -> tuple[TokenizationTask, ...]:
        steps: list[TokenizationTask] = []
        for name, texts in (("query", self.queries), ("document", self.documents)):
            # a model without roles reads both sides alike
            prefix = TextPrefix(name) if name in intake.roles.named else NO_PREFIX
            steps += intake.text_steps(
                texts,
                truncate=given.is_cut,
                side=given.truncation_side,
                max_tokens=given.truncate_prompt_tokens,
                prefix=prefix,
            )
        return tuple(steps)


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """Makes the response to a request for scores of pairs."""

    pairs: ScoredPairs
    num_tokens: Sequence[int]
    streams: bool = field(default=False, init=False)

    @classmethod
    def to(cls, request: Request, pairs: ScoredPairs) -> "ScoreAnswer":
        return cls(pairs, [prompt.num_tokens for prompt in request.prompts])

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.pairs.rows) * len(self.pairs.names & {SCORES, LENGTHS})

    def tensors(self, outputs: Sequence[tuple[int, Output]]) -> Mapping[str, npt.NDArray[Any]]:
        vectors = rows_in_order(outputs)
        first = len(self.pairs.queries)
        found: dict[str, npt.NDArray[Any]] = {
            SCORES: column(
                [
                    max_sim(vectors[query], vectors[first + document])
                    for query, document in self.pairs.rows
                ],
                np.float32,
            )
        }
        if LENGTHS in self.pairs.names:
            lengths = [
                self.num_tokens[query] + self.num_tokens[first + document]
                for query, document in self.pairs.rows
            ]
            found[LENGTHS] = column(lengths)
        return found


def rows_in_order(outputs: Sequence[tuple[int, Output]]) -> list[Float32Array]:
    """Return the outputs of rows of any order, in the order of the rows."""
    return [cast(Float32Array, output) for _, output in sorted(outputs, key=lambda each: each[0])]


def column(numbers: Sequence[float], dtype: npt.DTypeLike = np.int32) -> npt.NDArray[Any]:
    """Return the number of each row, `[rows, 1]`."""
    return np.array(numbers, dtype)[:, None]


def max_sim(query: Float32Array, document: Float32Array) -> float:
    """Return MaxSim: the sum of the largest product of each vector of the query.

    Args:
        query, document: `[vectors, features]`; 0 if one has no vector.
    """
    if not len(query) or not len(document):
        return 0.0
    return float((query @ document.T).max(axis=1).sum(dtype=np.float64))
