"""Expected errors, matched by their exact text."""

import re
from functools import partial

import pytest

from varlen.errors import CheckpointError, ConfigError, RequestError


def raises(error, message):
    """Expect an error whose message contains `message` literally."""
    return pytest.raises(error, match=re.escape(message))


refused_request = partial(raises, RequestError)
refused_setting = partial(raises, ConfigError)
refused_checkpoint = partial(raises, CheckpointError)
