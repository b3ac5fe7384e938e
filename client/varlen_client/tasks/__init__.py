"""The tasks of rows, and the methods of both clients for them."""

from typing import Any

from varlen_client.tasks import extraction, labels, tokens, vectors
from varlen_client.tasks.extraction import ExtractionMethods
from varlen_client.tasks.labels import LabelMethods
from varlen_client.tasks.row_task import RowTask
from varlen_client.tasks.tokens import TokenMethods
from varlen_client.tasks.vectors import VectorMethods


class RowMethods(VectorMethods, ExtractionMethods, LabelMethods, TokenMethods):
    """The methods of both clients that send rows."""


TASKS: tuple[RowTask[Any], ...] = tuple(
    each
    for room in (labels, vectors, tokens, extraction)
    for each in vars(room).values()
    if isinstance(each, RowTask)
)
# The commands of `varlen` for them, by name.
COMMANDS = {each.command.name: each.command for each in TASKS if each.command is not None}
