"""Edge cases of `/v1/embeddings`."""

from __future__ import annotations

from tests.edges.case import Edge, Refused, Same

EDGES = (
    Edge(
        name="one text is a list of one text",
        route="/v1/embeddings",
        body={"input": "the cat"},
        right=Same({"input": ["the cat"]}),
        source="OpenAI API reference, embeddings",
    ),
    Edge(
        name="no text at all is refused",
        route="/v1/embeddings",
        body={"input": []},
        right=Refused(400, ("input",)),
        source="OpenAI API: '$.input' is invalid",
    ),
)
