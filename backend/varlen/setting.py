"""One setting of a model: its default, its allowed values and its texts."""

import re
from dataclasses import dataclass, field
from typing import TypeVar, get_args

from varlen.tasks import Task

_MAX_DIGITS = 18  # fit an int64
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Setting:
    """Description and allowed values of one setting.

    Attributes:
        default: its type is the setting's; None leaves the value to the checkpoint.
        description: a text in Markdown.
        when: when to change it, for the reference page.
        choices: the words allowed.
        lowest, highest: the whole numbers allowed; no `highest` is no limit.
        pattern: a regular expression of other text allowed.
        allowed: the allowed values in words.
        tasks: the tasks that read the setting; others ignore it.
    """

    default: object
    description: str
    when: str
    choices: tuple[str, ...]
    lowest: int | None
    highest: int | None
    pattern: str | None
    allowed: str
    tasks: tuple[Task, ...]

    def allows(self, value: object) -> bool:
        """Return whether the setting may have this value."""
        if value is None or bool in (type(value), type(self.default)):
            return type(value) is type(self.default)
        if isinstance(value, int):
            return self.lowest is not None and self.lowest <= value <= (self.highest or value)
        if isinstance(value, str) and self.pattern:
            return re.fullmatch(self.pattern, value) is not None
        return value in self.choices

    def parse(self, text: str) -> str | int | bool:
        """Return the value of a parameter.

        Text without a value for this setting is returned unchanged, and `allows` refuses it.
        """
        if isinstance(self.default, bool) and text in self.choices:
            return text == "true"
        # isdecimal accepts the digits of every script, as int() does, and no sign, point or space
        if self.lowest is not None and text.isdecimal() and len(text) <= _MAX_DIGITS:
            return int(text)
        return text


def setting_field(
    default: _T,
    description: str,
    *,
    when: str,
    choices: tuple[str, ...] = (),
    lowest: int | None = None,
    highest: int | None = None,
    pattern: str | None = None,
    allowed: str | None = None,
    tasks: tuple[Task, ...] = get_args(Task),
) -> _T:
    """Return a dataclass field with its `Setting` as metadata."""
    numbers = f"whole numbers from {lowest}" + (f" to {highest}" if highest else "")
    allowed = allowed or ", ".join(choices) or numbers
    setting = Setting(default, description, when, choices, lowest, highest, pattern, allowed, tasks)
    return field(default=default, metadata={"setting": setting})
