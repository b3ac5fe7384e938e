"""A user who has no folder for caches."""

import os

from tests.processes import NOBODY, as_user
from varlen_tools.serve.models import Fetching, fetch_models, find_models

from ..phase import Campaign
from ..report import Report


def unwritable_cache(campaign: Campaign, report: Report) -> None:
    """Serve a checkpoint as a user without a home: the message names the variable."""

    def find() -> object:
        # in a process of its own
        os.environ.pop("XDG_CACHE_HOME", None)
        os.environ["HOME"] = "/nonexistent"
        checkpoint, fetching = str(campaign.checkpoints.minilm.resolve()), Fetching(None, {})
        return fetch_models(find_models([checkpoint], fetching, report=len), fetching, report=len)

    found = as_user(NOBODY, find)
    is_told = found.startswith("CacheError: /nonexistent/") and "XDG_CACHE_HOME" in found
    report.check(holds=is_told, problem=f"a cache that cannot be written: {found}")
