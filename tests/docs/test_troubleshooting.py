"""The pages of errors and the source agree."""

import re

import pytest

from tests.ci.scripts import PROJECT

from .messages import raised_messages, texts_of

PAGES = PROJECT / "docs/reference/errors"
# Its messages are of another program.
NOT_OURS = "server.md"
SOURCES = ("backend/varlen", "client/varlen_client", "tools/varlen_tools")
REQUEST_ERRORS = frozenset(
    {"RequestError", "QueueFullError", "DeadlineError", "RequestCancelled", "EngineError"}
)
# Fields of a checkpoint have one row for all messages of these forms.
FIELD = re.compile(r"; allowed: |; make them agree|, which disagree")
# These are only in the log.
NOT_SENT = ("execution/workers/child.py",)


def listed_messages() -> list[str]:
    ours = "".join(page.read_text() for page in PAGES.glob("*.md") if page.name != NOT_OURS)
    rows = re.findall(r"^\| (?:`([^`]+)`|`` (.+) ``) \|", ours, re.MULTILINE)
    return [plain or quoted for plain, quoted in rows]


def test_every_listed_message_is_in_the_source():
    texts = [texts_of(PROJECT / folder) for folder in SOURCES]

    messages = [message.removeprefix("deadline missed: ") for message in listed_messages()]

    assert len(messages) > 100
    assert [each for each in messages if not any(each in found for found in texts)] == []


@pytest.mark.parametrize("classes", [REQUEST_ERRORS, {"ConfigError"}], ids=["request", "config"])
def test_every_error_of_a_request_or_a_setting_is_listed(classes):
    messages = [message.removeprefix("deadline missed: ") for message in listed_messages()]
    raised = [
        (place, pattern)
        for name, place, pattern in raised_messages(PROJECT / SOURCES[0])
        if name in classes and not place.startswith(NOT_SENT)
    ]

    assert len(raised) > 25
    missing = [
        f"{place}: {pattern.pattern}"
        for place, pattern in raised
        if not any(pattern.fullmatch(message) for message in messages)
    ]
    assert missing == [], "list these messages in a page of docs/reference/errors"


def test_every_error_of_a_checkpoint_is_listed():
    messages = listed_messages()
    raised = [
        pattern
        for name, _, pattern in raised_messages(PROJECT / SOURCES[0])
        if name == "CheckpointError"
    ]

    assert len(raised) > 80
    texts = {re.sub(r"\\(.)", r"\1", pattern.pattern): pattern for pattern in raised}
    missing = [
        text
        for text, pattern in texts.items()
        if not FIELD.search(text) and not any(pattern.fullmatch(each) for each in messages)
    ]
    assert missing == [], "list these messages in a page of docs/reference/errors"


def test_no_message_is_listed_twice():
    messages = listed_messages()

    assert [each for each in set(messages) if messages.count(each) > 1] == []
