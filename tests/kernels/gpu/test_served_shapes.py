"""Kernels on a CUDA GPU at the sizes of a server.

Every call of the kernel benchmark matches float64, repeats its bits, is right in a CUDA graph, and is right with every
candidate launch. The interpreter is too slow for these sizes.
"""

import pytest
import torch

pytest.importorskip("triton", reason="the extra `gpu` is not installed")

from tests.closeness import relative_error
from varlen_bench.kernels.grid import DTYPES, FULL, GROUPS
from varlen_bench.kernels.timing import WARM, GpuTimer
from varlen_bench.launch_choices import collect_choices
from varlen_bench.ops.call import kernels, poison
from varlen_kernels import tuning
from varlen_kernels.reference.beam import NO_PARENT, NO_TOKEN

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MIB = 1024**2


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def fused():
    return kernels("fused")


@pytest.fixture(scope="module")
def timer(device):
    return GpuTimer(device, samples=1)


@pytest.fixture(autouse=True)
def without_gradients_or_leftovers():
    with torch.inference_mode():
        yield
    tuning.clear()
    torch.cuda.empty_cache()


def bits(result):
    return [tensor.clone() for tensor in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_call_is_right(group, kind, fused, device):
    for call in GROUPS[group](FULL, DTYPES[kind]):
        inputs = call.make(device, seed=1)
        call.prepare(fused, inputs)

        error = call.error(call.run(fused, inputs), inputs, call.exact(inputs))

        assert error <= call.max_error, call.name


@pytest.mark.parametrize("group", GROUPS)
def test_a_second_run_gives_the_same_bits(group, fused, device):
    for call in GROUPS[group](FULL, torch.bfloat16):
        inputs = call.make(device, seed=2)
        call.prepare(fused, inputs)
        first = call.run(fused, inputs)
        before = bits(first)
        for _ in range(3):
            poison(first)
            again = bits(call.run(fused, inputs))
            assert all(map(torch.equal, before, again)), call.name


@pytest.mark.parametrize("group", GROUPS)
def test_a_graph_replays_the_right_result(group, fused, device, timer):
    for call in GROUPS[group](FULL, torch.bfloat16)[:4]:
        inputs, results = call.make(device, seed=3), []
        call.prepare(fused, inputs)

        def keep(result, results=results):
            results.append(bits(result))

        timer.graph(lambda i, call=call: call.run(fused, i), [inputs], WARM, verify=keep)

        (replayed,) = results
        result = tuple(replayed) if len(replayed) > 1 else replayed[0]
        assert call.error(result, inputs, call.exact(inputs)) <= call.max_error, call.name


@pytest.mark.parametrize("group", GROUPS)
def test_every_candidate_launch_is_right(group, fused, device):
    failed = []
    for choice in collect_choices(GROUPS[group](FULL, torch.bfloat16), fused, failed.append):
        call = choice.calls[-1]
        inputs = call.make(device, seed=4)
        exact = call.exact(inputs)
        for launch in choice.launches:
            with tuning.forced_launch(choice.op, choice.key, launch):
                call.prepare(fused, inputs)
                error = call.error(call.run(fused, inputs), inputs, exact)
            assert error <= call.max_error, (choice.name, launch)
    assert failed == []


def test_rows_past_two_to_the_31_elements_are_found(fused, device):
    needs_memory(24 * 1024)
    tokens, hidden = 2**21 + 64, 1024
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
    x[-3:] = torch.randn(3, hidden, device=device)
    weight, bias = torch.ones(2, hidden, dtype=torch.bfloat16, device=device)

    normed = fused.add_layer_norm(x, x, weight, bias, eps=1e-5)
    activated = fused.activate(x, bias, kind="gelu")
    softmax = fused.masked_softmax(
        x.view(1, 1, tokens, hidden),
        torch.tensor([hidden], dtype=torch.int32, device=device),
        scale=1.0,
    )

    last = x[-3:].double()
    expected = torch.layer_norm(2 * last, (hidden,), weight.double(), bias.double(), 1e-5)
    close(normed[-3:], expected)
    close(activated[-3:], torch.nn.functional.gelu(last + 1))
    close(softmax[0, 0, -3:], last.softmax(-1))


def test_tokens_past_two_to_the_31_elements_are_attended_to(fused, device):
    needs_memory(24 * 1024)
    heads, head_dim, length = 12, 64, 128
    tokens = 2**31 // (3 * heads * head_dim) // length * length + 2 * length
    qkv = torch.zeros(tokens, 3 * heads * head_dim, dtype=torch.bfloat16, device=device)
    assert qkv.numel() > 2**31
    qkv[-length:] = torch.randn(length, qkv.shape[1], device=device)
    bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)

    out = fused.attention_varlen(qkv, bounds, num_heads=heads, scale=head_dim**-0.5)

    q, k, v = qkv[-length:].double().view(length, 3, heads, head_dim).permute(1, 2, 0, 3)
    expected = (q @ k.transpose(1, 2) * head_dim**-0.5).softmax(-1) @ v
    close(out[-length:], expected.transpose(0, 1).reshape(length, -1))


@pytest.mark.parametrize("beams", [1, 4, 64])
@pytest.mark.parametrize("vocabulary", [32_000, 50_257, 250_000, 300_000])
def test_a_beam_step_matches_a_stable_full_sort(vocabulary, beams, fused, device):
    sequences, best = 3, 2 * beams
    numbers = torch.Generator(device=device).manual_seed(vocabulary)
    logits = torch.randn(sequences * beams, vocabulary, device=device, generator=numbers)
    # multiples of a quarter have thousands of ties
    logits = (4 * logits).round() / 4
    where = torch.rand(logits.shape, device=device, generator=numbers)
    logits = logits.masked_fill(where < 0.01, float("nan")).masked_fill(where > 0.9, -torch.inf)
    logits[0] = -torch.inf
    logits = logits.bfloat16()
    running = -10 * torch.rand(sequences, beams, device=device, generator=numbers)

    found = fused.beam_step(logits, running)
    again = fused.beam_step(logits, running)

    assert all(map(torch.equal, found, again))
    known = logits.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    order = known.sort(dim=1, descending=True, stable=True)
    exact = order.values.double() - known.double().logsumexp(1, keepdim=True)
    # the candidates of a beam that is -inf throughout have score -inf
    exact = exact.nan_to_num(nan=-torch.inf).view(sequences, beams, -1)
    exact += running.double()[..., None]
    # the log of a sum turns its relative error into an absolute one; four more roundings are relative
    bound, relative = relative_error(vocabulary), relative_error(4)
    for sequence in range(sequences):
        tokens, parents, scores = (part[sequence].tolist() for part in found)
        rank = dict.fromkeys(range(beams), 0)
        for token, parent, score in zip(tokens, parents, scores, strict=True):
            if score == -torch.inf:
                # a row of only -inf has no candidates
                assert (token, parent) == (NO_TOKEN, NO_PARENT)
                continue
            # the next token of its beam by a stable sort
            row = order.indices[sequence * beams + parent]
            assert token == int(row[rank[parent]])
            expected = float(exact[sequence, parent, rank[parent]])
            assert score == expected or abs(score - expected) <= bound + relative * abs(expected)
            rank[parent] += 1
        assert scores == sorted(scores, reverse=True)
        pairs = zip(scores, scores[1:], parents, parents[1:], strict=False)
        assert all(first < second for a, b, first, second in pairs if a == b and first != second)
        # no better candidate of any beam is missing
        top = exact[sequence].flatten().topk(best).values
        torch.testing.assert_close(
            torch.tensor(scores, dtype=torch.float64), top.cpu(), rtol=relative, atol=bound
        )


def close(result, exact):
    error = torch.linalg.vector_norm(result.double() - exact) / torch.linalg.vector_norm(exact)
    assert error < 1e-2


def needs_memory(mebibytes):
    free, _ = torch.cuda.mem_get_info()
    if free < mebibytes * MIB:
        pytest.skip(f"needs {mebibytes} MiB of GPU memory; {free // MIB} are free")
