"""What tokens have: vectors, labels, entities, hidden states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from typing_extensions import Unpack

from varlen_client.tasks.answers import (
    ANY_WIDTH,
    TOKEN_COUNTS,
    RowAnswers,
    RowOutput,
    read_arrays,
    text_of,
)
from varlen_client.tasks.command import (
    ALL_VALUES,
    NORMALIZE,
    Command,
    Flag,
    array_fields,
    array_lines,
    shown_score,
)
from varlen_client.tasks.labels import RerankOptions
from varlen_client.tasks.row_task import Asked, InputType, RowOptions, RowTask, method
from varlen_client.wire import Floats, Inputs, Pairs

AggregationStrategy: TypeAlias = Literal["none", "simple", "first", "average", "max"]


class TokenEmbedOptions(RowOptions, total=False):
    """Options of vectors of tokens.

    prompt_name: "query" or "document", the role of the texts, or another prompt of the checkpoint. By default they have
        no role, and its default prompt.
    """

    normalize: bool | None
    prompt_name: str | None
    input_type: InputType | None


class EntityOptions(RowOptions, total=False):
    """Options of entities.

    aggregation_strategy: how tokens become entities, as in the pipeline of transformers; by default "simple".
    """

    aggregation_strategy: AggregationStrategy | None


@dataclass(frozen=True, slots=True)
class TokenLabel:
    """A token and its best label.

    Attributes:
        token: text as the tokenizer writes it, such as "[CLS]", "##ing" or "▁London".
        label: name of its best label.
        score: score of this label.
    """

    token: str
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Entity:
    """A span of a text with a label.

    Attributes:
        label: name of the label; without aggregation also its B- or I-.
        score: probability of the label.
        word: text as the tokenizer joins its tokens.
        start, end: first character of the text in the span, and the first one behind it.
        index: number of the token, without aggregation; else None.
    """

    label: str
    score: float
    word: str
    start: int
    end: int
    index: int | None = None


def _read_token_labels(answers: RowAnswers) -> list[list[TokenLabel]]:
    """Return each row's tokens with their best labels."""
    rows = []
    names = ("scores", "labels", "tokens", "num_tokens", "logits")
    for scores, labels, tokens, counts, logits in answers.each(*names):
        best = logits.argmax(axis=2)  # [rows, tokens]
        rows += [
            [
                TokenLabel(
                    text_of(tokens[row, at]),
                    text_of(labels[row, label]),
                    float(scores[row, at, label]),
                )
                for at, label in enumerate(best[row, :count])
            ]
            for row, count in enumerate(counts[:, 0].tolist())
        ]
    return rows


def _read_entities(answers: RowAnswers) -> list[list[Entity]]:
    """Return the entities of each row."""
    return [
        [
            Entity(
                each["entity_group"] if "entity_group" in each else each["entity"],
                each["score"],
                each["word"],
                each["start"],
                each["end"],
                each.get("index"),
            )
            for each in json.loads(row)
        ]
        for row in answers.joined(answers.outputs[0])[:, 0]
    ]


TOKEN_EMBED: RowTask[list[Floats]] = RowTask(
    "token_embed",
    TokenEmbedOptions,
    (RowOutput("token_embeddings", 2),),
    read_arrays,
    row_by_row=True,
    pooling="token_embed",
    command=Command(
        task="token_embed",
        words=("embeds tokens", "vectors of tokens", "a ColBERT model"),
        summary="Print or write a vector for each token (ColBERT).",
        synonyms="colbert",
        json=ALL_VALUES,
        flags={
            "prompt_name": Flag(
                str | None, "query, document, or another prompt of the checkpoint."
            ),
            "normalize": NORMALIZE,
        },
        fields=array_fields("vectors"),
        # some tokens have no vector
        lines=array_lines("vectors"),
        written="vectors",
    ),
)
TOKEN_CLASSIFY: RowTask[list[Floats]] = RowTask(
    "token_classify",
    RowOptions,
    (RowOutput("logits", 2),),
    read_arrays,
    takes_pairs=True,
    row_by_row=True,
)
PREDICT_TOKENS: RowTask[list[list[TokenLabel]]] = RowTask(
    "predict_tokens",
    RerankOptions,
    (
        RowOutput("scores", 2),
        RowOutput("labels", dtype=np.object_),
        RowOutput("tokens", dtype=np.object_, width=ANY_WIDTH),
        TOKEN_COUNTS,
        # the best label is the one of the largest logit
        RowOutput("logits", 2),
    ),
    _read_token_labels,
    takes_pairs=True,
    command=Command(
        task="token_classify",
        words=("labels tokens", "labels of tokens", "a token classifier"),
        summary="Print the tokens of texts with their best labels.",
        details="`--output` writes the logits of all labels instead.",
        synonyms="tag",
        fields=lambda tokens: {"tokens": [asdict(each) for each in tokens]},
        lines=lambda tokens: [
            ", ".join(f"{each.token} {each.label} {shown_score(each.score)}" for each in tokens)
        ],
        written="logits",
        written_by=TOKEN_CLASSIFY,
    ),
)
PREDICT_ENTITIES: RowTask[list[list[Entity]]] = RowTask(
    "predict_entities",
    EntityOptions,
    (RowOutput("entities", dtype=np.object_),),
    _read_entities,
)
HIDDEN: RowTask[list[Floats]] = replace(
    TOKEN_CLASSIFY,
    method="hidden",
    outputs=(RowOutput("last_hidden_state", 2),),
    pooling="token_embed",
    command=Command(
        task="hidden",
        words=("gives hidden states", "hidden states", "a model of the task hidden"),
        summary="Print or write the last hidden state of each token.",
        json=ALL_VALUES,
        fields=array_fields("hidden states"),
        lines=array_lines("tokens"),
        written="hidden states",
    ),
)


class TokenMethods:
    """Methods for what tokens have."""

    @method
    def token_classify(
        self, inputs: Inputs | Pairs, **options: Unpack[RowOptions]
    ) -> Asked[list[Floats]]:
        """Return the logits of each row's tokens, one [tokens, labels] fp32 per row.

        Each row is sent as its own request, since the server pads the rows of one request to the
        longest. Inputs are the same as in `classify`, errors as in `embed`.
        """
        return TOKEN_CLASSIFY.of(inputs, options)

    @method
    def predict_tokens(
        self, inputs: Inputs | Pairs, **options: Unpack[RerankOptions]
    ) -> Asked[list[list[TokenLabel]]]:
        """Return the tokens of each row with their best labels, special tokens included.

        For models of `token_classify`. Inputs are the same as in `classify`, errors as in `embed`; see `RerankOptions`.
        """
        return PREDICT_TOKENS.of(inputs, options)

    @method
    def predict_entities(
        self, texts: Sequence[str], **options: Unpack[EntityOptions]
    ) -> Asked[list[list[Entity]]]:
        """Return the entities of each text, with character offsets.

        For models of `token_classify`. Errors are the same as in `embed`; see `EntityOptions`.
        """
        strategy = options.get("aggregation_strategy") or "simple"
        return PREDICT_ENTITIES.of(texts, {**options, "aggregation_strategy": strategy})

    @method
    def hidden(self, inputs: Inputs | Pairs, **options: Unpack[RowOptions]) -> Asked[list[Floats]]:
        """Return the last hidden states, one [tokens, hidden] fp32 per row.

        Each row is sent as its own request, as in `token_classify`. Arguments and errors are the
        same there.
        """
        return HIDDEN.of(inputs, options)

    @method
    def token_embed(
        self, inputs: Inputs, **options: Unpack[TokenEmbedOptions]
    ) -> Asked[list[Floats]]:
        """Return the vectors of each row's tokens, one [vectors, features] fp32 per row.

        For models of late interaction (ColBERT). Each row is sent as its own request, as in
        `token_classify`. Arguments and errors are the same as in `embed`; `prompt_name` is "query" or
        "document".
        """
        return TOKEN_EMBED.of(inputs, options)
