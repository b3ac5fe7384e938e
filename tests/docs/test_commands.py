"""Commands, options, settings and metrics that the pages name exist."""

import ast
import inspect
import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from varlen.config import SETTINGS, EngineConfig
from varlen.request.generation import OPTION_NAMES
from varlen.request.row_parameters import ROW_PARAMETERS
from varlen.telemetry.metrics import METRICS
from varlen_client.cli.main import app, find_commands

from .pages import PAGES, PROJECT, Block, blocks, commands

# Folders of packages with modules that are commands.
COMMANDS = (("tools", "varlen_tools"), ("tools", "varlen_bench"), (".", "tests/campaign"))
# What runs a module's only command.
_RUN = re.compile(r"^    typer\.run\((\w+)\)$", re.MULTILINE)
# Commands of others, and of the server.
OTHERS = {
    *(
        "curl",
        "docker",
        "git",
        "helm",
        "pip",
        "printf",
        "tritonserver",
        "perf_analyzer",
        ".ci/run",
        ".",
        "cd",
        "kill",
    ),
    *("text-embeddings-router", "genai-perf", "aiperf"),
}
# Options of tritonserver, Docker, pytest, TEI, load generators, and of the frontends of vLLM, the server and Dynamo.
OTHER_OPTIONS = {
    *(
        "--exit-timeout-secs",
        "--grpc-max-connection-age",
        "--disable-auto-complete-config",
        "--http-port",
        "--exit-on-error",
    ),
    *("--http-max-input-size", "--allow-client-shm", "--backend-config", "--model-control-mode"),
    "--cache-config",
    *("--shm-size", "--gpus", "--generation-config", "--backend"),
    *(
        "--model-id",
        "--revision",
        "--dtype",
        "--pooling",
        "--max-batch-requests",
        "--max-client-batch-size",
    ),
    *("--max-concurrent-requests", "--auto-truncate", "--hostname", "--url-prefix"),
    *("--tokenization-workers", "--payload-limit", "--cors-allow-origin", "--served-model-name"),
    *("--otlp-endpoint", "--prometheus-port", "--default-prompt", "--default-prompt-name"),
    # of Dynamo
    *("--classify-input-name", "--classify-output-name"),
    # of perf_analyzer, genai-perf and aiperf
    *("--async", "--streaming", "--shape", "--input-data", "--string-data", "--request-parameter"),
    "--shared-memory",
    *("--concurrency-range", "--request-count", "--concurrency", "--endpoint-type", "--tokenizer"),
    *("--batch-size-text", "--output-tokens-mean", "--synthetic-input-tokens-mean", "--ui"),
}
# Names that begin like metrics and are none.
PACKAGES = {"varlen_bench", "varlen_client", "varlen_kernels", "varlen_tools"}
PARAMETERS = {*ROW_PARAMETERS, *OPTION_NAMES}

SHELL = [
    pytest.param(block, command, id=f"{block} {command[0]} {index}")
    for block in blocks("sh", "bash")
    for index, command in enumerate(commands(block))
]


@pytest.mark.parametrize("block, command", SHELL)
def test_a_command_exists_and_takes_its_arguments(block, command):
    name, *arguments = [word for word in command if not word.startswith(">")]
    if name.startswith("python") or name.endswith("/python"):
        assert arguments[0] == "-m"
        check_arguments(command_of(arguments[1]), arguments[2:])
    elif Path(name).name == "varlen":
        check_arguments(typer.main.get_command(app), arguments)
    elif name == "make":
        targets = [word for word in arguments if "=" not in word]
        makefile = (PROJECT / "Makefile").read_text()
        assert [each for each in targets if f"\n{each}: " not in makefile] == []
    else:
        assert name in OTHERS, f"{block} has the command {name}"


def command_of(module: str) -> Any:
    """Return the command of a module; None if it reads its arguments without typer."""
    found = import_module(module)
    is_package = hasattr(found, "__path__")
    found = import_module(f"{module}.__main__") if is_package else found
    commands_of_module = getattr(found, "app", None)
    if commands_of_module is None:
        function = _RUN.search(inspect.getsource(found))
        if function is None:
            return None
        commands_of_module = typer.Typer()
        commands_of_module.command()(getattr(found, function[1]))
    return typer.main.get_command(commands_of_module)


def check_arguments(command: Any, arguments: list[str]) -> None:
    """Parse arguments as the command does, without running it."""
    if command is None:
        return
    # a command of `varlen` is imported when it is called
    command = command.load() if hasattr(command, "load") else command
    below = getattr(command, "commands", {})
    if below and (arguments[0] in below or not command.invoke_without_command):
        check_arguments(below[arguments[0]], arguments[1:])
    else:
        command.make_context("", list(arguments))


@pytest.mark.parametrize(
    "line",
    [
        *("varlen embed a --fooo", "varlen zap", "varlen quantize --fooo"),
        *("varlen costs --fooo", "make doc", "carlen"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line):
    block = Block("page.md", 1, "sh", f"{line}\n")

    [command] = commands(block)
    with pytest.raises(Exception):  # noqa: B017, PT011  # of click, KeyError, or AssertionError
        test_a_command_exists_and_takes_its_arguments(block, command)


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_requests_of_curl_are_json_with_known_names(block):
    for command in commands(block):
        if command[0] != "curl" or "-d" not in command:
            continue
        body = json.loads(command[command.index("-d") + 1])
        # TEI's inputs are texts
        tensors = [each for each in body.get("inputs", []) if isinstance(each, dict)]
        names = {tensor["name"] for tensor in tensors}
        assert names <= {"text", "text_pair", "input_ids", "attention_mask", "token_type_ids"}
        assert body.get("parameters", {}).keys() <= PARAMETERS


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_can_be_parsed(block):
    ast.parse(block.code)


def test_settings_in_pbtxt_are_allowed():
    entry = re.compile(r'key: "(\w+)" value: \{ string_value: "([^"]*)" \}')
    found = [match for block in blocks("") for match in entry.findall(block.code)]

    assert len(found) > 5
    for name, value in found:
        EngineConfig.from_parameters({name: value})


@pytest.mark.parametrize("page", PAGES)
def test_metrics_and_settings_that_a_page_names_exist(page):
    text = (PROJECT / page).read_text()
    gateway = {"varlen_gateway_" + name for name in ("requests_total", "request_seconds")}
    gateway |= {"varlen_gateway_requests_in_flight", "varlen_gateway_tokens_total"}
    gateway |= {"varlen_gateway_ignored_fields_total"}
    known = {metric.value for metric in METRICS} | PACKAGES | gateway

    named = set(re.findall(r"`(varlen_\w+)(?:\{[^`]*\})?`", text))
    assert named - known == set()
    anchors = re.findall(r"configuration\.md#(\w+_\w+)", text)
    assert [name for name in anchors if name not in SETTINGS] == []


@pytest.mark.parametrize("page", PAGES)
def test_options_that_a_page_names_exist(page):
    spans = re.findall(r"`[^`\n]*`", (PROJECT / page).read_text())
    options = {name for span in spans for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", span)}

    assert options - known_options() - OTHER_OPTIONS == set()


@pytest.mark.parametrize("page", PAGES)
def test_source_files_that_a_page_names_exist(page):
    named = set(re.findall(r"`([\w./]+\.py)`", (PROJECT / page).read_text()))

    assert named <= source_files()


@cache
def source_files() -> frozenset[str]:
    """Return the ends of the paths of all source files: `a/b.py` and `b.py`."""
    folders = ("backend", "kernels", "client", "tools", "tests", "examples", ".ci")
    paths = [path for folder in folders for path in (PROJECT / folder).rglob("*.py")]
    parts = [path.relative_to(PROJECT).parts for path in paths]
    return frozenset("/".join(each[begin:]) for each in parts for begin in range(len(each)))


@cache
def known_options() -> frozenset[str]:
    """Return the options of our commands."""
    single = (command_of(module) for module in modules())
    loaded = (each.load() for each in find_commands().values())
    commands = [typer.main.get_command(app), *loaded, *single]
    return frozenset(option for command in commands for option in options_of(command))


def modules() -> list[str]:
    """Return the modules that `python -m` runs with typer."""
    return [
        ".".join(path.relative_to(PROJECT / folder).with_suffix("").parts).removesuffix(".__main__")
        for folder, package in COMMANDS
        for path in sorted((PROJECT / folder / package).rglob("*.py"))
        for source in [path.read_text()]
        if '__name__ == "__main__"' in source and (_RUN.search(source) or "    app()\n" in source)
    ]


def test_every_module_of_the_tools_is_a_command_of_varlen():
    # these prepare development
    others = {"varlen_tools.bundle", "varlen_tools.demo", "varlen_tools.train_demo"}
    loaded = [each.load() for each in find_commands().values()]
    below = [each for group in loaded for each in getattr(group, "commands", {}).values()]
    functions = {each.callback.__wrapped__ for each in (*loaded, *below)}

    packaged = {name for name in modules() if name.startswith("varlen_tools.")} - others
    assert {
        name for name in packaged if command_of(name).callback.__wrapped__ not in functions
    } == set()


def options_of(command: Any) -> set[str]:
    """Return the options of a command and of the commands below it."""
    names = {name for each in command.params for name in [*each.opts, *each.secondary_opts]}
    found = {name for name in names if name.startswith("--")}
    below = getattr(command, "commands", {}).values()
    return found.union(*(options_of(each) for each in below))


def test_an_option_that_no_command_has_is_found():
    assert {"--max-active-dims", "--cors-origin", "--max-running-sequences"} <= known_options()
    # names of arguments that are no options, and a wrong one
    assert known_options().isdisjoint({"--folder", "--session", "--max-active-dim"})
