"""The command `varlen adopt`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from varlen_client.cli.options import print_message, usage_error
from varlen_tools.adopt.wish import AdoptError, Wish

if TYPE_CHECKING:
    from varlen_tools.adopt.adoption import Adoption, Candidate
    from varlen_tools.adopt.session import Measured, ModelSide


def adopt(**given: Any) -> None:
    """Write the varlen model of an existing model, and compare.

    Compares answers, throughput and p99 of both on this server.
    The exit code is 1 when the answers differ.
    """
    wish = Wish(**given)
    try:
        # torch and the backend, which other commands do not need
        from varlen.errors import CheckpointError, ConfigError
        from varlen_tools.adopt.adoption import adopt_model
        from varlen_tools.local_server import ServerError, end_on_sigterm
        from varlen_tools.serve.server import server_command
    except ModuleNotFoundError as error:
        usage_error(f"adopt needs {error.name}: pip install 'varlen[serve]'")
    if not wish.repository.is_dir():
        usage_error(f"{wish.repository} is not a folder; give a model repository")
    end_on_sigterm()
    try:
        # refused before a server starts
        wish.check()
        with server_command() as command:
            done = adopt_model(wish, command, report=print_message)
    except (AdoptError, CheckpointError, ConfigError, OSError) as error:
        usage_error(str(error))
    except ServerError as error:
        # with the lines of the server's log
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    print_adoption(done)
    if not done.agrees:
        raise typer.Exit(1)


# typer reads it
adopt.__signature__ = signature(Wish, eval_str=True)  # type: ignore[attr-defined]


def print_adoption(done: Adoption) -> None:
    """Print what was written and found to stdout."""
    from rich.console import Console

    from varlen_tools.tables import Table

    old, new = done.old, done.new
    tokens = zip(old.token_tensors.values(), new.token_tensors.values(), strict=True)
    pairs = [(old.text, new.text), *tokens]
    inputs = ", ".join(f"{a.name} -> {b.name}" for a, b in pairs if a is not None and b is not None)
    parameters = ", ".join(f"{key}: {str(value).lower()}" for key, value in new.parameters.items())
    print(f"{done.folder}: task {done.task}")
    print(f"  inputs    {inputs}")
    print(f"  output    {old.output} -> {new.output}")
    print(f"  parameters of requests  {parameters or 'none'}")
    for line in _length_lines(done):
        print(line)
    for each in done.candidates:
        print(_verdict(each))
    if done.replaced:
        print(
            f"ran in Python's onnxruntime, since this server has no ONNX backend: {', '.join(done.replaced)}"
        )
    sides = [*done.old_sides, *(each.side for each in done.candidates)]
    cells = [_side_cells(side) for side in sides]
    unknown = "-: only the model's own code knows" if any("-" in each for each in cells) else None
    headings = ["model", "backend", "dtype", "threads", "instances"]
    Console().print(Table("How they run", headings, cells, caption=unknown))
    if done.old_load is not None:
        Console().print(
            Table("Load", _LOAD_HEADINGS, list(_load_lines(done, done.old_load)), align_right=True)
        )


_LOAD_HEADINGS = ("model", "dtype", "texts/s", "p50, ms", "p99, ms", "times as fast")


def _verdict(candidate: Candidate) -> str:
    found = candidate.comparison
    verdict = "agree" if found.agrees else "DIFFER"
    cosine = "" if found.cosine is None else f", least cosine {found.cosine:.5f}"
    remark = f" ({found.remark})" if found.remark else ""
    return f"answers in {candidate.side.dtype} to {found.count} texts {verdict}{cosine}{remark}"


def _length_lines(done: Adoption) -> Iterator[str]:
    ours = done.candidates[-1].side
    known = [side for side in done.old_sides if side.lengths]
    shown = [f"{_summary(side.lengths)} in {side.name}" for side in [*known, ours]]
    yield f"  tokens of a text  {'; '.join(shown)}"
    for theirs in known:
        pairs = enumerate(zip(theirs.lengths, ours.lengths, strict=True))
        others = [(text, *pair) for text, pair in pairs if pair[0] != pair[1]]
        if others:
            text, there, here = others[0]
            cause = ""
            if there < here:
                cause = f"; --set max_sequence_tokens={max(theirs.lengths)} cuts texts as {theirs.name} does"
            elif min(theirs.lengths) == max(theirs.lengths):
                cause = f"; {theirs.name} pads every text"
            yield (
                f"  texts with another number of tokens: {len(others)}, first text {text}:"
                f" {there}, here {here}{cause}"
            )


def _summary(lengths: Sequence[int]) -> str:
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return f"{longest}"
    return f"{shortest} to {longest}, median {median(lengths):g}"


def _side_cells(side: ModelSide) -> list[str]:
    known = [side.dtype or "-", str(side.threads or "-"), str(side.instances)]
    return [side.name, side.backend, *known]


def _load_lines(done: Adoption, old_load: Measured) -> Iterator[list[str]]:
    old_dtype = f"{done.old_dtype} (assumed)" if done.is_assumed else done.old_dtype
    rows = [(done.old.name, old_dtype, old_load)]
    rows += [
        (each.side.name, each.side.dtype or "", each.load) for each in done.candidates if each.load
    ]
    for name, dtype, load in rows:
        times = [f"{load.percentile(share):.0f}" for share in (0.5, 0.99)]
        yield [name, dtype, f"{load.rate:.1f}", *times, f"{load.rate / old_load.rate:.2f}"]
