"""The command `tritonserver`: loopback unless told otherwise, and words for what would go wrong."""

import socket
import sys
from pathlib import Path

import pytest

from varlen_tools.run_server import (
    check_folder,
    check_numpy,
    check_ports,
    options,
    server_arguments,
    server_environment,
)

KIT = Path("/kit")


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_binds_to_loopback_finds_its_backends_and_lets_no_client_change_it():
    given = options(server_arguments(["--model-repository", "models"], KIT))

    rule = "shared-memory,trace,logging:closed:to-all=clients"
    assert given == {
        "http-restricted-api": rule,
        "grpc-restricted-protocol": rule,
        "backend-directory": "/kit/backends",
        "http-address": "127.0.0.1",
        "grpc-address": "127.0.0.1",
        "metrics-address": "127.0.0.1",
        "model-repository": "models",
    }


@pytest.mark.parametrize("spelling", [["--http-address=0.0.0.0"], ["--http-address", "0.0.0.0"]])
def test_an_address_that_is_given_stays(spelling):
    assert options(server_arguments(spelling, KIT))["http-address"] == "0.0.0.0"
    assert options(server_arguments(spelling, KIT))["grpc-address"] == "127.0.0.1"


def test_a_restriction_that_is_given_stays():
    given = options(server_arguments(["--http-restricted-api=trace:a=b"], KIT))

    assert given["http-restricted-api"] == "trace:a=b"
    assert given["grpc-restricted-protocol"].startswith("shared-memory,")


@pytest.mark.parametrize("endpoint", ["http", "grpc", "metrics"])
def test_a_taken_port_is_named_with_its_option_unless_its_endpoint_is_off(endpoint, taken_port):
    arguments = [*free("http", "grpc", "metrics"), f"--{endpoint}-port={taken_port}"]

    with pytest.raises(
        ValueError, match=f"port {taken_port} is in use; pass --{endpoint}-port with a free one"
    ):
        check_ports(arguments)
    check_ports([*arguments, f"--allow-{endpoint}=false"])


def test_a_port_that_just_ended_is_free():
    with socket.socket() as listener:
        # As servers do, the one that ended had this option set.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            # This end closes first and keeps the port in TIME_WAIT.
            accepted.close()
            client.recv(1)

    check_ports([*free("grpc", "metrics"), f"--http-port={port}"])


@pytest.mark.parametrize("port", ["http", "0", "70000", "-1"])
def test_a_port_that_is_no_port_is_refused(port):
    with pytest.raises(ValueError, match="give a number from 1 to 65535"):
        check_ports([f"--http-port={port}"])


def test_refuses_a_folder_whose_model_py_would_be_imported_instead(tmp_path):
    check_folder(tmp_path)
    (tmp_path / "model.py").touch()

    with pytest.raises(ValueError, match="start the server from another folder"):
        check_folder(tmp_path)


def test_refuses_a_numpy_with_which_texts_arrive_as_other_bytes():
    # Found by the demo: "A man is eating food." has 21 bytes, and its length arrived as 0x15151515.
    check_numpy("1.26.4")

    with pytest.raises(ValueError, match="works with numpy 1 only: .* -m pip install 'numpy<2'"):
        check_numpy("2.4.6")


def test_the_stub_finds_this_environment_and_no_other():
    environment = server_environment(KIT, {"PATH": "/usr/bin", "PYTHONHOME": "/usr", "KEPT": "1"})

    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert environment["LD_LIBRARY_PATH"].startswith("/kit/lib")
    assert "PYTHONHOME" not in environment
    assert environment["KEPT"] == "1"


def free(*endpoints: str) -> list[str]:
    """Return arguments that give each endpoint a free port."""
    arguments = []
    for endpoint in endpoints:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            arguments.append(f"--{endpoint}-port={probe.getsockname()[1]}")
    return arguments
