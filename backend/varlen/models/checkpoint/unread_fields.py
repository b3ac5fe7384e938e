"""The fields of config.json that no release of transformers reads; see docs/decisions/0014-config-fields.md."""

import json
from functools import cache
from pathlib import Path

# Written by .ci/write_config_fields.py from the sources of the releases.
FIELDS_FILE = Path(__file__).with_name("fields_of_transformers.json")
# Fields that may change results although the releases above do not read them: earlier ones did.
_REFUSED_FIELDS = frozenset({"position_embedding_type"})


def is_unread(field: str, model_type: str) -> bool:
    """Return whether no listed release reads a field for this `model_type`."""
    return field not in fields_read("shared") | fields_read(model_type) | _REFUSED_FIELDS


def releases() -> list[str]:
    """Return the listed releases of transformers, oldest first."""
    return " ".join(_content()["releases"]).split()


@cache
def fields_read(family: str) -> frozenset[str]:
    """Return the fields read for a `model_type`, or for every one (`shared`)."""
    return frozenset(" ".join(_content()[family]).split())


@cache
def _content() -> dict[str, list[str]]:
    content: dict[str, list[str]] = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))
    return content
