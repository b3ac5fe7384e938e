"""What every kernel becomes on an A100 and on an H100 or H200, for its listed calls and all its candidate launches."""

from contextlib import ExitStack
from inspect import isfunction
from itertools import zip_longest

import pytest

from varlen_bench.dry_run import dry_run
from varlen_bench.kernel_limits import ARCHES, CEILINGS, compile_call, problems, read_ceilings
from varlen_bench.machine_code import read_machine_code
from varlen_bench.ops.any_batch import ANY_BATCH
from varlen_bench.ops.call import kernels
from varlen_bench.ops.compiled import COMPILED as CALLS
from varlen_kernels import reference, tuning
from varlen_tools.setup_server import PROJECT

CASES = [
    pytest.param(call, dtype, arch, id=f"{call.name}-{str(dtype)[6:]}-sm_{arch}")
    for call in CALLS
    for dtype in call.dtypes
    for arch in ARCHES
]
# Of rows that load 128 bits at once, as all that serve do.
ALIGNED_CALLS = [call for call in CALLS if call.narrow_loads is not None]


@pytest.mark.parametrize("call, dtype, arch", CASES)
def test_machine_code_keeps_to_its_limits(call, dtype, arch):
    codes = compile_call(call, dtype, arch)

    assert problems(call, dtype, codes, read_ceilings(PROJECT / CEILINGS)) == []


@pytest.mark.parametrize("call", ALIGNED_CALLS, ids=lambda call: call.name)
def test_every_candidate_launch_fits_an_h200(call):
    dtype = call.dtypes[-1]
    with dry_run(90), tuning.watch() as asked:
        call.run(dtype)
    candidates = [[(op, key, launch) for launch in list_of(*key)] for op, key, list_of in asked]

    # one launch of each op at a time: the first is what the test above compiles
    for launches in list(zip_longest(*candidates))[1:]:
        with ExitStack() as stack:
            for choice in launches:
                if choice is not None:
                    stack.enter_context(tuning.forced(*choice))
            with dry_run(90) as compiled:
                call.run(dtype)
        for compilation in compiled:
            # what needs more shared memory than there is has failed by now
            assert read_machine_code(compilation).stack_bytes == 0, f"{launches} spill"


def test_names_are_used_once():
    names = [call.name for call in CALLS]

    assert len(set(names)) == len(names)


def test_every_op_that_has_a_kernel_is_called():
    launchers = {
        name
        for name, op in vars(kernels("fused")).items()
        if isfunction(op) and op is not getattr(reference, name, None)
    }

    assert {call.op for call in CALLS} == launchers
    assert set(ANY_BATCH) == launchers


def test_no_ceiling_is_left_of_a_call_that_is_gone():
    listed = {(call.name, str(dtype)[6:]) for call in CALLS for dtype in call.dtypes}
    written = {(where.call, where.dtype) for where in read_ceilings(PROJECT / CEILINGS)}

    assert written <= listed


def test_the_table_that_is_shipped_holds_candidates_alone(monkeypatch):
    monkeypatch.undo()
    tables = tuning.parse_tables(tuning._text())
    if not tables:
        pytest.skip("tuning.json holds no launch yet")
    with dry_run(90), tuning.watch() as asked:
        for call in CALLS:
            for dtype in call.dtypes:
                call.run(dtype)

    for op, key, candidates in asked:
        for gpu, versions in tables.items():
            for version, table in versions.items():
                launch = table.get(op, {}).get(tuning.spell(key))
                assert launch is None or launch in candidates(*key), f"{gpu}, triton {version}"
