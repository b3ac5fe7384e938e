"""Edge cases of blank texts and of texts that are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.edges.case import Edge, Gives, Holds, Refused, Same

_SPECIAL = "sentence-transformers 6.2: the vector of [CLS] [SEP]"
_BLANK = {
    "nothing": "",
    "a space": " ",
    "the end of a line": "\n",
    "an ideographic space": "\u3000",
    "a no-break space": "\u00a0",
    "a NUL": "\0",
}
_LONG = "the cat sat on the mat. " * 40_000


def _has_two_scores(ranks: Any) -> None:
    results: Sequence[Any] = ranks["results"] if isinstance(ranks, dict) else ranks
    assert len(results) == 2
    assert all(0 <= each.get("relevance_score", each.get("score")) <= 1 for each in results)


EDGES = (
    *(
        Edge(
            name=f"{name} has the vector of the special tokens",
            route="/v1/embeddings",
            body={"input": [text, "the cat"]},
            right=Same({"input": ["", "the cat"]}, without=frozenset({"usage"})),
            source=_SPECIAL,
            needs_weights=True,
        )
        for name, text in _BLANK.items()
    ),
    Edge(
        name="a blank text has the same vector as the special tokens by themselves",
        route="/embed",
        body={"inputs": " "},
        right=Same({"inputs": [[101, 102]]}),
        source=_SPECIAL,
        needs_weights=True,
    ),
    Edge(
        name="the tokenizer drops a NUL within a text",
        route="/embed",
        body={"inputs": "the c\0at"},
        right=Same({"inputs": "the cat"}),
        source="BertNormalizer of tokenizers 0.23, clean_text",
        needs_weights=True,
    ),
    Edge(
        name="a blank text is ranked",
        route="/rerank",
        body={"query": "the cat", "texts": [" ", "the cat"]},
        right=Holds(_has_two_scores),
        source="CrossEncoder of sentence-transformers 6.2",
        role="ranker",
        needs_weights=True,
    ),
    Edge(
        name="a blank query ranks",
        route="/v1/rerank",
        body={"query": "", "documents": ["the dog", "the cat"]},
        right=Holds(_has_two_scores),
        source="CrossEncoder of sentence-transformers 6.2",
        role="ranker",
        needs_weights=True,
    ),
    Edge(
        name="a text of a megabyte is cut by TEI's route",
        route="/embed",
        body={"inputs": _LONG},
        right=Same({"inputs": _LONG[:60_000], "truncate": True}),
        source="TEI 1.9: --auto-truncate is true by default",
        needs_weights=True,
    ),
    Edge(
        name="a text is cut to some tokens",
        route="/v1/embeddings",
        body={"input": "the cat sat on the mat", "truncate_prompt_tokens": 5},
        right=Same({"input": "the cat sat"}),
        source="vLLM: truncate_prompt_tokens counts special tokens",
        needs_weights=True,
    ),
    Edge(
        name="more tokens than the model takes are no length to cut to",
        route="/v1/embeddings",
        body={"input": "the cat", "truncate_prompt_tokens": 100_000},
        right=Refused(
            400, ("truncate_prompt_tokens is 100000; allowed: whole numbers from 2 to ",)
        ),
        source="vLLM: truncate_prompt_tokens above max_model_len is an error",
        needs_weights=True,
    ),
    Edge(
        name="a completion continues the end of a line",
        route="/v1/completions",
        body={"prompt": "\n", "max_tokens": 1, "temperature": 0},
        right=Gives({"usage": {"prompt_tokens": 1, "completion_tokens": 1}}),
        source="GPT-2: the end of a line is a token",
        role="writer",
        needs_weights=True,
    ),
    Edge(
        name="the tokens of a space are counted",
        route="/tokenize",
        body={"prompt": " "},
        right=Gives({"count": 2, "tokens": [101, 102]}),
        source="vLLM /tokenize with the tokenizer of the checkpoint",
        needs_weights=True,
    ),
)
