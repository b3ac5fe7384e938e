"""What memory is left, by the files of the system and of a container."""

import pytest

from varlen_kernels import machine_memory

GIB = 1 << 30


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes the files of the system; 16 GiB are available."""
    machine = tmp_path / "meminfo"
    machine.write_text(f"MemTotal: 1 kB\nMemAvailable:   {16 << 20} kB\nHugePages_Total:  0\n")
    monkeypatch.setattr(machine_memory, "_MACHINE", machine)
    monkeypatch.setattr(machine_memory, "_CONTAINER", tmp_path)

    def write(**files):
        for name, content in files.items():
            (tmp_path / f"memory.{name}").write_text(content)

    return write


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, 16 * GIB),
        ({"max": "max\n", "current": str(3 * GIB)}, 16 * GIB),
        ({"max": f"{4 * GIB}\n", "current": f"{3 * GIB}\n"}, GIB),
        # files in the cache give way
        (
            {
                "max": f"{4 * GIB}",
                "current": f"{3 * GIB}",
                "stat": f"anon 1\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        ({"max": f"{4 * GIB}", "current": f"{5 * GIB}", "stat": "anon 1\n"}, 0),
        ({"max": f"{64 * GIB}", "current": "0", "stat": "anon 1\n"}, 16 * GIB),
    ],
    ids=["no container", "no limit", "no statistics", "cached files", "all used", "large limit"],
)
def test_memory_that_is_left(write, files, expected):
    write(**files)

    assert machine_memory.free_memory() == expected


def test_a_container_limits_the_memory(write):
    whole = machine_memory.memory_limit()
    write(max="4096\n")

    assert whole > 4096
    assert machine_memory.memory_limit() == 4096
