"""The command `varlen`: the list of its commands. Each is imported when it is called.

Commands of this distribution are modules beside this file. Others, such as the backend's, add theirs by entry points
of the group `varlen.commands`. Results go to stdout; progress, messages and errors go to stderr.
Exit codes: 0 success, 1 the server or the request failed, 2 wrong arguments or input file.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from varlen_client.cli.options import usage_error
from varlen_client.tasks import COMMANDS

_GROUP = "varlen.commands"
_ASKED_FIRST = ("embed", "similarity", "classify", "rerank", "generate", "translate")
_ASKS = {
    "similarity": "Print the cosine similarity of each pair of texts.",
    "generate": "Generate the answer to a prompt and print it.",
    "translate": "Translate texts, or the lines of a file.",
    **{name: command.summary for name, command in COMMANDS.items()},
}
# All commands in the order of `varlen --help`, and what each does. Its own help begins with this sentence too, and goes
# on with its docstring's second paragraph.
PANELS: Mapping[str, Mapping[str, str]] = {
    "Serve": {
        "serve": "Fetch models and serve them over HTTP and gRPC.",
        "serve-http": "Serve a server's models to OpenAI, TEI and Cohere clients.",
        "install-backend": "Copy varlen into the backends folder of a server.",
    },
    "Prepare": {
        "fetch": "Put a checkpoint into a model repository, ready to serve.",
        "list": "List the models that `varlen serve` has fetched.",
        "rm": "Remove models that `varlen serve` has fetched.",
        "doctor": "Check a checkpoint, and compare it with its own library.",
        "adopt": "Write the varlen model of an existing model, and compare.",
        "quantize": "Calibrate a model for int8 or int4; measure the quality.",
        "convert-pickle": "Convert pickled weights to safetensors; run none of them.",
    },
    "Ask": {
        **{name: _ASKS[name] for name in dict.fromkeys((*_ASKED_FIRST, *_ASKS))},
        "batch": "Answer the requests of a file; a later run goes on.",
    },
    "Operate": {
        "status": "Print whether server and models are ready, and the load.",
        "drain": "Take a server out of service without losing a request.",
        "clean": "List or remove shared memory that ended servers left.",
        "costs": "Measure what a model's batches cost; print it.",
    },
}
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
# The commands of this distribution by their module.
_OWN = {
    "generate": ("generate", "translate"),
    "rows": ("similarity", *COMMANDS),
    "serve_http": ("serve-http", "batch"),
    "status": ("status",),
}
# The distribution that has all others.
_OTHERS = "varlen"
# Names that other programs have for our commands.
_ELSEWHERE: Mapping[str, str] = {
    "fetch": "add download get install pull",
    "serve": "launch run start up",
    "serve-http": "gateway http openai proxy",
    "list": "ls models",
    "rm": "del delete prune remove uninstall",
    "doctor": "check compare test validate verify",
    "adopt": "import migrate port",
    "quantize": "calibrate int4 int8 quantise",
    "convert-pickle": "convert pickle",
    "generate": "ask chat complete completion prompt",
    "status": "health info metrics ps ready stats top",
    "batch": "batches bulk jobs offline run-batch",
    "drain": "down quit shutdown stop",
    **{name: command.synonyms for name, command in COMMANDS.items()},
    "clean": "cleanup clean-shared-memory shm",
    "costs": "bench benchmark measure profile-costs",
}
_MEANT = {word: name for name, words in _ELSEWHERE.items() for word in words.split()}


class Command(TyperCommand):
    """A command that is imported when it is called.

    Its name, panel and summary are known before.
    """

    def __init__(self, entry: EntryPoint) -> None:
        panel = _PANEL_OF.get(entry.name)
        summary = PANELS[panel][entry.name] if panel else f"See `varlen {entry.name} --help`."
        super().__init__(entry.name, help=summary, rich_help_panel=panel or "Others")
        self._entry = entry

    def load(self) -> Any:
        """Return the command with its options; exit with a message if it cannot be imported."""
        try:
            found = self._entry.load()
        except ImportError as error:
            package = self._entry.dist.name if self._entry.dist else "varlen-client"
            usage_error(f"{self.name} cannot be imported: {error}; pip install {package}")
        own = found
        if not isinstance(own, typer.Typer):
            own = typer.Typer(add_completion=False)
            own.command(self.name)(found)
        command: Any = typer.main.get_command(own)
        for each in (command, *getattr(command, "commands", {}).values()):
            # a line of code is longer than a line of many terminals
            summary, *details = (" ".join(text.split()) for text in (each.help or "").split("\n\n"))
            if self.help and each is command and self.name in _PANEL_OF:
                summary = self.help
            each.help = "\n\n".join((summary, *details))
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Return the context of the imported command, which then runs."""
        return self.load().make_context(info_name, args, parent, **extra)


class Program(TyperGroup):
    """The commands of all installed distributions, in the order of `PANELS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update(find_commands())
        if absent := [name for name in _PANEL_OF if name not in self.commands]:
            self.epilog = f"pip install {_OTHERS} adds {', '.join(absent)}."

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a name; an unknown name is an error that suggests one."""
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            ctx.fail(_advice(name, self.commands))
        return super().resolve_command(ctx, args)


def find_commands() -> dict[str, Command]:
    """Return the commands of all installed distributions by name."""
    own = [
        EntryPoint(name, f"varlen_client.cli.{module}:{name.replace('-', '_')}", _GROUP)
        for module, names in _OWN.items()
        for name in names
    ]
    found = {each.name: each for each in (*entry_points(group=_GROUP), *own)}
    ordered = [name for name in _PANEL_OF if name in found]
    return {name: Command(found[name]) for name in (*ordered, *sorted(found.keys() - _PANEL_OF))}


def _advice(name: str, commands: Mapping[str, object]) -> str:
    """Return what to say of a command that is not there."""
    word = name.lower().replace("_", "-")
    close = get_close_matches(word, [*_PANEL_OF, *commands, *_MEANT], n=1)
    meant = _MEANT.get(word) or (_MEANT.get(close[0], close[0]) if close else None)
    said = f"No such command {name!r}."
    if meant is None:
        return f"{said} `varlen --help` lists all."
    if meant in commands:
        return f"{said} Did you mean {meant!r}?"
    extra = f"'{_OTHERS}[serve]'" if meant in ("serve", "adopt") else _OTHERS
    said = "" if meant == name else f"{said} Did you mean {meant!r}? "
    return (
        f"{said}The package {_OTHERS} has {meant!r}, and is not installed here: pip install {extra}"
    )


app = typer.Typer(
    cls=Program,
    help="Serve transformers from a Triton Inference Server with the varlen backend, and ask them from a shell.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"varlen {version('varlen-client')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
