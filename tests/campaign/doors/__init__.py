"""Ways into a server, or around its limits, for those who do not belong.

A door is a function. It shows first that the attack works where nothing stops it, so that a check means something, and
then that a server as users start it withstands. What is found is in the notes and the problems of the report.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ..phase import Campaign
from ..report import Report
from .cache import unwritable_cache
from .files import (
    checkpoints_of_strangers,
    code_of_another_user,
    costs_of_another_user,
    endless_patterns,
    marks_of_another_user,
)
from .gateway import gateway_floods
from .leftovers import killed_fetch, killed_serve, killed_server
from .management import code_of_a_page, texts_in_shared_memory

Door: TypeAlias = Callable[[Campaign, Report], None]

# In order; each part of the code adds its own, in a module of its own.
DOORS: Mapping[str, Door] = {
    "code of a page": code_of_a_page,
    "texts in shared memory": texts_in_shared_memory,
    "killed serve": killed_serve,
    "killed server": killed_server,
    "killed fetch": killed_fetch,
    "unwritable cache": unwritable_cache,
    "code of another user": code_of_another_user,
    "costs of another user": costs_of_another_user,
    "marks of another user": marks_of_another_user,
    "checkpoints of strangers": checkpoints_of_strangers,
    "endless patterns": endless_patterns,
    "floods of the gateway": gateway_floods,
}
