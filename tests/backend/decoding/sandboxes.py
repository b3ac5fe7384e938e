"""Sandboxes of tests, with limits of their own."""

from varlen.decoding.grammar.grammars import Grammars, grammar_tokens
from varlen.decoding.text.chat import ChatTemplate, template_setup
from varlen.sandbox.limits import SandboxLimits
from varlen.sandbox.process import Sandbox

_opened = []

# So much time that no machine refuses what a test wants to be served.
PATIENT = SandboxLimits(60, 1 << 28)


def new_grammars(tokenizer, vocab_size, ends, *, limits=PATIENT, max_bytes=1 << 30):
    """Return the grammars of a model."""

    def setup():
        return {"tokens": grammar_tokens(tokenizer, vocab_size, ends)}

    return Grammars(_new_sandbox(setup, limits), vocab_size, max_bytes=max_bytes)


def new_template(source, special_tokens, *, max_characters, limits=PATIENT):
    """Return a chat template, or several by name, which were checked."""
    sources = source if isinstance(source, dict) else {"default": source}

    def setup():
        return {"template": template_setup(sources, special_tokens, max_characters=max_characters)}

    template = ChatTemplate(_new_sandbox(setup, limits), [*sources], max_characters=max_characters)
    template.check()
    return template


def close_sandboxes():
    """End the processes of all sandboxes that were opened here."""
    while _opened:
        _opened.pop().close()


def _new_sandbox(setup, limits):
    sandbox = Sandbox(setup, limits)
    _opened.append(sandbox)
    return sandbox
