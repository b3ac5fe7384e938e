"""Compiled code is stored under all sources, and all of it can be compiled ahead."""

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import numba

from tests.checkpoints import save_checkpoint
from varlen import Encoder, Generator
from varlen_kernels import cpu
from varlen_kernels.cpu import compile_all, stored_code

# Runs a stored function and prints how often its code was loaded.
_LOADED = (
    "from varlen_kernels.cpu import calls; calls.compile_calls();"
    "print(sum(calls._run_alone.stats.cache_hits.values()))"
)


def stored_functions():
    """Return the functions of the package that numba stores, by name."""
    names = [module.name for module in pkgutil.iter_modules(cpu.__path__)]
    modules = [importlib.import_module(f"varlen_kernels.cpu.{name}") for name in names]
    found = {}
    for module in modules:
        for each in vars(module).values():
            if isinstance(each, numba.core.dispatcher.Dispatcher) and each.stats.cache_path:
                found[f"{each.py_func.__module__}.{each.py_func.__name__}"] = each
    return found


def signatures():
    return {name: set(each.signatures) for name, each in stored_functions().items()}


def test_every_stored_function_is_compiled_ahead_and_models_need_no_other(tmp_path):
    for compile_unit in compile_all.UNITS.values():
        compile_unit()

    # those that only compiled code calls are stored, but not loaded
    functions = stored_functions().items()
    assert [name for name, each in functions if not each._cache._cache_file._load_index()] == []
    ahead = signatures()
    encoder = save_checkpoint(tmp_path / "bert")
    decoder = save_checkpoint(tmp_path / "gpt2", "GPT2LMHeadModel")
    for dtype in ("fp32", "bf16", "int8"):
        with Encoder.from_pretrained(encoder, device="cpu", dtype=dtype) as model:
            model.embed([[1, 2, 3], [4]])
    with Generator.from_pretrained(decoder, device="cpu") as model:
        model.generate([[1, 2, 3]], max_tokens=2)
    assert signatures() == ahead


def test_a_change_of_any_file_compiles_again(tmp_path):
    package = tmp_path / "varlen_kernels"
    shutil.copytree(
        Path(cpu.__path__[0]).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )

    def loaded():
        command = [sys.executable, "-c", _LOADED]
        environment = {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert [loaded(), loaded()] == [0, 1]
    with (package / "cpu" / "lanes.py").open("a") as file:
        file.write("# changed\n")
    assert [loaded(), loaded()] == [0, 1]


def test_functions_of_others_are_stored_as_numba_does(tmp_path, monkeypatch):
    (tmp_path / "foreign.py").write_text(
        "import numba\n\n\n@numba.njit(cache=True)\ndef add(x):\n    return x + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    add = importlib.import_module("foreign").add

    assert add(1) == 2
    locators = {each: each._cache._impl.locator for each in (add, *stored_functions().values())}
    stamps = {each: locator.get_source_stamp() for each, locator in locators.items()}
    assert stamps.pop(add) != stored_code.source_hash()
    assert set(stamps.values()) == {stored_code.source_hash()}


def test_a_function_is_compiled_by_one_unit_only():
    """Two processes that compile one function at a time would mix their files up."""
    command = "from tests.kernels.cpu.test_stored_code import print_units; print_units()"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=root, capture_output=True, text=True, check=True
    )

    lines = [line for line in done.stdout.splitlines() if line.startswith("varlen_kernels")]
    assert len(lines) > len(compile_all.UNITS)
    assert sorted(lines) == sorted(set(lines))


def print_units():
    """Print the functions of each unit, which runs in a process of its own."""
    compile_all.has_numba()
    before = signatures()
    for compile_unit in compile_all.UNITS.values():
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            continue
        compile_unit()
        new = [name for name, found in signatures().items() if found - before[name]]
        print("\n".join(new), flush=True)
        os._exit(0)
