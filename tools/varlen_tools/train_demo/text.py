"""The training text: the topics of `help()`, which every Python installation holds.

It is the same for all installations of one Python version.
"""

import re
from pydoc_data.topics import topics

_SHORTEST_PARAGRAPH = 80
# Code, markup, grammar and tables. A model that sees few tokens learns plain sentences first.
_NO_PROSE = re.compile(r'["*()_<>{}\[\]=|“”0-9]')


def python_documents() -> list[str]:
    """Return the plain prose of each topic, each paragraph on a line of its own."""
    documents = ("\n\n".join(_paragraphs(topics[name])) for name in sorted(topics))
    return [document for document in documents if document]


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs that are whole sentences, each on one line."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part for part in paragraphs if _is_prose(part)]


def _is_prose(paragraph: str) -> bool:
    is_sentence = paragraph[:1].isupper() and paragraph[-1:] in {".", ":"}
    is_long = len(paragraph) >= _SHORTEST_PARAGRAPH
    return is_sentence and is_long and not _NO_PROSE.search(paragraph)
