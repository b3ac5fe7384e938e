"""The sandbox of a loaded model: what it runs, and its limits."""

from collections.abc import Callable, Collection, Mapping

from tokenizers import Tokenizer

from varlen.config import EngineConfig
from varlen.decoding.grammar.grammars import grammar_tokens
from varlen.decoding.text.chat import ChatTemplate, template_setup
from varlen.execution.model_info import generation_limit, text_limit
from varlen.models.checkpoint_folder import Checkpoint
from varlen.sandbox.limits import SandboxLimits
from varlen.sandbox.process import Sandbox


def template_sandbox(
    checkpoint: Checkpoint, config: EngineConfig, *, max_characters: int
) -> tuple[Sandbox, ChatTemplate | None]:
    """Return a sandbox that renders the chat template of a checkpoint, if it has one."""
    sandbox = _sandbox(checkpoint, config, max_characters, lambda: None)
    return sandbox, _template(checkpoint, sandbox, max_characters)


def generation_sandbox(
    checkpoint: Checkpoint,
    config: EngineConfig,
    tokenizer: Tokenizer,
    ends: Collection[int],
) -> tuple[Sandbox, ChatTemplate | None]:
    """Return a sandbox that also compiles grammars, whose answers end with one of these tokens."""

    def tokens() -> Mapping[str, object] | None:
        # a search has no grammar
        is_searched = checkpoint.translate is not None
        return (
            None if is_searched else grammar_tokens(tokenizer, checkpoint.target_vocab_size, ends)
        )

    most = text_limit(config, generation_limit(checkpoint, config))
    sandbox = _sandbox(checkpoint, config, most, tokens)
    return sandbox, _template(checkpoint, sandbox, most)


def _sandbox(
    checkpoint: Checkpoint,
    config: EngineConfig,
    max_characters: int,
    tokens: Callable[[], Mapping[str, object] | None],
) -> Sandbox:
    def setup() -> Mapping[str, object]:
        template = None
        if checkpoint.chat_templates:
            template = template_setup(
                checkpoint.chat_templates, checkpoint.special_tokens, max_characters=max_characters
            )
        return {"tokens": tokens(), "template": template}

    return Sandbox(setup, SandboxLimits(config.sandbox_seconds, config.sandbox_bytes))


def _template(checkpoint: Checkpoint, sandbox: Sandbox, max_characters: int) -> ChatTemplate | None:
    if not checkpoint.chat_templates:
        return None
    return ChatTemplate(sandbox, [*checkpoint.chat_templates], max_characters=max_characters)
