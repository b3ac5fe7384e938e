"""Machine code of every kernel for the A100 and the H100/H200, with every candidate launch."""

from contextlib import ExitStack
from inspect import isfunction
from itertools import zip_longest
from pathlib import Path

import pytest

from varlen_bench.dry_run import dry_run
from varlen_bench.inspect_kernels import (
    ARCHES,
    ceiling_files,
    compile_call,
    problems,
    read_ceilings,
)
from varlen_bench.kernels.grid import DTYPES, FULL, GROUPS, calls_of
from varlen_bench.launch_choices import collect_choices
from varlen_bench.machine_code import read_machine_code
from varlen_bench.ops.call import kernels
from varlen_bench.ops.compiled import COMPILED as CALLS
from varlen_bench.ops.table import TABLE
from varlen_kernels import reference, tuning

PROJECT = Path(__file__).resolve().parents[3]

CASES = [
    pytest.param(call, dtype, arch, id=f"{call.name}-{str(dtype)[6:]}-sm_{arch}")
    for call in CALLS
    for dtype in call.dtypes
    for arch in ARCHES
]
CEILINGS = {figure: read_ceilings(PROJECT / file) for figure, file in ceiling_files().items()}
# Calls whose rows allow 128-bit loads, as the calls of a server do.
ALIGNED_CALLS = [call for call in CALLS if call.narrow_loads is not None]


@pytest.mark.parametrize("call, dtype, arch", CASES)
def test_machine_code_keeps_to_its_limits(call, dtype, arch):
    codes = compile_call(call, dtype, arch)

    assert problems(call, dtype, codes, CEILINGS) == []


@pytest.mark.skipif(
    tuning.minor_version() == "3.6",
    reason="one candidate of two ops spills under 3.6 (decision 0009)",
)
@pytest.mark.parametrize("call", ALIGNED_CALLS, ids=lambda call: call.name)
def test_every_candidate_launch_fits_an_h200(call):
    dtype = call.dtypes[-1]
    with dry_run(90), tuning.record_picks() as picks:
        call.run(dtype)
    candidates = [
        [(op, key, launch) for launch in candidate_launches(*key)]
        for op, key, candidate_launches in picks
    ]

    # one launch of each op at a time; the test above compiles the first
    for launches in list(zip_longest(*candidates))[1:]:
        with ExitStack() as stack:
            for launch in launches:
                if launch is not None:
                    stack.enter_context(tuning.forced_launch(*launch))
            with dry_run(90) as compiled:
                call.run(dtype)
        for compilation in compiled:
            # a launch that needs too much shared memory has failed by now
            assert read_machine_code(compilation).stack_bytes == 0, f"{launches} spill"


def test_call_names_are_unique():
    names = [call.name for call in CALLS]

    assert len(set(names)) == len(names)


def test_every_op_with_a_kernel_has_a_call():
    launchers = {
        name
        for name, op in vars(kernels("fused")).items()
        if isfunction(op) and op is not getattr(reference, name, None)
    }

    assert {call.op for call in CALLS} == launchers
    assert set(TABLE) == launchers


def test_every_ceiling_belongs_to_a_listed_call():
    listed = {(call.name, str(dtype)[6:]) for call in CALLS for dtype in call.dtypes}
    written = {(where.call, where.dtype) for limits in CEILINGS.values() for where in limits}

    assert written <= listed


def test_the_shipped_table_holds_only_candidate_launches(monkeypatch):
    monkeypatch.undo()
    calls = calls_of(FULL, list(GROUPS), list(DTYPES))
    choices = collect_choices(calls, kernels("fused"), pytest.fail)
    allowed = {(choice.op, tuning.key_text(choice.key)): choice.launches for choice in choices}

    shipped = [
        (f"{gpu}, triton {version}", op, key, launch)
        for gpus in tuning.parse_tables(tuning._text()).values()
        for gpu, versions in gpus.items()
        for version, table in versions.items()
        for op, launches in table.items()
        for key, launch in launches.items()
    ]
    assert shipped
    for name, op, key, launch in shipped:
        assert launch in allowed.get((op, key), []), f"{name}: {op} {key}"
