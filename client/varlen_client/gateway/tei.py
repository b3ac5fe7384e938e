"""Text Embeddings Inference: `/embed`, `/embed_sparse`, `/embed_all`, `/similarity`, `/predict` and `/`.

Options stand in the body or in its object `parameters`, as clients of Hugging Face's inference endpoints send them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import (
    MAX_INPUTS,
    Fields,
    ListOf,
    RequestBody,
    TextFields,
    Texts,
    check_repeated,
    check_rows,
    checked,
    given_options,
    rows_of,
)
from varlen_client.gateway.json_io import Blocks, Rows, in_thread, json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.ranks import RerankBody, cosines, rerank
from varlen_client.gateway.unserved_fields import LABELS, PROMPTS, QUESTIONS
from varlen_client.tasks.answers import RowAnswers
from varlen_client.tasks.extraction import QUESTION_ANSWER
from varlen_client.tasks.labels import (
    DEFAULT_TEMPLATE,
    ENTAILMENT,
    PREDICT,
    hypotheses,
    label_scores,
    parse_labels,
)
from varlen_client.tasks.row_task import RowTask
from varlen_client.tasks.tokens import (
    HIDDEN,
    PREDICT_ENTITIES,
    TOKEN_EMBED,
    AggregationStrategy,
    EntityOptions,
)
from varlen_client.tasks.vectors import EMBED, SPARSE_EMBED
from varlen_client.wire import Floats, ModelInfo, Pairs

_Body = TypeVar("_Body", bound="_InputsBody")
_Row: TypeAlias = ListOf[StrictStr]

# Numbers in an answer of `/embed_all`: 256 MiB in fp32.
MAX_TOKEN_FEATURES = 2**26

# Width of vectors where the model's config leaves it to the checkpoint.
_LARGEST_WIDTH = 1 << 14
# Numbers of an answer that are written as JSON in one piece.
_NUMBERS_AT_ONCE = 1 << 14
# Options of `/predict` that neither labels of the request nor entities have.
_OF_WHOLE_TEXTS = ("raw_scores", "top_k", "function_to_apply")
# The task of `/embed_all` by the output of the model.
_TOKEN_TASKS: Mapping[str, RowTask[list[Floats]]] = {
    "token_embeddings": TOKEN_EMBED,
    "last_hidden_state": HIDDEN,
}


def _read_json(answers: RowAnswers) -> list[bytes]:
    found: list[bytes] = answers.joined(answers.outputs[0])[:, 0].tolist()
    return found


# The server's JSON has the form of the pipeline.
_ENTITIES: RowTask[list[bytes]] = RowTask(
    PREDICT_ENTITIES.method, EntityOptions, PREDICT_ENTITIES.outputs, _read_json
)


class HubOptions(Fields):
    """Options of Hugging Face's inference endpoints; none of them changes an answer here."""

    noun = "options"

    use_cache: bool = True
    use_gpu: bool = True
    wait_for_model: bool = False


class _InputsBody(RequestBody):
    """What all bodies with `inputs` have.

    Subclasses have `parameters`, whose fields the body may have itself.
    """

    options: HubOptions = HubOptions()


class PromptFields(TextFields):
    """Options of `/embed_sparse` and `/embed_all`."""

    unserved = PROMPTS
    is_cut_by_default = True

    prompt_name: StrictStr | None = None


class SparseBody(_InputsBody, PromptFields):
    """A request to `/embed_sparse` or `/embed_all`."""

    ids_field = "inputs"

    inputs: Texts
    parameters: PromptFields = PromptFields()


class EmbedFields(PromptFields):
    """Options of `/embed`."""

    normalize: bool = True
    dimensions: int | None = Field(default=None, ge=1)


class EmbedBody(_InputsBody, EmbedFields):
    """A request to `/embed`."""

    ids_field = "inputs"

    inputs: Texts
    parameters: EmbedFields = EmbedFields()


class Sentences(Fields):
    """Sentences that are compared with one."""

    noun = "sentences"

    source_sentence: StrictStr
    sentences: ListOf[StrictStr] = Field(min_length=1, max_length=MAX_INPUTS - 1)


class SimilarityBody(_InputsBody, PromptFields):
    """A request to `/similarity`."""

    inputs: Sentences
    parameters: PromptFields = PromptFields()


class AnyBody(RequestBody):
    """A request to `/`, whose other fields are checked in the form that they have."""

    model_config = ConfigDict(extra="allow")

    ids_field = "inputs"


class PredictFields(TextFields):
    """Options of `/predict`; `top_k` and `function_to_apply` have the names of pipelines of transformers."""

    unserved = LABELS
    is_cut_by_default = True

    raw_scores: bool = False
    top_k: int | None = Field(default=None, ge=1)
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    candidate_labels: StrictStr | ListOf[StrictStr] | None = None
    """Labels of zero-shot classification, by a model of natural language inference; a text has commas between them."""
    hypothesis_template: StrictStr | None = None
    multi_label: bool | None = None
    aggregation_strategy: AggregationStrategy | None = None
    """For a model that labels tokens; by default `simple`."""


class PredictBody(_InputsBody, PredictFields):
    """A request to `/predict`: a text, a pair, or a batch of either."""

    inputs: StrictStr | _Row | ListOf[_Row]
    parameters: PredictFields = PredictFields()

    def activation(self) -> str:
        """Return the activation of logits.

        Raises:
            InvalidRequest: `raw_scores` and `function_to_apply` are both there.
        """
        if self.function_to_apply is None:
            return "none" if self.raw_scores else "auto"
        if self.raw_scores:
            raise InvalidRequest(
                "the request has raw_scores and function_to_apply; send one of them"
            )
        return self.function_to_apply


class Question(Fields):
    """A question and the text that may hold its answer."""

    noun = "inputs"

    question: StrictStr
    context: StrictStr


class QuestionFields(Fields):
    """Options of questions, in the names of the pipeline of transformers."""

    unserved = QUESTIONS

    top_k: int | None = Field(default=None, ge=1)
    max_answer_len: int | None = Field(default=None, ge=1)
    handle_impossible_answer: bool | None = None
    align_to_words: bool | None = None
    max_seq_len: int | None = Field(default=None, ge=1)
    doc_stride: int | None = Field(default=None, ge=0)
    max_question_len: int | None = None
    """Ignored, as the pipeline ignores it with a fast tokenizer."""


class QuestionBody(_InputsBody, QuestionFields):
    """A request to `/` for a model that answers questions: one question, or a batch."""

    inputs: Question | ListOf[Question]
    parameters: QuestionFields = QuestionFields()


async def embed(gateway: Gateway, body: EmbedBody) -> Response:
    """Embed texts or token ids; the answer is a list of vectors."""
    body = _merged(body)
    options = given_options(
        normalize=body.normalize, dimensions=body.dimensions, prompt_name=body.prompt_name
    )
    rows = rows_of(body.inputs, "inputs")
    _, vectors, _ = await gateway.answer(body.model, EMBED, rows, text_fields=body, **options)
    return json_response(Rows(vector.tolist() for vector in vectors))


async def embed_sparse(gateway: Gateway, body: SparseBody) -> Response:
    """Embed texts or token ids sparsely: their terms and weights, the largest first."""
    body = _merged(body)
    options = given_options(prompt_name=body.prompt_name)
    rows = rows_of(body.inputs, "inputs")
    _, vectors, _ = await gateway.answer(
        body.model, SPARSE_EMBED, rows, text_fields=body, **options
    )
    return json_response(
        Rows(
            [
                {"index": index, "value": value}
                for index, value in zip(each.indices.tolist(), each.values.tolist(), strict=True)
            ]
            for each in vectors
        )
    )


async def embed_all(gateway: Gateway, body: SparseBody) -> Response:
    """Embed each token of texts or token ids: a list of vectors for each row."""
    body = _merged(body)
    rows = rows_of(body.inputs, "inputs")
    info = await gateway.info(body.model)
    task, width = _token_task(info)
    check_token_features("inputs", rows, width)
    options = given_options(prompt_name=body.prompt_name)
    if task is HIDDEN and options:
        raise InvalidRequest(
            f"model {info.name!r} gives hidden states, whose texts have no prompt; leave prompt_name out"
        )
    _, arrays, _ = await gateway.answer(body.model, task, rows, text_fields=body, **options)
    return json_response(Rows(Blocks(_blocks(array)) for array in arrays))


async def similarity(gateway: Gateway, body: SimilarityBody) -> Response:
    """Compare sentences with one; the answer is a list of cosine similarities."""
    body = _merged(body)
    sentences = [body.inputs.source_sentence, *body.inputs.sentences]
    options = given_options(prompt_name=body.prompt_name)
    _, vectors, _ = await gateway.answer(
        body.model, EMBED, sentences, text_fields=body, normalize=True, **options
    )
    return json_response(cosines(vectors[1:], vectors[0]).tolist())


async def predict(gateway: Gateway, body: PredictBody) -> Response:
    """Classify texts, or find their entities; labels come with their scores, the best first."""
    body = _merged(body)
    if body.candidate_labels is not None:
        return await _zero_shot(gateway, body, body.candidate_labels)
    wrong = _first_given(body, ("hypothesis_template", "multi_label"))
    if wrong is not None:
        raise InvalidRequest(f"the request has {wrong} and no candidate_labels; send both")
    info = await gateway.info(body.model)
    if info.known_task == "token_classify":
        return await _entities(gateway, body)
    if body.aggregation_strategy is not None:
        raise InvalidRequest(
            f"model {info.name!r} labels whole texts, which have no entities; leave aggregation_strategy out"
        )
    rows, is_batch = _texts_or_pairs(body.inputs)
    options = given_options(top_k=body.top_k)
    _, found, _ = await gateway.answer(
        body.model, PREDICT, rows, text_fields=body, activation=body.activation(), **options
    )
    labels = ([{"score": each.score, "label": each.label} for each in row] for row in found)
    return json_response(Rows(labels) if is_batch else next(labels))


async def _zero_shot(gateway: Gateway, body: PredictBody, candidates: str | list[str]) -> Response:
    """Answer with the candidate labels in the form of Hugging Face's inference endpoints."""
    wrong = _first_given(body, (*_OF_WHOLE_TEXTS, "aggregation_strategy"))
    if wrong is not None:
        raise InvalidRequest(f"the request has {wrong} and candidate_labels; send one of them")
    labels = parse_labels(candidates)
    texts, is_batch = _single_texts(body, "candidate_labels")
    count = len(texts) * len(labels)
    if count > MAX_INPUTS:
        raise InvalidRequest(
            f"the request has {len(texts)} texts and {len(labels)} labels; allowed: {MAX_INPUTS} pairs of them"
        )
    check_repeated("inputs", max(texts, key=len), count)
    check_repeated("candidate_labels", max(labels, key=len), count)
    template = body.hypothesis_template
    pairs = hypotheses(texts, labels, DEFAULT_TEMPLATE if template is None else template)
    _, found, _ = await gateway.answer(body.model, ENTAILMENT, pairs, text_fields=body)
    rows = label_scores(found, labels, multi_label=bool(body.multi_label))
    answers = (
        {
            "sequence": text,
            "labels": [each.label for each in row],
            "scores": [each.score for each in row],
        }
        for text, row in zip(texts, rows, strict=True)
    )
    return json_response(Rows(answers) if is_batch else next(answers))


async def _entities(gateway: Gateway, body: PredictBody) -> Response:
    """Answer with the entities of texts in the form of the pipeline of transformers."""
    wrong = _first_given(body, _OF_WHOLE_TEXTS)
    if wrong is not None:
        raise InvalidRequest(
            f"the request has {wrong}, which is for labels of whole texts; this model finds entities: leave it out"
        )
    texts, is_batch = _single_texts(body, "aggregation_strategy")
    strategy = body.aggregation_strategy or "simple"
    _, found, _ = await gateway.answer(
        body.model, _ENTITIES, texts, text_fields=body, aggregation_strategy=strategy
    )
    return json_response(Rows(found) if is_batch else found[0])


def _first_given(body: PredictBody, names: Sequence[str]) -> str | None:
    """Return the first of these options that the request has."""
    return next((name for name in names if getattr(body, name)), None)


async def _answers(gateway: Gateway, body: QuestionBody) -> Response:
    """Answer questions in the form of the pipeline of transformers.

    The only answer to a question is no list.
    """
    body = _merged(body)
    questions = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    check_rows("inputs", questions)
    options = given_options(
        **{
            name: getattr(body, name)
            for name in QuestionFields.model_fields
            if name != "max_question_len"
        }
    )
    pairs = [(each.question, each.context) for each in questions]
    _, found, _ = await gateway.answer(
        body.model, QUESTION_ANSWER, pairs, text_fields=None, **options
    )
    rows = [[asdict(each) for each in row] for row in found]
    answers = [row[0] if len(row) == 1 else row for row in rows]
    return json_response(answers if isinstance(body.inputs, list) else answers[0])


def _single_texts(body: PredictBody, name: str) -> tuple[list[str], bool]:
    """Return the texts of a request, and whether they are a list.

    Raises:
        InvalidRequest: a row is a pair, or there are none or too many rows.
    """
    if isinstance(body.inputs, str):
        return [body.inputs], False
    texts = [row if isinstance(row, str) else " ".join(row[:1]) for row in body.inputs]
    if any(not isinstance(row, str) and len(row) != 1 for row in body.inputs):
        raise InvalidRequest(f"inputs has pairs of texts, and {name} is for single texts")
    check_rows("inputs", texts)
    return texts, True


async def root(gateway: Gateway, body: AnyBody) -> Response:
    """Do what the model is for: embed or classify texts, or answer questions.

    A body of `/similarity` or `/rerank` is answered as there.
    """
    given = {**(body.model_extra or {}), "model": body.model}
    info = await gateway.info(body.model)
    inputs = given.get("inputs")
    form: type[RequestBody] = EmbedBody
    answer: Any = embed
    if isinstance(inputs, dict) and "source_sentence" in inputs:
        form, answer = SimilarityBody, similarity
    elif "query" in given:
        form, answer = RerankBody, rerank
    elif info.labels_texts or info.known_task == "token_classify":
        form, answer = PredictBody, predict
    elif info.known_task == "question_answer":
        form, answer = QuestionBody, _answers
    elif info.known_task == "sparse_embed":
        form, answer = SparseBody, embed_sparse
    found = await in_thread(partial(checked, form, given, gateway.ignore_fields))
    response: Response = await answer(gateway, found)
    return response


def _merged(body: _Body) -> _Body:
    """Return the body with the options of its `parameters`.

    Raises:
        InvalidRequest: an option stands in both.
    """
    parameters: Fields = body.parameters  # type: ignore[attr-defined]
    names = parameters.model_fields_set
    twice = sorted(names & body.model_fields_set)
    if twice:
        raise InvalidRequest(
            f"{twice[0]} is in the body and in its parameters; send it in one of them"
        )
    return body.model_copy(update={name: getattr(parameters, name) for name in names})


def _token_task(info: ModelInfo) -> tuple[RowTask[list[Floats]], int]:
    """Return the task of `/embed_all`, and the width of its vectors."""
    for output, task in _TOKEN_TASKS.items():
        if output in info.outputs:
            return task, info.outputs[output][-1]
    found = "no outputs" if not info.outputs else ", ".join(info.outputs)
    raise InvalidRequest(
        f"model {info.name!r} has {found}; embed_all needs one of {', '.join(_TOKEN_TASKS)},"
        " of the tasks token_embed and hidden"
    )


def check_token_features(name: str, rows: list[str] | list[list[int]], width: int) -> None:
    """Raise InvalidRequest if an answer for each token might be too large.

    Args:
        width: numbers for each token; below 1 the checkpoint decides.
    """
    tokens = sum(len(row.encode(errors="replace") if isinstance(row, str) else row) for row in rows)
    if width < 1:
        width = _LARGEST_WIDTH
    most = MAX_TOKEN_FEATURES // width
    if tokens > most:
        raise InvalidRequest(
            f"{name} has {tokens} bytes of text or token ids; allowed: up to {most}, since each may have"
            f" {width} numbers in the answer. Send fewer rows"
        )


def _blocks(array: Floats) -> Iterator[list[list[float]]]:
    """Yield the vectors of an array, some at a time."""
    rows = max(1, _NUMBERS_AT_ONCE // array.shape[1])
    for begin in range(0, len(array), rows):
        yield array[begin : begin + rows].tolist()


def _texts_or_pairs(inputs: str | _Row | list[_Row]) -> tuple[list[str] | Pairs, bool]:
    """Return the texts or pairs of a request, and whether they are a batch.

    Raises:
        InvalidRequest: there are more than MAX_INPUTS rows, a row has neither one nor two texts, or only some rows
            are pairs.
    """
    if isinstance(inputs, str):
        return [inputs], False
    is_batch = bool(inputs) and isinstance(inputs[0], list)
    batch: list[_Row] = inputs if is_batch else [inputs]  # type: ignore[assignment,list-item]
    check_rows("inputs", batch)
    sizes = {len(row) for row in batch}
    if sizes == {1}:
        return [row[0] for row in batch], is_batch
    if sizes == {2}:
        return [(row[0], row[1]) for row in batch], is_batch
    raise InvalidRequest(
        f"inputs has rows of {sorted(sizes)} texts; allowed: one text in each row, or two"
    )
