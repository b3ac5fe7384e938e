"""The commands `varlen generate` and `varlen translate`."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from varlen_client.aio import DEFAULT_TEXT_CONCURRENCY
from varlen_client.calls import Tokenizable
from varlen_client.cli.options import (
    check_output,
    fail,
    print_message,
    texts_or_lines,
    usage_error,
    write_file,
)
from varlen_client.cli.progress import show_progress, show_stage
from varlen_client.cli.requests import RequestOptions, with_options
from varlen_client.errors import VarlenClientError
from varlen_client.generation import Generation, GenerationPrompt, Translation
from varlen_client.sync import Client

# Longest answer of a command without `--max-tokens`. The wire's own default, as of vLLM and OpenAI, is 16.
DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(RequestOptions):
    """Options of an answer; each field is an argument of `Client.generate`."""

    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Longest answer, in tokens; default: {DEFAULT_MAX_TOKENS}, or what fits."
        ),
    ] = None
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the most likely token; default: 1.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="Smallest set of tokens with this probability.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Number of most likely tokens.")] = None
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the most likely token's probability.")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed; default: another one each time.")] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None
    logit_bias: Annotated[
        str | None, typer.Option(help="JSON object of numbers for the logits, by token id.")
    ] = None
    bad_words: Annotated[
        list[str] | None,
        typer.Option("--bad-word", help="Word that the answer lacks; may be repeated."),
    ] = None


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
    json_schema: Annotated[
        Path | None, typer.Option(help="File with the JSON schema that the answer has to match.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object per answer, or per part of it.")
    ] = False,
    options: SamplingOptions,
) -> None:
    """Generate the answer to a prompt and print it."""
    if chat_template_kwargs is not None and not chat:
        usage_error("--chat-template-kwargs needs --chat")
    schema = None if json_schema is None else {"json": _read_json(json_schema)}
    given = options.arguments | {
        "chat_template_kwargs": chat_template_kwargs,
        "structured_outputs": schema,
    }
    # an option that may be repeated is an empty list without one
    given = {name: each for name, each in given.items() if each not in (None, [])}
    text = _read_stdin() if prompt == "-" else prompt
    asked = [{"role": "user", "content": text}] if chat else text
    with options.connect() as client:
        if options.max_tokens is None:
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


_STDOUT = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(RequestOptions):
    """Options of translations; each field is an argument of `Client.translate`."""

    num_beams: Annotated[
        int | None,
        typer.Option("--beams", min=1, help="Beams of each text; default: the model decides."),
    ] = None
    n_best: Annotated[
        int,
        typer.Option(
            min=1,
            help="Translations of each text; above 1 each line has a score, a tab and a text.",
        ),
    ] = 1
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest translation, in tokens; default: the model decides."),
    ] = None


@with_options
def translate(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to translate.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="Translate each line of this UTF-8 file; - is stdin.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Write a line per translation here; default: stdout.")
    ] = _STDOUT,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Maximum texts in flight.")
    ] = DEFAULT_TEXT_CONCURRENCY,
    options: SearchOptions,
) -> None:
    """Translate texts, or the lines of a file.

    Lines stay in order, and empty ones stay empty.
    """
    lines = texts_or_lines(texts, file)
    if output != _STDOUT:
        check_output(output, force=force)
    places = [place for place, line in enumerate(lines) if line.strip()]
    start = time.monotonic()
    with (
        options.connect(concurrency=concurrency) as client,
        show_progress("translating", len(places), shown=file is not None) as on_progress,
    ):
        try:
            answers = client.translate(
                [lines[place] for place in places], **options.arguments, on_progress=on_progress
            )
        except VarlenClientError as error:
            if file is None or error.rows is None or len(error.rows) > 1:
                raise
            reason = re.sub(r"^row \d+( of \d+)?: ", "", str(error))
            fail(f"{file}, line {places[error.rows.start] + 1}: {reason}")
    seconds = time.monotonic() - start
    written = [""] * len(lines)
    for place, answer in zip(places, answers, strict=True):
        written[place] = _line(answer) if options.n_best == 1 else _scored_lines(answer)
    if output == _STDOUT:
        for line in written:
            typer.echo(line)
    else:
        content = "".join(f"{line}\n" for line in written).encode()
        write_file(output, lambda stream: stream.write(content), force=force)
        print_message(
            f"wrote {len(places)} translations to {output} in {seconds:.1f} s "
            f"({len(places) / seconds:.0f} texts/s)"
        )


def _line(answer: Translation) -> str:
    # a line break inside a translation would make it two
    return " ".join(answer.text.splitlines())


def _scored_lines(answer: Translation) -> str:
    """Return a line per translation: its score, a tab, its text."""
    return "\n".join(f"{each.score:.4f}\t{_line(each)}" for each in (answer, *answer.alternatives))
