"""The process of one grammar, which compiles it and computes its masks.

The llguidance library knows which tokens may come next. Its own limits bound most of its work; the limits of the
process bound all of it. A JSON schema that requires itself is refused, since no finite answer matches. In terms of
grammars, it is an unproductive symbol.
"""

import ctypes
import json
import os
import re
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from varlen.sandbox.frames import COMPILED, FORGET, HEAD, MASK, MEMORY, REFUSED, Frames
from varlen.sandbox.limits import SandboxLimits, private_bytes, start_timer, stop_timer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Each token lets its sequence use this much more processor time, in seconds.
_SECONDS_PER_TOKEN = 0.01
# The model's own work comes first.
_NICENESS = 10
# Steps of more work than this fail: about 5 ms by the library's own figures.
_LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_items_in_row=10_000,
    max_lexer_states=10_000,
    verbose_errors=False,
)
# Unsupported keywords are refused, whatever the schema says.
_STRICT: "JsonCompileOptions" = {"lenient": False}
# Words as Python's `re` and clients see them: to the library, marks and other connectors than `_` are letters.
_WORDS = {r"\w": r"[\p{L}\p{N}_]", r"\W": r"[^\p{L}\p{N}_]"}
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_NO_ANSWER = "no answer can match it"


@dataclass(slots=True)
class _Sequence:
    """Position of an answer in the grammar, and its processor time left."""

    matcher: LLMatcher
    seconds: float


class GrammarServer:
    """Serves one grammar in a forked process."""

    def __init__(self, tokenizer: str, num_tokens: int, ends: Collection[int]) -> None:
        """Load the tokens.

        Args:
            num_tokens: number of tokens that a mask has.

        Raises:
            ValueError: the tokens are no parts of texts.
        """
        self._tokens = LLTokenizer(tokenizer, n_vocab=num_tokens, eos_token=[*ends])
        self._mask = (ctypes.c_uint32 * ((num_tokens + 31) // 32))()
        self._sequences: dict[int, _Sequence] = {}

    def serve(self, frames: Frames, limits: SandboxLimits) -> None:
        """Compile the grammar that comes first, then compute masks.

        It ends when the engine closes the connection.
        """
        os.nice(_NICENESS)
        grammar = frames.receive()
        start_timer(limits.seconds)
        compiled = self._compile(grammar.decode())
        stop_timer()
        if isinstance(compiled, str):
            frames.send(_answer(REFUSED, COMPILED, compiled.encode(errors="replace")))
            return
        frames.send(_memory())
        while True:
            order = frames.receive()
            kind, number = HEAD.unpack_from(order)
            if kind == FORGET:
                self._sequences.pop(number, None)
                frames.send(_memory())
                continue
            if number not in self._sequences:
                self._sequences[number] = _Sequence(compiled.deep_copy(), limits.seconds)
            tokens = array("i", order[HEAD.size :]).tolist()
            frames.send(self._advance(number, tokens, limits.seconds))

    def _compile(self, grammar: str) -> LLMatcher | str:
        try:
            matcher = LLMatcher(
                self._tokens, _library_grammar(grammar), log_level=0, limits=_LIMITS
            )
            if not matcher.is_error():
                # what fails at its first token is refused before it runs
                first = matcher.deep_copy()
                self._fill_mask(first)
                if first.is_error():
                    return _reason(first)
                return matcher
            return _reason(matcher)
        except ValueError as error:
            return str(error)
        except RecursionError:
            return "the schema is nested too deeply"
        except MemoryError:
            raise
        except BaseException as error:
            # a panic of the library is no Exception
            return f"the grammar library failed: {error}"

    def _advance(self, number: int, tokens: list[int], most: float) -> bytes:
        sequence = self._sequences[number]
        start_timer(min(most, sequence.seconds + _SECONDS_PER_TOKEN * len(tokens)))
        matcher = sequence.matcher
        if matcher.consume_tokens(tokens):
            self._fill_mask(matcher)
        sequence.seconds = stop_timer()
        if matcher.is_error():
            del self._sequences[number]
            return _answer(REFUSED, number, _reason(matcher).encode())
        return _answer(MASK, number, bytes(self._mask))

    def _fill_mask(self, matcher: LLMatcher) -> None:
        matcher.unsafe_compute_mask_ptr(ctypes.addressof(self._mask), ctypes.sizeof(self._mask))


def _library_grammar(grammar: str) -> str:
    [(kind, content)] = json.loads(grammar).items()
    if kind == "choice":
        # one token of the library's lexer: a rule of its parser would have an alternative for each text
        texts = " | ".join(json.dumps(each) for each in dict.fromkeys(content))
        return f"start: CHOICE\nCHOICE: {texts}"
    if kind == "regex":
        words = _ESCAPE.sub(lambda found: _WORDS.get(found[0], found[0]), content)
        return LLMatcher.grammar_from_regex(words)
    if not has_finite_answer(content):
        raise ValueError("the schema requires itself without an end, so no answer can match it")
    return LLMatcher.grammar_from_json_schema(content, overrides=_STRICT)


def _reason(matcher: LLMatcher) -> str:
    reason = matcher.get_error().replace("<non-verbose/>", "").strip()
    return _NO_ANSWER if reason.startswith("NoExtension") else reason


def _answer(kind: int, number: int, content: bytes) -> bytes:
    return HEAD.pack(kind, number) + content


def _memory() -> bytes:
    return _answer(MEMORY, COMPILED, private_bytes().to_bytes(8, "little"))


Schema: TypeAlias = Mapping[str, Any]


def has_finite_answer(schema: object) -> bool:
    """Return False if a JSON schema requires itself without an end; True otherwise.

    Schemas that no value meets for other reasons are the grammar library's to refuse.
    """
    if not isinstance(schema, dict):
        return True
    # nodes that the root may need, each after the node that needs it
    nodes: dict[int, Schema] = {id(schema): schema}
    unread: list[Schema] = [schema]
    needs: dict[int, list[list[int]]] = {}
    while unread:
        node = unread.pop()
        alternatives = list(_needs(node, schema))
        needs[id(node)] = [
            # anything but an object, such as true, is met by some value
            [id(each) for each in group]
            for group in alternatives
            if all(isinstance(each, dict) for each in group)
        ]
        for each in (each for group in alternatives for each in group):
            if isinstance(each, dict) and id(each) not in nodes:
                nodes[id(each)] = each
                unread.append(each)
    finite: set[int] = set()
    while True:
        before = len(finite)
        for node_id in reversed(nodes):
            if all(any(each in finite for each in group) for group in needs[node_id]):
                finite.add(node_id)
        if id(schema) in finite or len(finite) == before:
            return id(schema) in finite


def _needs(node: Schema, root: Schema) -> Iterator[list[object]]:
    """Yield groups of schemas; a value of `node` needs one schema of each group."""
    reference = node.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        yield [_resolved(root, reference)]
    for part in _list(node, "allOf"):
        yield [part]
    for name in ("anyOf", "oneOf"):
        if parts := _list(node, name):
            yield parts
    kind = node.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kinds == ["object"]:
        properties = node.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        for name in _list(node, "required"):
            if not isinstance(name, str):
                continue
            if name in properties:
                yield [properties[name]]
            elif "patternProperties" not in node:
                # a pattern may match the name, and the library knows whether it does
                yield [node.get("additionalProperties", True)]
    elif kinds == ["array"]:
        least = node.get("minItems", 0)
        least = least if isinstance(least, int) else 0
        first = _list(node, "prefixItems")
        yield from ([each] for each in first[: max(least, 0)])
        if least > len(first):
            yield [node.get("items", True)]


def _list(node: Schema, name: str) -> list[Any]:
    found = node.get(name)
    return found if isinstance(found, list) else []


def _resolved(root: Schema, reference: str) -> object:
    """Return the schema that a JSON pointer names; True if there is none."""
    found: object = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found
