"""Code is compiled for the highest level that a CPU has."""

from itertools import pairwise

import pytest

pytest.importorskip("llvmlite")

from varlen_kernels import CPU_LEVEL_VARIABLE
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.native import target_cpu as module
from varlen_kernels.cpu.native.target_cpu import LEVELS, best_level

_AVX2 = frozenset(
    "avx avx2 bmi bmi2 cx16 f16c fma lzcnt movbe popcnt sahf sse sse2 sse3 sse4.1 sse4.2 ssse3 xsave".split()
)
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    "features, level",
    [
        (_AVX2, "avx2"),
        (_AVX2 | {"avxvnni", "gfni"}, "avx2"),
        # the first CPUs with AVX-512 lack instructions for narrow vectors
        (_AVX2 | {"avx512f", "avx512cd"}, "avx2"),
        (_AVX512, "avx512"),
        (_AVX512 | {"avx512bf16"}, "avx512"),
        (_AVX512 | {"avx512vnni", "avx512vbmi"}, "avx512_vnni"),
        (_AVX512 | {"avx512vnni", "avx512bf16", "amx-bf16"}, "avx512_bf16"),
        (_AVX512 | {"avx512vnni", "avx512bf16", "amx-bf16", "amx-int8", "amx-tile"}, "amx"),
    ],
)
def test_a_cpu_has_the_level_whose_instruction_sets_it_has(features, level):
    assert best_level(frozenset(features)).level == level


def test_each_level_runs_the_code_of_the_next():
    for level, lower in pairwise(LEVELS):
        assert level.features > lower.features
    assert len({level.level for level in LEVELS}) == len(LEVELS)


def test_the_environment_names_a_lower_level(monkeypatch):
    monkeypatch.setenv(CPU_LEVEL_VARIABLE, "avx2")

    assert module.target_cpu.__wrapped__().level == "avx2"


@pytest.mark.parametrize("asked", [module.target_cpu, has_compiled_ops])
def test_an_unknown_level_is_an_error_that_names_the_known(monkeypatch, asked):
    monkeypatch.setenv(CPU_LEVEL_VARIABLE, "avx3")

    with pytest.raises(ValueError, match='"avx3"; allowed: amx, avx512_bf16, .*avx2$'):
        asked.__wrapped__()


@pytest.mark.parametrize(
    "features",
    [set(), {"sse2", "sse4.2", "avx"}, {"neon", "sve"}, (_AVX512 | {"avx512vnni"}) - {"fma"}],
)
def test_other_cpus_have_no_level(features):
    with pytest.raises(RuntimeError, match=r"lacks instruction sets of AVX2's level: .*fma"):
        best_level(frozenset(features))


def test_a_cpu_that_llvm_does_not_know_has_no_instruction_set(monkeypatch):
    def fail():
        raise RuntimeError("LLVM does not know it")

    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", fail)

    assert not module.features_here.__wrapped__()


@pytest.mark.parametrize("answer, has_tiles", [(0, True), (-1, False)], ids=["given", "refused"])
def test_tiles_need_the_permission_of_the_kernel(monkeypatch, answer, has_tiles):
    asked = []

    class Library:
        def syscall(self, *arguments):
            asked.append(arguments)
            return answer

    known = dict.fromkeys(["avx2", "amx-tile", "amx-int8", "amx-bf16"], True)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: known)
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _name: Library())

    assert module.features_here.__wrapped__() == ({*known} if has_tiles else {"avx2"})
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    assert asked == [(158, 0x1023, 18)]
