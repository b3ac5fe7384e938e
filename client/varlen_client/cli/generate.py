"""The command `varlen generate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from varlen_client.cli.options import usage_error
from varlen_client.cli.progress import show_stage
from varlen_client.cli.requests import RequestOptions, with_options
from varlen_client.generation import Generation, GenerationPrompt
from varlen_client.sync import Client
from varlen_client.tokenizer_call import Tokenizable

# Longest answer of a command without `--max-tokens`. The wire's own default, as of vLLM and OpenAI, is 16.
DEFAULT_MAX_TOKENS = 256


@with_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    *,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the text while it is generated.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message of a chat.")
    ] = False,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(help="JSON object of variables for the chat template; needs --chat."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Longest answer, in tokens; default: {DEFAULT_MAX_TOKENS}, or what fits."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the most likely token; default: 1.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Smallest set of tokens with this probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of most likely tokens.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the most likely token's probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; default: another one each time.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    logit_bias: Annotated[
        str | None, typer.Option(help="JSON object of numbers for the logits, by token id.")
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="Word that the answer lacks; may be repeated.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with the JSON schema that the answer has to match.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object per answer, or per part of it.")
    ] = False,
    options: RequestOptions,
) -> None:
    """Generate the answer to a prompt and print it."""
    sampling: dict[str, Any] = {
        "chat_template_kwargs": chat_template_kwargs,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
        "bad_words": bad_word or None,
        "logit_bias": logit_bias,
        "structured_outputs": None if json_schema is None else {"json": _read_json(json_schema)},
    }
    if chat_template_kwargs is not None and not chat:
        usage_error("--chat-template-kwargs needs --chat")
    text = _read_stdin() if prompt == "-" else prompt
    given = {name: each for name, each in sampling.items() if each is not None}
    given |= options.arguments
    asked = [{"role": "user", "content": text}] if chat else text
    with options.connect() as client:
        if max_tokens is None:
            given["max_tokens"] = _default_max_tokens(client, asked, given)
        for part in client.stream(asked, **given) if stream else _whole(client, asked, given):
            if as_json:
                fields = {"text": part.text, "token_ids": part.token_ids}
                ending = {"finish_reason": part.finish_reason}
                typer.echo(json.dumps(fields | ending, ensure_ascii=False))
            else:
                # typer flushes, so each part shows at once
                typer.echo(part.text, nl=False)
    if not as_json:
        typer.echo()


def _whole(client: Client, asked: GenerationPrompt, given: dict[str, Any]) -> list[Generation]:
    with show_stage("generating"):
        return [client.generate(asked, **given)]


def _default_max_tokens(client: Client, asked: GenerationPrompt, given: dict[str, Any]) -> int:
    """Return the longest answer: the default, or what the model has left after the prompt."""
    names = ("chat_template_kwargs", "deadline_ms", "priority", "timeout")
    options = {name: given[name] for name in names if name in given}
    [prompt] = client.tokenize(cast("Tokenizable", [asked]), **options)
    # with nothing left, the server's error has the lengths
    return max(1, min(DEFAULT_MAX_TOKENS, prompt.max_tokens - len(prompt.token_ids)))


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        usage_error("stdin is not valid UTF-8")


def _read_json(file: Path) -> object:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        usage_error(f"cannot read {file}: {error.strerror}")
    except ValueError as error:
        usage_error(f"{file} is not JSON: {error}")
