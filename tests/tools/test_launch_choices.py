"""Candidate launches are listed without a compilation, and compiled in other processes."""

from functools import partial

import pytest

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

from varlen_bench.dry_run import dry_run
from varlen_bench.kernels.grid import FULL, GROUPS, TINY, calls_of
from varlen_bench.launch_choices import (
    candidate_runs,
    collect_choices,
    compile_ahead,
    default_runs,
    run_empty,
)
from varlen_bench.ops.call import kernels

pytestmark = pytest.mark.full


def fail():
    raise RuntimeError("no such kernel")


def one_failing_and_one_real_run():
    return [fail, candidate_runs(TINY, ["rmsnorm"], ["bf16"])[0]]


def test_the_choices_of_the_whole_benchmark_are_found_without_compiling():
    failed = []
    calls = calls_of(FULL, list(GROUPS), ["bf16"])

    # without a GPU, a launch would fail
    choices = collect_choices(calls, kernels("fused"), failed.append)

    assert failed == []
    ops = {choice.op for choice in choices}
    assert ops >= {"masked_softmax", "add_layer_norm", "attention_varlen", "beam_step", "activate"}
    assert len(candidate_runs(FULL, list(GROUPS), ["bf16"])) == sum(
        len(choice.launches) for choice in choices
    )


def test_a_launch_compiled_ahead_is_found_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    runs = one_failing_and_one_real_run

    with compile_ahead(runs, 2, "sm_90", processes=1) as compiling:
        too_early = compiling.wait([0, 1], seconds=0)
        failed, succeeded = (compiling.wait([number], seconds=100) for number in (0, 1))

    assert (too_early, failed, succeeded) == (0, 0, 1)
    with dry_run(90) as compiled:
        runs()[1]()
    assert [compilation.cached for compilation in compiled] == [True]


@pytest.mark.parametrize("capability, processes", [("sm_75", 4), ("none", 4), ("sm_90", 0)])
def test_nothing_is_compiled_for_an_unknown_gpu_or_without_processes(capability, processes):
    with compile_ahead(one_failing_and_one_real_run, 2, capability, processes) as compiling:
        assert compiling.wait([0, 1], seconds=100) == 0


def test_default_runs_launch_every_kernel_of_the_benchmark_once():
    def compiled_by(runs):
        with dry_run(90) as compiled:
            for run in runs:
                run()
        return {(c.kernel, c.ptx) for c in compiled}

    runs = default_runs(TINY, ["layernorm"], ["bf16"])
    calls = calls_of(TINY, ["layernorm"], ["bf16"])

    assert len(runs) < len(calls)
    assert compiled_by(runs) == compiled_by([partial(run_empty, call) for call in calls])
