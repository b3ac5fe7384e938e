"""Search for the end of an answer in text that comes in parts.

Each stop string has an automaton that reads one character after the other, so the result does not depend on how the
text is divided into tokens.
Source: Knuth, Morris, Pratt 1977, "Fast pattern matching in strings".
"""

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string; text that may become one waits."""

    def __init__(self, strings: Sequence[str], *, keep: bool) -> None:
        """Prepare the search.

        Args:
            strings: none of them empty; may be none.
            keep: whether the string that ends the text stays part of it.
        """
        self._strings = [(string, _fallbacks(string)) for string in strings]
        self._keep = keep
        # number of characters of each string with which the text ends
        self._matched = [0] * len(strings)
        self._pending = ""

    def add(self, text: str, *, may_end: bool) -> tuple[str, bool]:
        """Return the text that is certain now, and whether a stop string has ended it.

        The string that is complete first ends the text; of several, the longest.

        Args:
            text: the next part.
            may_end: whether a string that is complete in this part ends the text.
        """
        first = len(self._pending) + 1
        text = self._pending + text
        for end in range(first, len(text) + 1):
            length = self._read(text[end - 1])
            if length and may_end:
                return text[: end if self._keep else end - length], True
        certain = len(text) - max(self._matched)
        self._pending = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._pending

    def _read(self, character: str) -> int:
        """Return the length of the longest string that this character completes; 0 is none."""
        longest = 0
        for index, (string, fallbacks) in enumerate(self._strings):
            matched = self._matched[index]
            while matched and string[matched] != character:
                matched = fallbacks[matched - 1]
            matched += string[matched] == character
            if matched == len(string):
                longest = max(longest, matched)
                matched = fallbacks[-1]
            self._matched[index] = matched
        return longest


def _fallbacks(string: str) -> list[int]:
    """Return, for each prefix, the length of the longest shorter prefix with which it ends."""
    fallbacks = [0]
    matched = 0
    for character in string[1:]:
        while matched and string[matched] != character:
            matched = fallbacks[matched - 1]
        matched += string[matched] == character
        fallbacks.append(matched)
    return fallbacks
