"""Checks texts, chats and token ids, and makes prompts of them.

Requests of the server and in-process calls both pass here. The layers below trust their inputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.intake.found import WordPrompts
from varlen.intake.long_texts import InputLimits, LongTextRules
from varlen.intake.roles import NO_ROLES, TextRole, TextRoles
from varlen.intake.tokenization import Text, Tokenized, Tokenizer
from varlen.parameter import refuse
from varlen.request.request import (
    MAX_MASKS,
    Int32Array,
    Masks,
    Prompt,
    Source,
    TokenizationTask,
    Unpooled,
    steps_of,
)
from varlen.request.row_parameters import NO_PREFIX, RowParameters, TextPrefix, TruncationSide

_WINDOWS_ONLY = LongTextRules()
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


class ChatTemplate(Protocol):
    """Makes the text of a prompt out of chat messages."""

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, object]) -> str:
        """Return the text, special tokens included, or raise RequestError."""


class PairTemplate(Protocol):
    """Makes the tokens of a prompt out of a pair of texts.

    Attributes:
        ending: `[tokens]` int32, the last tokens of every prompt.
        takes_instruction: whether a request may have an instruction.
    """

    ending: Int32Array
    takes_instruction: bool

    def tokens(
        self, query: str, document: str, instruction: str | None, max_tokens: int | None, /
    ) -> Tokenized:
        """Return the tokens, special ones included, or raise RequestError.

        Args:
            instruction: task of the model in words; None is the checkpoint's.
            max_tokens: length to which the pair is cut behind them; None cuts nothing.
        """


class Intake:
    """Checks and tokenizes the inputs of one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: InputLimits,
        chat_template: ChatTemplate | None = None,
        *,
        roles: TextRoles = NO_ROLES,
        target_start: int | None = None,
        mask_token: int | None = None,
        pair_template: PairTemplate | None = None,
        word_prompts: WordPrompts | None = None,
        pair_prefixes: tuple[str, str] | None = None,
        adapters: Iterable[tuple[str, str]] = (),
        long_texts: LongTextRules = _WINDOWS_ONLY,
    ) -> None:
        """Start the checks.

        Args:
            roles: prompt names that a request may use.
            target_start: first token of each target of a translation model, whose inputs are sources.
            pair_template: pair template of a model that reads pairs as chat messages.
            pair_prefixes: texts in front of the texts of a pair, for a model that reads a pair as one text.
            adapters: see `ModelInfo`.
        """
        self.tokenizer = tokenizer
        self.limits = limits
        self.roles = roles
        self._chat_template = chat_template
        self._mask_token = mask_token
        self._pair_template = pair_template
        self.word_prompts, self.long_texts = word_prompts, long_texts
        self._pair_prefixes = pair_prefixes
        self.adapters = dict(adapters)
        self._target_ids = None if target_start is None else np.array([target_start], np.int32)

    def texts(
        self,
        texts: Sequence[Text],
        *,
        truncate: bool,
        side: TruncationSide | None = None,
        max_tokens: int | None = None,
        prefix: TextPrefix = NO_PREFIX,
        special_tokens: bool = True,
    ) -> tuple[Prompt, ...]:
        """Return the prompts of texts or pairs of texts.

        Args:
            truncate: cut texts that are too long instead of refusing them.
            side: side on which they are cut; None is the checkpoint's.
            special_tokens: whether the tokenizer adds special tokens.

        Raises:
            RequestError: a text has no tokens, too many, or half a surrogate pair; the message names the row. Or the
                model has no such prefix.
        """
        self.limits.check_texts(texts, truncate=truncate)
        role = self.role(prefix)
        self.check_length(texts, role, max_tokens)
        return self._tokenize(
            texts, truncate, special_tokens, role=role, side=side, max_tokens=max_tokens
        )

    def text_steps(
        self,
        texts: Sequence[Text],
        *,
        truncate: bool,
        side: TruncationSide | None = None,
        max_tokens: int | None = None,
        prefix: TextPrefix = NO_PREFIX,
    ) -> tuple[TokenizationTask, ...]:
        """Return the steps that make prompts of texts or pairs, which are checked now.

        Raises:
            RequestError: see `texts`; a step raises it for a text that is too long.
        """
        sizes = self.limits.check_texts(texts, truncate=truncate)
        role = self.role(prefix)
        self.check_length(texts, role, max_tokens)

        def tokenize(rows: range) -> tuple[Prompt, ...]:
            return self._tokenize(
                texts[rows.start : rows.stop],
                truncate,
                role=role,
                side=side,
                max_tokens=max_tokens,
                first_row=rows.start,
            )

        return steps_of(sizes, tokenize)

    def token_ids(
        self,
        rows: Sequence[npt.NDArray[np.int64]],
        type_rows: Sequence[npt.NDArray[np.int64]] | None = None,
    ) -> tuple[Prompt, ...]:
        """Return the prompts of rows of token ids.

        Args:
            rows: `[tokens]` each, special tokens included.
            type_rows: token type ids of the same lengths, or None for all zero.

        Raises:
            RequestError: a row is empty or too long, or an id is out of range; the message names the row.
        """
        if not len(rows):
            raise RequestError("input_ids has no rows; send at least one row")
        types = type_rows if type_rows is not None else [None] * len(rows)
        return tuple(self._token_prompt(row, ids, types[row]) for row, ids in enumerate(rows))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> Prompt:
        """Return the prompt of chat messages.

        Args:
            messages: objects with the fields that the checkpoint's chat template reads, such as role and content.

        Raises:
            RequestError: the checkpoint has no chat template, the template refuses the messages, or see `texts`.
        """
        (prompt,) = self.texts(
            [self.chat_text(messages, variables)], truncate=False, special_tokens=False
        )
        return prompt

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Return the text of chat messages, special tokens included; see `chat`."""
        if self._chat_template is None:
            raise RequestError(
                "the request has messages, but the checkpoint has no chat template; send a text"
            )
        return self._chat_template.render(messages, variables)

    def chat_step(
        self,
        read: Callable[[], Sequence[Mapping[str, Any]]],
        num_bytes: int,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> TokenizationTask:
        """Return the step that makes a prompt of chat messages.

        Args:
            read: function that returns the messages, or raises RequestError; it may take long.
            num_bytes: length of their text.
        """
        return TokenizationTask(num_bytes, lambda: (self.chat(read(), variables),))

    def role(self, prefix: TextPrefix) -> TextRole:
        """Return the role of texts with what a request puts before them.

        Raises:
            RequestError: the model has no such prefix.
        """
        if self._pair_template is None:
            return self.roles.select(prefix)
        if prefix.instruction is not None and not self._pair_template.takes_instruction:
            raise RequestError(
                "the request has instruction, which the prompt of this model does not read; leave it out"
            )
        return TextRole(instruction=prefix.instruction)

    def cut_side(self, given: RowParameters) -> TruncationSide:
        if self._pair_template is not None or self.word_prompts is not None:
            return "right"
        return given.truncation_side or self.tokenizer.side

    def check_length(self, texts: Sequence[Text], role: TextRole, max_tokens: int | None) -> None:
        """Raise RequestError if texts in a role cannot be cut to this length, if any."""
        if max_tokens is None:
            return
        longest = role.max_tokens or self.limits.max_sequence_tokens
        is_pair = any(isinstance(text, tuple) for text in texts)
        added = 0 if role.is_looked_up else self.tokenizer.num_special_tokens(is_pair=is_pair)
        shortest = max(1, added)
        if not shortest <= max_tokens <= longest:
            refuse(
                "truncate_prompt_tokens", max_tokens, f"whole numbers from {shortest} to {longest}"
            )

    def token_text(self, token_id: int) -> str:
        return self.tokenizer.token_text(token_id)

    def term_text(self, term: int) -> str:
        """Return the text of a term, empty if the tokenizer does not have it."""
        return self.tokenizer.huggingface.id_to_token(term) or ""

    @property
    def reads_sources(self) -> bool:
        return self._target_ids is not None

    def _tokenize(
        self,
        texts: Sequence[Text],
        truncate: bool,
        special_tokens: bool = True,
        *,
        role: TextRole | None = None,
        side: TruncationSide | None = None,
        max_tokens: int | None = None,
        first_row: int = 0,
    ) -> tuple[Prompt, ...]:
        role = role or self.roles.default
        special_tokens = special_tokens and not role.is_looked_up
        if role.prompt:
            texts = [role.prompt + text if isinstance(text, str) else text for text in texts]
        most = max_tokens or role.max_tokens or self.limits.max_sequence_tokens
        if self._pair_template is not None:
            return tuple(
                self._pair_prompt(
                    self._pair_template, row, text, role, most if truncate else None, side
                )
                for row, text in enumerate(texts, start=first_row)
            )
        most_bytes = self.limits.max_text_bytes + len(role.prompt.encode())
        if self._pair_prefixes is not None:
            texts = [self._joined(row, text) for row, text in enumerate(texts, start=first_row)]
        found = self.tokenizer.encode(
            texts,
            truncate=truncate,
            side=side,
            special_tokens=special_tokens,
            max_tokens=most,
            max_text_bytes=most_bytes,
        )
        prompts = []
        for row, (text, each) in enumerate(zip(texts, found, strict=True), start=first_row):
            if truncate and not each.is_complete:
                self.limits.refuse_part(row, most)
            # a pair has no prompt
            num_unpooled = role.num_unpooled if isinstance(text, str) else 0
            prompts.append(self._prompt(row, each, role, num_unpooled))
        return tuple(prompts)

    def _joined(self, row: int, text: Text) -> Text:
        """Return a pair as the one text that the model reads, or a single text."""
        if isinstance(text, str) or self._pair_prefixes is None:
            return text
        first, second = text
        # what follows a part of the first text would be in the wrong place
        self.limits.check_text_bytes(row, len(first.encode()))
        before_first, before_second = self._pair_prefixes
        return f"{before_first}{first}{before_second}{second}"

    def _pair_prompt(
        self,
        template: PairTemplate,
        row: int,
        text: Text,
        role: TextRole,
        max_tokens: int | None,
        side: TruncationSide | None,
    ) -> Prompt:
        """Return the prompt of a pair; cut to `max_tokens`, it keeps the template's end."""
        if isinstance(text, str):
            raise RequestError(f"row {row}: text_pair is missing; this model compares two texts")
        if max_tokens is not None and side == "left":
            raise RequestError("truncation_side is left; allowed with this model: right")
        query, document = text
        self.limits.check_text_bytes(row, len(query.encode()))
        found = template.tokens(query, document, role.instruction, max_tokens)
        # tokens of the beginning only are too many, whatever follows
        is_part = found.is_complete and len(document.encode()) > self.limits.max_text_bytes
        spare = len(found.token_ids) - self.tokenizer.spare_tokens
        if max_tokens is not None and is_part and spare <= max_tokens:
            self.limits.refuse_part(row, max_tokens)
        if max_tokens is not None and len(found.token_ids) > max_tokens:
            ending = template.ending[-max_tokens:]
            ids = np.concatenate([found.token_ids[: max_tokens - len(ending)], ending])
            found = Tokenized(ids, None)
        return self._prompt(row, found, self.roles.default)

    def _prompt(self, row: int, text: Tokenized, role: TextRole, num_unpooled: int = 0) -> Prompt:
        tokens, most = len(text.token_ids), role.max_tokens or self.limits.max_sequence_tokens
        if tokens > most:
            count = tokens if text.is_complete else f"more than {most}"
            raise RequestError(
                f"row {row}: text has {count} tokens; this model takes at most {most}{self.limits.remedy}"
            )
        self.limits.check_ids(row, "text", text.token_ids, text.type_ids)
        unpooled = Unpooled(count=min(num_unpooled, tokens))
        return self._placed(row, Prompt(text.token_ids, text.type_ids, unpooled), role)

    def _token_prompt(
        self, row: int, ids: npt.NDArray[np.int64], types: npt.NDArray[np.int64] | None
    ) -> Prompt:
        self.limits.check_sequence(row, ids, types)
        prompt = Prompt(ids.astype(np.int32), None if types is None else types.astype(np.int32))
        return self._placed(row, prompt, self.roles.default)

    def _placed(self, row: int, tokens: Prompt, role: TextRole) -> Prompt:
        """Return tokens in their role, with their masks, or as the source of a target."""
        tokens = role.place(tokens)
        self.limits.check_arena(row, len(tokens.token_ids))
        if self._mask_token is not None:
            return replace(tokens, payload=self._masks(row, tokens.token_ids))
        if self._target_ids is None:
            return tokens
        return Prompt(self._target_ids, payload=Source(tokens.token_ids))

    def _masks(self, row: int, ids: Int32Array) -> Masks:
        assert self._mask_token is not None
        places = np.flatnonzero(ids == self._mask_token)
        if not 1 <= len(places) <= MAX_MASKS:
            name = self.token_text(self._mask_token)
            raise RequestError(
                f"row {row}: the input has {len(places)} tokens {name}; this model takes 1 to {MAX_MASKS}"
            )
        return Masks(places.astype(np.int32))
