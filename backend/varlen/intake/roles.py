"""Roles of texts: what a request's `prompt_name` or `input_type` chooses.

A role puts a prompt before texts. Models with a vector for each token have two roles more, queries and documents, which
differ in length and in the tokens that have vectors.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from varlen.errors import CheckpointError, ConfigError, RequestError, shorten
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint.ranking import LateInteraction
from varlen.models.checkpoint.sentence_transformers import Router
from varlen.models.checkpoint_folder import Checkpoint
from varlen.request.request import Int32Array, Prompt, Terms, Vectors
from varlen.request.row_parameters import NO_PREFIX, InputType, TextPrefix
from varlen.tasks import PROMPTED_TASKS, Task

# The mask of most tokenizers, where no file names it.
_MASK_TOKENS = ("[MASK]", "<mask>")

# A prompt with an instruction, and the texts around it: Qwen3-Embedding, E5-Mistral, gte-Qwen2.
_INSTRUCTED = re.compile(r"(?s)(\s*Instruct(?:ion)?: ?).+?(\s*\n *Query: ?)")

# Names of prompts by their meaning, in lower case with "_" between words. The first name that a checkpoint has counts.
_QUERIES = ("query", "search_query", "retrieval_query", "s2p_query")
_DOCUMENTS = (
    "document",
    "passage",
    "corpus",
    "search_document",
    "retrieval_document",
    "retrieval_passage",
)
_PROMPT_NAMES: Mapping[InputType, tuple[str, ...]] = {
    "query": _QUERIES,
    "search_query": _QUERIES,
    "document": _DOCUMENTS,
    "passage": _DOCUMENTS,
    "search_document": _DOCUMENTS,
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
}


@dataclass(frozen=True, slots=True)
class Expansion:
    """Tokens behind a short text.

    Attributes:
        length: length to which texts are filled up, in tokens.
        is_attended: whether other tokens read the added ones.
    """

    length: int
    token: int
    is_attended: bool


@dataclass(frozen=True, slots=True)
class TextRole:
    """How texts become prompts.

    Attributes:
        prompt: put before single texts.
        instruction: task in words, of a model that compares texts; None is the checkpoint's.
        num_unpooled: the number of its tokens, where pooling leaves them out.
        max_tokens: longest sequence; None is the limit of the model.
        skipped: tokens without a vector, `[tokens]` int32.
        is_looked_up: whether its texts are looked up by their tokens, without special ones.
    """

    prompt: str = ""
    num_unpooled: int = 0
    max_tokens: int | None = None
    expansion: Expansion | None = None
    skipped: Int32Array | None = None
    instruction: str | None = None
    is_looked_up: bool = False

    @property
    def is_plain(self) -> bool:
        others = self.max_tokens, self.expansion, self.skipped
        has_others = self.is_looked_up or any(each is not None for each in others)
        return not self.prompt and not has_others

    def place(self, tokens: Prompt) -> Prompt:
        if self.is_looked_up:
            return Prompt(tokens.token_ids, payload=Terms())
        expansion = self.expansion
        if expansion is None and self.skipped is None:
            return tokens
        ids, types, num_keys, kept = tokens.token_ids, tokens.type_ids, None, None
        if expansion is not None and len(ids) < expansion.length:
            num_keys = None if expansion.is_attended else len(ids)
            added = np.full(expansion.length - len(ids), expansion.token, np.int32)
            ids = np.concatenate([ids, added])
            if types is not None:
                types = np.concatenate([types, np.zeros_like(added)])
        if self.skipped is not None:
            kept = np.flatnonzero(~np.isin(ids, self.skipped)).astype(np.int32)
            kept = None if len(kept) == len(ids) else kept
        return Prompt(ids, types, Vectors(kept, num_keys))


@dataclass(frozen=True, slots=True)
class TextRoles:
    """The roles of a model.

    Attributes:
        named: roles by the names that requests give.
        default: default role of a request that names none.
        prompted: returns the role with another prompt; None if there is none.
    """

    named: Mapping[str, TextRole]
    default: TextRole = TextRole()
    prompted: Callable[[str], TextRole] | None = None

    def select(self, prefix: TextPrefix) -> TextRole:
        """Return the role with what a request puts before its texts.

        Raises:
            RequestError: the model has no such prefix, or the request has two.
        """
        if prefix == NO_PREFIX:
            return self.default
        prefix.check()
        if prefix.instruction is not None:
            return self._select_instruction(prefix, prefix.instruction)
        if prefix.prompt is not None:
            # the parameter is for tasks that have it
            assert self.prompted is not None
            return self.prompted(prefix.prompt)
        return self._select_stored(prefix.prompt_name, prefix.input_type)

    def _select_instruction(self, prefix: TextPrefix, instruction: str) -> TextRole:
        """Return the role whose prompt has this instruction instead of its own."""
        if prefix.given == ("instruction",):
            roles = [self.default, *self.named.values()]
        else:
            roles = [self._select_stored(prefix.prompt_name, prefix.input_type)]
        for role in roles:
            found = _INSTRUCTED.fullmatch(role.prompt)
            if found is not None and self.prompted is not None:
                return self.prompted(f"{found[1]}{instruction}{found[2]}")
        if self.prompted is None:
            raise RequestError(
                "the request has instruction, which this model does not read: it compares texts as they are; leave"
                " it out"
            )
        raise RequestError(
            'the request has instruction, and the prompt of this model has not the form "Instruct: …\\nQuery:";'
            " send the whole text before each text as prompt"
        )

    def _select_stored(self, name: str | None, input_type: InputType | None) -> TextRole:
        """Return the role of this name or meaning; the default one without both."""
        if input_type is not None:
            return self._select_type(input_type)
        if name is None:
            return self.default
        if name not in self.named:
            raise RequestError(
                f"prompt_name is {shorten(repr(name))}; this model has the prompts:"
                f" {shorten(', '.join(self.named)) or 'none'}"
            )
        return self.named[name]

    def of_type(self, input_type: InputType) -> TextRole | None:
        """Return the role of an input type, None without one.

        A model without prompts takes every input type. Documents of a model with a prompt for queries only have none,
        as its authors mean it.
        """
        if all(role.is_plain for role in self.named.values()):
            return self.default
        names = _PROMPT_NAMES[input_type]
        found = self._first(names)
        if found is None and names is _DOCUMENTS and self._first(_QUERIES) is not None:
            return TextRole()
        return found

    def _select_type(self, input_type: InputType) -> TextRole:
        role = self.of_type(input_type)
        if role is None:
            raise RequestError(
                f"input_type is {input_type}; this model has no prompt for it. Name one of its prompts with"
                f" prompt_name: {shorten(', '.join(self.named))}"
            )
        return role

    def _first(self, names: Sequence[str]) -> TextRole | None:
        roles = {_words(name): role for name, role in self.named.items()}
        return next((roles[name] for name in names if name in roles), None)


NO_ROLES = TextRoles({})


def roles_of(
    checkpoint: Checkpoint, task: Task, tokenizer: Tokenizer, max_sequence_tokens: int
) -> TextRoles:
    """Return the roles of the texts of a model.

    Raises:
        CheckpointError: the tokenizer has no token for expanded queries, or the model no position for it.
        ConfigError: expanded queries are too long for the model.
    """
    if task not in PROMPTED_TASKS:
        return NO_ROLES
    if task == "sparse_embed" and checkpoint.router is not None:
        return _roles_of_routes(checkpoint, checkpoint.router, max_sequence_tokens)
    late = checkpoint.late
    if task != "token_embed" or late is None:
        counts = task == "embed" and not checkpoint.pools_prompt

        def prompted(prompt: str) -> TextRole:
            return TextRole(prompt, tokenizer.count_leading(prompt) if counts and prompt else 0)

        named = {name: prompted(prompt) for name, prompt in checkpoint.prompts.items()}
        return TextRoles(named, prompted(checkpoint.default_prompt), prompted)
    skipped = _skipped_tokens(late, tokenizer)

    def role(
        prompt: str, length: int | None, kind: str = "document", expansion: Expansion | None = None
    ) -> TextRole:
        most = None if length is None else min(length, max_sequence_tokens)
        skips = kind in late.skipped_roles
        return TextRole(
            prompt, max_tokens=most, expansion=expansion, skipped=skipped if skips else None
        )

    expansion = _expansion(checkpoint, late, tokenizer, max_sequence_tokens)
    # a longer role makes no other text longer; a setting above the longest of them does
    is_raised = max_sequence_tokens > checkpoint.max_sequence_tokens
    longest = None if is_raised else late.text_length
    prompts = checkpoint.prompts
    # texts of no role have vectors as documents have
    named = {name: role(prompt, longest) for name, prompt in prompts.items()}
    named["query"] = role(
        prompts.get("query", ""), late.query_length or longest, "query", expansion
    )
    named["document"] = role(prompts.get("document", ""), late.document_length or longest)
    return TextRoles(named, role(checkpoint.default_prompt, longest))


def _roles_of_routes(checkpoint: Checkpoint, router: Router, max_sequence_tokens: int) -> TextRoles:
    """Return the roles of a model whose queries are looked up.

    Texts of no role take its default route.
    """
    longest = min(checkpoint.longest_query or max_sequence_tokens, max_sequence_tokens)
    query = TextRole(max_tokens=longest, is_looked_up=True)
    routes = {"query": query, "document": TextRole()}

    def prompted(prompt: str) -> TextRole:
        return replace(routes[router.default], prompt=prompt)

    prompts, default = checkpoint.prompts, checkpoint.default_prompt
    named = {name: prompted(prompt) for name, prompt in prompts.items()}
    # as encode_query and encode_document choose a prompt
    for name, others in (("query", ()), ("document", ("passage", "corpus"))):
        own = next((prompts[each] for each in (name, *others) if each in prompts), default)
        named[name] = replace(routes[name], prompt=own)
    return TextRoles(named, prompted(default), prompted)


def mask_token(checkpoint: Checkpoint, tokenizer: Tokenizer, *, needed_by: str) -> int:
    """Return the token that stands for a missing one, or raise CheckpointError."""
    name = checkpoint.special_tokens.get("mask_token")
    token = tokenizer.find_token(_MASK_TOKENS if name is None else [name])
    if token is None:
        raise CheckpointError(
            f"tokenizer.json has no token {' or '.join(_MASK_TOKENS) if name is None else name}, which {needed_by}"
            " needs; name it as mask_token in tokenizer_config.json"
        )
    return token


def _words(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _expansion(
    checkpoint: Checkpoint, late: LateInteraction, tokenizer: Tokenizer, max_sequence_tokens: int
) -> Expansion | None:
    expansion = late.expansion
    if expansion is None:
        return None
    if expansion.length > max_sequence_tokens:
        raise ConfigError(
            f"queries of this checkpoint are expanded to {expansion.length} tokens; this model takes at most"
            f" {max_sequence_tokens} (max_sequence_tokens)"
        )
    if expansion.token is None:
        token = mask_token(checkpoint, tokenizer, needed_by="the expansion of queries")
    else:
        found = tokenizer.find_token([expansion.token])
        if found is None:
            raise CheckpointError(
                f"queries are expanded by the token {expansion.token}, which tokenizer.json does not have"
            )
        token = found
    if token >= checkpoint.vocab_size:
        raise CheckpointError(
            f"queries are expanded by the token {token} of tokenizer.json; config.json has vocab_size"
            f" {checkpoint.vocab_size}"
        )
    if token == checkpoint.uncounted_token:
        raise CheckpointError(
            f"queries are expanded by the padding token, {token}, which is no position in transformers with model_type"
            f' "{checkpoint.config["model_type"]}"; allowed: another token'
        )
    return Expansion(expansion.length, token, expansion.is_attended)


def _skipped_tokens(late: LateInteraction, tokenizer: Tokenizer) -> Int32Array | None:
    found = [tokenizer.find_token([word]) for word in late.skipped_words]
    ids = [token for token in found if token is not None]
    return np.array(ids, np.int32) if ids else None
