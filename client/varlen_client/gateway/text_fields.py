"""Fields of requests whose texts may be cut, in the names of every interface.

TEI says `truncate: true`, NVIDIA NIM and Cohere `truncate: "END"`, vLLM `truncate_prompt_tokens: -1`, or a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import Fields

Direction: TypeAlias = Literal["left", "right", "Left", "Right"]
CutEnd: TypeAlias = Literal["NONE", "START", "END"]

# Side that each name cuts; None cuts nothing.
_SIDES: Mapping[CutEnd, str | None] = {"NONE": None, "START": "left", "END": "right"}


class TextFields(Fields):
    """How texts that are too long are cut."""

    truncate: bool | CutEnd | None = None
    truncation: bool | None = None
    """Voyage's name of `truncate`, and that of pipelines of transformers."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens that are kept, by vLLM; -1 is its name of `truncate`."""
    truncation_side: Direction | None = None
    truncation_direction: Direction | None = None
    """TEI's name of `truncation_side`."""

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _is_a_length(cls, tokens: int) -> int:
        if tokens < 1 and tokens != -1:
            raise PydanticCustomError(
                "not_a_length",
                "Input should be -1, the longest input of the model, or a number of tokens from 1",
            )
        return tokens

    @property
    def is_cut_by_default(self) -> bool:
        """Whether texts are cut if nothing says it."""
        return False

    def truncation_options(self, *, auto_truncate: bool) -> dict[str, Any]:
        """Return the client's arguments for the truncation of texts.

        Args:
            auto_truncate: whether texts are cut if the request does not say it.

        Raises:
            InvalidRequest: fields contradict each other, or a side is given and nothing is cut.
        """
        side = self._cut_side()
        truncate = self._is_cut()
        if truncate is None:
            truncate = auto_truncate or self.is_cut_by_default
            if side == "left" and not truncate:
                raise InvalidRequest(
                    "truncation_side is left, but no text is cut; send truncate: true with it"
                )
        if not truncate:
            return {}
        length = self.truncate_prompt_tokens
        cut = {"truncate": True} if length in (None, -1) else {"truncate_prompt_tokens": length}
        return cut | given_options(truncation_side=side)

    def _is_cut(self) -> bool | None:
        """Return whether texts are cut; None where the request does not say it."""
        if self.truncate is not None and self.truncation is not None:
            raise InvalidRequest("the request has truncate and truncation; send one of them")
        given = self.truncation if self.truncate is None else self.truncate
        if isinstance(given, str):
            given = _SIDES[given] is not None
        if self.truncate_prompt_tokens is None:
            return given
        if given is False:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {self.truncate_prompt_tokens}, but truncate forbids it; send one of them"
            )
        return True

    def _cut_side(self) -> str | None:
        """Return the side that is cut; None where the request does not say it."""
        named = _SIDES[self.truncate] if isinstance(self.truncate, str) else None
        given = {
            "truncate": named,
            "truncation_side": self.truncation_side,
            "truncation_direction": self.truncation_direction,
        }
        sides = {name: side.lower() for name, side in given.items() if side is not None}
        if len(set(sides.values())) > 1:
            found = " and ".join(f"{name} {getattr(self, name)}" for name in sides)
            raise InvalidRequest(f"the request has {found}; send one of them")
        return next(iter(sides.values()), None)


def given_options(**options: Any) -> dict[str, Any]:
    """Return the options that a request has."""
    return {name: value for name, value in options.items() if value is not None}
