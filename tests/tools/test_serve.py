"""`varlen serve` finds or fetches models, and refuses early what it cannot serve."""

import json
import os
import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.checkpoints import write_file
from tests.server.serving import add_model, wait_until
from varlen_client.cli.main import app
from varlen_tools.fetch import fetch
from varlen_tools.local_server import ServerError, free_port
from varlen_tools.serve import server as server_module
from varlen_tools.serve.examples import Addresses, Model, curl_line, read_model
from varlen_tools.serve.models import (
    Fetching,
    ServeError,
    fetch_models,
    find_models,
    model_folders,
)
from varlen_tools.serve.running import Ports
from varlen_tools.serve.server import (
    ServerCommand,
    server_command,
    start_server,
)
from varlen_tools.setup_server import _commands


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of fetched models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/varlen/models"


def fetching(name: str | None = None, *, force: bool = False, **settings: str) -> Fetching:
    return Fetching(name, settings, force)


def find(sources, how: Fetching) -> tuple[list[Path], list[str]]:
    """Return the models, and what is reported meanwhile."""
    said: list[str] = []
    found = find_models([str(source) for source in sources], how, report=said.append)
    return fetch_models(found, how, report=said.append), said


def test_a_checkpoint_is_fetched_once_per_content_and_settings(encoder, cache):
    [folder], said = find([encoder], fetching())
    assert (folder.name, folder.parent.parent) == ("tiny-encoder", cache)
    assert said == [f"fetching {encoder} into {folder}"]
    (folder / "config.pbtxt").write_text("# mine\n" + (folder / "config.pbtxt").read_text())

    # hidden files, such as git's, are not copied
    (encoder / ".git").mkdir()
    (encoder / ".git/index").touch()
    # a killed fetch has left it
    left = folder.parents[1] / ".fetch-left.locked"
    left.mkdir()
    _, said = find([encoder, encoder], fetching())
    assert not left.exists()
    assert said == [f"{encoder} is in {folder}; --force fetches it again"]
    assert (folder / "config.pbtxt").read_text().startswith("# mine")

    _, said = find([encoder], fetching(policy="fifo"))
    assert said == [f"fetching {encoder} into {folder}"]
    assert '"fifo"' in (folder / "config.pbtxt").read_text()

    os.utime(encoder / "model.safetensors", ns=(1, 1))
    _, said = find([encoder], fetching(policy="fifo"))
    assert said == [f"fetching {encoder} into {folder}"]

    _, said = find([encoder], fetching(force=True, policy="fifo"))
    assert said == [f"fetching {encoder} into {folder}"]


def test_pickled_weights_are_converted_if_asked_for(encoder):
    torch.save(load_file(encoder / "model.safetensors"), encoder / "pytorch_model.bin")
    (encoder / "model.safetensors").unlink()

    with pytest.raises(ServeError, match="pytorch_model.bin"):
        find([encoder], fetching())
    [folder], _ = find([encoder], Fetching(None, {}, convert_pickles=True))

    assert (folder / "1/model.safetensors").is_file()
    # the model is there
    assert find([encoder], fetching())[1] == [f"{encoder} is in {folder}; --force fetches it again"]


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_a_cache_that_cannot_be_written_is_told_with_its_variable(
    encoder, tmp_path, monkeypatch, variable
):
    monkeypatch.delenv("XDG_CACHE_HOME")
    # no user can make a folder there
    monkeypatch.setenv(variable, "/proc/none")

    result = CliRunner().invoke(app, ["serve", str(encoder), *free_ports()])

    assert result.exit_code == 2
    assert result.stderr.startswith("error: /proc/none/")
    assert "set XDG_CACHE_HOME (or HOME" in result.stderr
    assert "Errno" not in result.stderr


def test_two_sources_of_one_name_have_folders_of_their_own(encoder, tmp_path):
    other = tmp_path / "other/Tiny-Encoder"
    shutil.copytree(encoder, other)

    [[one], _], [[two], _] = find([encoder], fetching()), find([other], fetching())

    assert one.name == two.name == "tiny-encoder"
    assert one != two
    with pytest.raises(ServeError, match="both have a model tiny-encoder"):
        find([encoder, other], fetching())


ENSEMBLE = 'platform: "ensemble"\nensemble_scheduling { step [ ] }\n'


def test_models_of_a_repository_are_served_where_they_are(encoder, tmp_path):
    repository = tmp_path / "repository"
    add_model(tmp_path / "elsewhere", "v3", encoder)
    add_model(repository, "two", encoder)
    (repository / "one").symlink_to(tmp_path / "elsewhere/v3")
    (repository / "all/1").mkdir(parents=True)
    (repository / "all/config.pbtxt").write_text(ENSEMBLE)
    # a model whose weights are not there, and a folder that is no model
    (repository / "empty/1").mkdir(parents=True)
    (repository / "empty/config.pbtxt").write_text('backend: "varlen"\n')
    (repository / "notes").mkdir()

    models = [repository / name for name in ("all", "one", "two")]
    said: list[str] = []
    assert model_folders(repository, said.append) == models
    assert said == [f"{repository}/empty is left out: it has no version with files"]
    assert model_folders(repository / "one", said.append) == [repository / "one"]
    assert model_folders(encoder, said.append) == model_folders(tmp_path / "no", said.append) == []
    assert find([repository, encoder], fetching())[0][:3] == models
    with start_server(ServerCommand("/bin/echo", tmp_path), models) as server:
        links = sorted(server.model_repository.iterdir())
        assert [link.name for link in links] == ["all", "one", "two"]
        assert server.model_repository != repository
        assert (links[1] / "config.pbtxt").is_file()


def test_options_that_do_not_fit_are_refused(encoder, tmp_path):
    repository = tmp_path / "repository"
    add_model(repository, "tiny-encoder", encoder)

    for sources, how, message in [
        ([encoder, repository], fetching("a"), "--name is for one checkpoint"),
        ([repository], fetching("a"), "--name is for one checkpoint"),
        ([repository], fetching(dtype="fp32"), "have their settings in config.pbtxt"),
        ([repository], fetching(force=True), "have their settings in config.pbtxt"),
        ([repository, encoder], fetching(), "both have a model tiny-encoder"),
        (["no/such/thing"], fetching(), "there is no folder 'no/such/thing'"),
        ([encoder], fetching(task="generate"), "is not served with model_type"),
    ]:
        with pytest.raises(ServeError, match=message):
            find(sources, how)


def test_a_model_is_read_as_the_server_would_load_it(encoder, classifier, tmp_path):
    fetch(str(classifier), repository=tmp_path, name="fetched")
    add_model(tmp_path, "short", encoder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.pbtxt").write_text('backend: "onnxruntime"\n')
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong/config.pbtxt").write_text("backend varlen\n")

    assert read_model(tmp_path / "fetched") == Model("fetched", "classify", has_whole_config=True)
    assert read_model(tmp_path / "short") == Model("short", "embed")
    assert read_model(tmp_path / "other") is None
    with pytest.raises(ServeError, match=r"wrong cannot be served: .*config\.pbtxt cannot be read"):
        read_model(tmp_path / "wrong")


def test_a_request_for_a_chat_and_a_key_has_both():
    at = Addresses("127.0.0.1:8080", "127.0.0.1:8000", needs_key=True)

    words = shlex.split(curl_line(Model("writer", "generate", has_chat=True), at))

    assert words[:2] == ["curl", "127.0.0.1:8080/v1/chat/completions"]
    assert "Authorization: Bearer KEY" in words
    body = json.loads(words[-1])
    assert (body["model"], body["messages"][0]["role"]) == ("writer", "user")


def test_an_installed_server_gets_the_backend_beside_its_own(monkeypatch, tmp_path):
    server = tmp_path / "opt/bin/tritonserver"
    (tmp_path / "opt/backends/python").mkdir(parents=True)
    server.parent.mkdir()
    server.write_bytes(b"\x7fELF")
    server.chmod(0o755)
    (tmp_path / "path").mkdir()
    (tmp_path / "path/tritonserver").symlink_to(server)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))

    with server_command() as command:
        [argument] = command.arguments
        folder = Path(argument.removeprefix("--backend-directory="))
        assert (folder / "python").resolve() == tmp_path / "opt/backends/python"
        assert (folder / "varlen/model.py").is_file()
    assert not folder.exists()

    (tmp_path / "opt/backends/varlen").mkdir()
    with server_command() as command:
        assert command == ServerCommand(
            str(tmp_path / "path/tritonserver"), tmp_path / "opt/backends"
        )

    (tmp_path / "opt/backends/varlen").rmdir()
    (tmp_path / "opt/backends/python").rmdir()
    with pytest.raises(ServerError, match="has no python backend"), server_command():
        pass


def test_without_a_server_one_is_assembled(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = []
    monkeypatch.setattr(server_module, "set_up", lambda: done.append(True))

    with server_command() as command:
        assert command.arguments == ()
        assert Path(command.path).name == "tritonserver"
    assert done == [True]


def test_a_command_of_another_environment_is_no_installed_server(monkeypatch, tmp_path):
    wrapper = next(iter(_commands(tmp_path / "kit", tmp_path).items()))
    wrapper[0].write_text(wrapper[1])
    wrapper[0].chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = []
    monkeypatch.setattr(server_module, "set_up", lambda: done.append(True))

    with server_command() as command:
        assert Path(command.path).parent == Path(sys.executable).parent
    assert (wrapper[0].name, done) == ("tritonserver", [True])


def test_a_server_loads_only_the_models_that_were_asked_for(tmp_path):
    models = [tmp_path / "a/one", tmp_path / "b/two"]

    with start_server(
        ServerCommand("/bin/echo", tmp_path), models, ["--more"], first_port=7000
    ) as server:
        wait_until(lambda: not server.is_running, "the command has printed its arguments")
        arguments = server.log().split()
        served = server.model_repository
        assert [link.readlink() for link in sorted(served.iterdir())] == models

    assert [word for word in arguments if word.startswith(("--model", "--load"))] == [
        f"--model-repository={served}",
        "--model-control-mode=none",
    ]
    assert {"--more", "--http-port=7000", "--grpc-port=7001", "--metrics-port=7002"} < {*arguments}
    assert {f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")} < {*arguments}


def test_taken_ports_are_named_with_the_option():
    taken, free = free_port(), free_port()
    with socket.create_server(("127.0.0.1", taken)):
        with pytest.raises(ServeError, match=f"port {taken} is in use; give a free one: --port"):
            with Ports.taken("127.0.0.1", taken, 10):
                pass
        with pytest.raises(ServeError, match=f"port {taken} is in use; .*--server-port"):
            with Ports.taken("127.0.0.1", free, taken - 1):
                pass
    with pytest.raises(ServeError, match=f"--port {free} is one of the server's three"):
        with Ports.taken("127.0.0.1", free, free - 2):
            pass
    with pytest.raises(ServeError, match=r"cannot listen on 192\.0\.2\.1"):
        with Ports.taken("192.0.2.1", free, 10):
            pass


def free_ports() -> list[str]:
    return ["--port", str(free_port()), "--server-port", str(free_port())]


@pytest.mark.parametrize("options", [["--task=embed"], ["--set=task=embed"]])
def test_a_setting_that_is_given_twice_is_refused(encoder, cache, options):
    given = [*options, "--set=task=hidden", *free_ports()]

    result = CliRunner().invoke(app, ["serve", str(encoder), *given])

    assert result.exit_code == 2
    assert "task is embed already; set it once" in result.stderr
    assert not cache.exists()


@pytest.mark.parametrize(
    "source, message",
    [
        ("./absent", "there is no folder './absent'; give a checkpoint folder, a hub id org/name"),
        ("/absent", "there is no folder '/absent'; give a checkpoint folder, a hub id org/name"),
        ("org/a name", "there is no folder 'org/a name'; give"),
        ("org/name/more", "there is no folder 'org/name/more'; give"),
        ("bert", "there is no folder 'bert'; give"),
        ("", "there is no folder ''; give"),
        ("https://huggingface.co/org/name/tree/main", "give the hub id: org/name"),
        (
            "file.json",
            "file.json is a file, not a folder; give the checkpoint folder that holds it",
        ),
        (
            "folder",
            "folder is neither a checkpoint folder, which has config.json, nor a model or a",
        ),
        ("above", "above has no config.json; give above/tiny"),
        ("encoder --name=a/b", "the name 'a/b' cannot be a model's; allowed: letters, digits"),
        ("encoder --set=polisy=fifo", 'unknown parameter "polisy". Did you mean "policy"?'),
    ],
)
def test_a_mistake_is_refused_before_anything_is_fetched(
    encoder, cache, tmp_path, monkeypatch, source, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.json").touch()
    (tmp_path / "folder").mkdir()
    shutil.copytree(encoder, "encoder")
    shutil.copytree(encoder, "above/tiny")
    write_file(tmp_path / "above", "modules.json", [])
    source, *options = source.split(" --")

    result = CliRunner().invoke(
        app, ["serve", source, *(f"--{each}" for each in options), *free_ports()]
    )

    assert result.exit_code == 2
    # one line, without "fetching"
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not cache.exists()
