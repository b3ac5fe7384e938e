"""The kernel benchmark without a GPU: calls, failing systems, and a dry run."""

import csv
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from tests.checkpoints import save_checkpoint
from varlen.execution.packing import largest_dims
from varlen.memory.planner import Layout, Region
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_encoder
from varlen.program.recorder import Recorder
from varlen_bench.kernels import peers, report
from varlen_bench.kernels.__main__ import app
from varlen_bench.kernels.encoder import SingleOpKernels, with_own_tables
from varlen_bench.kernels.grid import FULL, GROUPS, QUICK, TINY, is_compiled, packed_lengths
from varlen_bench.kernels.machine import Budget, DeviceLostError, fake_machine
from varlen_bench.kernels.measure import COPY, OURS, measure
from varlen_bench.kernels.op_peers import peers_of
from varlen_bench.kernels.peers import Peer, Peers, Unavailable
from varlen_bench.ops.call import kernels
from varlen_bench.ops.table import TABLE, op_call

pytestmark = pytest.mark.full

CPU = torch.device("cpu")
LONG = Budget(1e6)
CALL = op_call("add_layer_norm", torch.float32, tokens=4, hidden=8)
TORCH = peers_of(CALL).systems[0]
# rows are appended to the files of earlier revisions
COLUMNS = (
    "gpu driver copy_gb_per_s op shape dtype system sets graph_us graph_us_p20 graph_us_p80 graph_passes"
    " eager_us eager_us_p20 eager_us_p80 eager_passes bytes gb_per_s copy_fraction tflops tokens_per_second"
    " vs_best_peer error note"
)


def results_of(call=CALL, *systems, peers=None, budget=LONG):
    """Return the results of a call by system; torch is the default peer."""
    machine = fake_machine()
    peers = peers or Peers((TORCH, *systems))
    found = measure(call, partial(call.run, machine.kernels), peers, machine, budget)
    return {r.system: r for r in found}


# calls


def test_packed_lengths_sum_up_within_bounds_and_repeat():
    lengths = packed_lengths(8192, 5, 500)

    assert sum(lengths) == 8192
    assert max(lengths) <= 500
    assert min(lengths[:-1]) >= 5
    assert lengths == packed_lengths(8192, 5, 500)


def test_the_full_grid_has_the_shapes_of_the_paper_and_of_servers():
    softmax, norms, beams = (
        {call.shape for call in GROUPS[group](FULL, torch.bfloat16)}
        for group in ("softmax", "layernorm", "beam")
    )

    for length in (10, 20, 40, 60, 80, 100, 200, 300, 400, 500):
        for batch in (1, 20):
            assert f"{batch}x12x{length}x{length}" in softmax
            assert f"{batch}x{length}x768" in norms
    assert norms >= {"8192x384", "8192x768", "8192x1024"}
    assert beams == {f"{n}x4x{v}" for n in (1, 8, 32, 128) for v in (32_000, 250_000)}
    assert report.BEAM_SHAPE in beams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", TABLE)
def test_the_reference_matches_the_exact_result_of_a_call(op, dtype):
    call = op_call(op, dtype, lengths=[5, 1, 9])

    assert call.error_of(kernels("reference"), "cpu", 0) <= call.max_error


@pytest.mark.parametrize("op", TABLE)
def test_an_exact_result_is_not_rounded_to_fp32_and_no_input_is_written(op):
    call = op_call(op, torch.float32, lengths=[5, 1, 9])
    inputs, same = call.make("cpu", 0), call.make("cpu", 0)

    exact = call.exact(inputs)

    # copies and tiles have no error
    if call.max_error:
        assert (exact != exact.float().double()).any()
    for before, after in zip(tree_leaves(same), tree_leaves(inputs), strict=True):
        assert after is before is None or torch.allclose(after, before, 0, 0, equal_nan=True)


@pytest.mark.parametrize("calls", GROUPS.values(), ids=GROUPS)
def test_our_ops_and_torch_are_right_on_every_call(calls):
    for call in calls(TINY, torch.float32):
        found = results_of(call, peers=peers_of(call))

        for system, row in found.items():
            if system == OURS or system.startswith(("torch", "compile")) or system == "sdpa":
                assert row.note == "", row
                assert row.error <= call.max_error
                assert row.graph is not None


def test_attention_is_measured_as_served_with_unused_slots():
    calls = GROUPS["attention"](FULL, torch.bfloat16)
    served = [call for call in calls if "8192 of" in call.shape]

    # three distributions of lengths, three widths
    assert len(served) == 9
    for call in served:
        assert len(call.make_empty()["cu_seqlens"]) > len(call.lengths) + 1


def test_torch_compile_is_a_peer_at_selected_shapes():
    calls = [call for group in GROUPS.values() for call in group(FULL, torch.bfloat16)]
    shapes = [call.shape for call in calls if is_compiled(call, FULL)]

    assert [shape for shape in shapes if " 12x64" in shape] == ["8192 packed 12x64"]
    assert "8192x3072" in shapes
    assert "20x500x3072" not in shapes
    assert "20x500x768" in shapes
    assert not any(is_compiled(call, QUICK) for call in calls)
    kinds = {peer.name for peer in peers_of(CALL, compiled=False).systems}
    assert kinds == {"torch", "liger"}


def test_bytes_moved_are_the_fewest_possible():
    norm = op_call("add_layer_norm", torch.bfloat16, tokens=10_000)
    full = op_call("masked_softmax", torch.bfloat16, lengths=[500] * 20)
    part = op_call("masked_softmax", torch.bfloat16, lengths=[1, 3], keys=4, heads=2)

    assert norm.bytes_moved == 3 * 10_000 * 768 * 2 + 2 * 768 * 2
    assert full.bytes_moved == 2 * 20 * 12 * 500 * 500 * 2
    # masked keys are written as zeros, but not read
    assert part.bytes_moved == (2 * 4 * (1 + 3) + 2 * 2 * 4 * 4) * 2


def test_a_misspelled_size_is_refused():
    with pytest.raises(TypeError, match=r"add_layer_norm has no sizes or options hiden$"):
        op_call("add_layer_norm", torch.float32, tokens=4, hiden=8)


# measuring


def raising(error):
    def build(_):
        raise error

    return build


def right_once(_):
    """Return a call whose result is right only the first time."""
    calls = []
    return lambda inputs: calls.append(1) or CALL.exact(inputs).float() + (len(calls) > 1)


def constant(value):
    return lambda _: lambda inputs: torch.full_like(inputs["x"], value)


@pytest.mark.parametrize(
    "peer, note, times",
    [
        (Peer("", raising(RuntimeError("no\nkernel"))), "failed: RuntimeError: no", []),
        (Peer("", raising(Unavailable("ImportError: x"))), "not available: ImportError: x", []),
        (Peer("", constant(0.0)), "wrong: an error of 1, allowed 5e-06", []),
        (Peer("", constant(torch.nan)), "wrong: an error of inf, allowed 5e-06", []),
        (Peer("", lambda _: lambda inputs: torch.ones(2)), "wrong: an error of inf", []),
        (
            Peer("", right_once),
            "in a graph failed: ValueError: replayed with an error of",
            ["eager"],
        ),
        (replace(TORCH, no_graph="the host waits"), "not in a graph: the host waits", ["eager"]),
        (replace(TORCH, compile_seconds=2e6), "skipped: less than 2000000 s of the budget", []),
    ],
    ids="raises missing zeros nan shape replay waits slow".split(),
)
def test_a_failing_peer_gets_a_row_with_the_reason(peer, note, times):
    found = results_of(CALL, replace(peer, name="peer"))
    row = found["peer"]

    assert row.note.startswith(note)
    assert [name for name in ("graph", "eager") if getattr(row, name)] == times
    assert (row.best is None) == (not times)
    assert all(found[system].graph for system in (OURS, "torch", COPY))


def test_a_spent_budget_skips_the_call():
    found = results_of(budget=Budget(100, clock=iter([0, 101]).__next__))

    assert {s: r.note for s, r in found.items()} == {OURS: "skipped: the budget of 100 s is spent"}


def test_a_lost_device_ends_the_measurement_after_its_row():
    class Lost(SimpleNamespace):
        def stop_if_lost(self, after):
            raise DeviceLostError(after)

    machine = fake_machine()
    fields = ("device", "timer", "compile", "kernels")
    lost = Lost(**{name: getattr(machine, name) for name in fields})
    found = measure(CALL, partial(CALL.run, machine.kernels), Peers(), lost, LONG)

    assert next(found).system == OURS
    with pytest.raises(DeviceLostError, match="add_layer_norm 4x8 float32, varlen"):
        next(found)


def test_liger_is_called_with_the_tensors_of_a_call(monkeypatch):
    missing = peers.liger_peer("no_such_function", lambda function, inputs: function(inputs))
    with pytest.raises(Unavailable, match="liger_kernel|no_such_function"):
        missing.build(lambda function: function)
    fake = SimpleNamespace(
        liger_softmax=lambda x: x.softmax(-1),
        liger_layer_norm=lambda x, w, b, eps: torch.layer_norm(x, w.shape, w, b, eps),
        liger_fused_add_rms_norm=lambda x, r, w, eps: (
            torch.rms_norm(x + r, w.shape, w, eps),
            x + r,
        ),
        liger_swiglu=lambda a, b: torch.nn.functional.silu(a) * b,
    )
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: fake)
    for group in ("softmax", "layernorm", "rmsnorm", "activation"):
        for call in GROUPS[group](TINY, torch.float32):
            known = peers_of(call)
            liger = tuple(peer for peer in known.systems if peer.name == "liger")
            if liger:
                found = results_of(call, peers=replace(known, systems=liger))
                assert found["liger"].graph


def test_single_op_kernels_run_one_op_and_skip_the_others():
    ran = []
    fake = SimpleNamespace(linear=lambda *_, out, **__: ran.append("linear") or out)
    only, x = SingleOpKernels(fake, "linear"), torch.ones(1)

    assert only.linear(x, out=x) is x
    assert only.activate(x, kind="gelu", out=x) is x
    assert ran == ["linear"]


def test_no_buffer_overlaps_a_table_that_is_read_by_an_op_without_the_others(tmp_path):
    encoder = load_encoder(Checkpoint.open(save_checkpoint(tmp_path)), torch.float32, CPU)
    ops = Recorder(for_gpu=True)
    program = ops.finish(encoder.record(ops))
    dims = largest_dims(256, 8)
    (table,) = {op.results[0] for op in program.ops if op.kernel == "attention_tiles"}
    planned = Layout(program.buffers, 64).plan(dims)

    region = with_own_tables(program, Region(torch.empty(planned.footprint), planned.offsets), dims)

    places = {
        buffer: range(begin, begin + buffer.size.at(dims))
        for buffer, begin in zip(program.buffers, region.offsets, strict=True)
    }
    (own,) = [
        place for buffer, place in places.items() if program.usage_of[table.name] in buffer.usages
    ]
    others = [place for place in places.values() if place != own]
    assert len(own)
    assert own.stop <= len(region.memory)
    assert all(own.start >= each.stop or own.stop <= each.start for each in others)
    assert all(begin % 64 == 0 for begin in region.offsets)


# the command


def test_without_a_gpu_the_command_skips(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    done = CliRunner().invoke(app)

    assert done.exit_code == 0
    assert done.output.startswith("bench-kernels: skipped, torch finds no CUDA GPU")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_measures_everything_and_writes_only_to_the_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    done = CliRunner().invoke(app, ["--dry-run", "--only", "beam,encoder", "--output", "rows.csv"])

    assert done.exit_code == 0, done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("BENCH kernels: gpu=none_(dry_run) softmax_frac=n/a")
    keys = dict(word.split("=", 1) for word in last.split()[2:])
    assert float(keys["encoder_vs_best"]) > 0
    assert float(keys["beam_vs_torch"]) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    with (tmp_path / "rows.csv").open() as file:
        rows_of = list(csv.DictReader(file))
    assert {row["op"] for row in rows_of} == {
        "beam_step", "encoder", "encoder-host", "encoder-share"
    }  # fmt: skip
    assert " ".join(rows_of[0]).endswith(f"command {COLUMNS}")
    assert {row["gpu"] for row in rows_of} == {"none (dry run)"}
    assert all("--dry-run" in row["command"] for row in rows_of)
    encoders = {row["system"]: row for row in rows_of if row["op"] == "encoder"}
    assert float(encoders[OURS]["error"]) < 0.045
    assert float(encoders["sdpa-sorted-4"]["tokens_per_second"]) > 0
    assert "eager-arrival-1" in encoders
