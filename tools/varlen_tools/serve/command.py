"""The command `varlen serve`."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from varlen_client.cli.options import print_message, usage_error
from varlen_client.cli.progress import show_stage
from varlen_client.cli.serve_http import (
    DEFAULT_PORT,
    LOOPBACK,
    ApiKeys,
    BatchFolder,
    CorsOrigins,
    Host,
    Port,
    Reasoning,
    Strict,
    ToolCalls,
    check_access,
)


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            help=r"Checkpoint folder, org/name\[@revision] of the hub, model of a model repository, or a repository."
        ),
    ],
    *,
    task: Annotated[
        str | None, typer.Option(help="Task of the checkpoints; default: what their heads are for.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the checkpoints' weights; default: auto.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Engine parameter of the checkpoints, key=value. May be repeated."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Model name; default: made from the checkpoint's.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Fetch again what an earlier call has fetched.")
    ] = False,
    convert_pickle: Annotated[
        bool,
        typer.Option(
            "--convert-pickle",
            help="Convert pickled weights to safetensors. Only tensors are read, and no code of a pickle runs.",
        ),
    ] = False,
    host: Host = LOOPBACK[0],
    port: Port = DEFAULT_PORT,
    server_port: Annotated[
        int,
        typer.Option(
            min=1,
            max=65533,
            help="Port of the server's HTTP; gRPC and metrics have the next two. All are on loopback.",
        ),
    ] = 8000,
    api_key: ApiKeys = None,
    cors_origin: CorsOrigins = None,
    strict: Strict = False,
    tool_calls: ToolCalls = "auto",
    reasoning: Reasoning = "auto",
    batch_folder: BatchFolder = None,
) -> None:
    """Fetch models and serve them over HTTP and gRPC.

    Starts a server and the HTTP gateway, and prints a request to try for each model.
    """
    try:
        # torch and the packages of the gateway, which other commands do not need
        with show_stage("starting"):
            from varlen_client.gateway import GatewaySettings
            from varlen_client.gateway.batches import Folder
            from varlen_tools.local_server import ServerError
            from varlen_tools.model_source import parse_settings
            from varlen_tools.serve.models import Fetching, ServeError, fetch_models, find_models
            from varlen_tools.serve.running import Ports, run
            from varlen_tools.serve.server import server_command
    except ModuleNotFoundError as error:
        usage_error(f"serve needs {error.name}: pip install 'varlen[serve]'")
    fetching = Fetching(
        name=name,
        settings=parse_settings(settings, task=task, dtype=dtype),
        force=force,
        convert_pickles=convert_pickle,
    )
    check_access(host, api_key)
    try:
        gateway = GatewaySettings(
            # the server's comes once it runs
            url="",
            api_keys=tuple(api_key or ()),
            cors_origins=tuple(cors_origin or ()),
            strict=strict,
            tool_calls=tool_calls,
            reasoning=reasoning,
            batch_folder=batch_folder,
        )
    except ValueError as error:
        usage_error(str(error))
    with _clean_end():
        began = time.monotonic()
        try:
            if batch_folder is not None:
                # an error comes before models are fetched
                Folder(batch_folder).close()
            sources = find_models(models, fetching, report=print_message)
            with Ports.taken(host, port, server_port) as ports, server_command() as command:
                folders = fetch_models(sources, fetching, report=print_message)
                run(command, folders, ports, gateway, began=began)
        except (ServeError, OSError) as error:
            usage_error(str(error))
        except ServerError as error:
            # it may have several lines
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None


@contextlib.contextmanager
def _clean_end() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end the server, then the command with exit code 0."""
    signals = [signal.SIGINT, signal.SIGTERM]
    # nohup ignores it
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
