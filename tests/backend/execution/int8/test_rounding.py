"""Codes of weights whose errors cancel out, beside GPTQ with an inverse."""

import pytest
import torch

from tests.backend.models.paged import record_step
from tests.quantized import save_quantized
from varlen.execution.int8 import layer_inputs
from varlen.execution.int8.calibration import linear_weights
from varlen.execution.int8.layer_inputs import calibrate_layers, rounded_codes, stored_codes
from varlen.program.recorder import Recorder
from varlen_kernels import cpu
from varlen_kernels.cpu.calls.calls import run_function
from varlen_kernels.functions import CHOOSE_CODES
from varlen_kernels.reference.linear_int8 import OUTLIERS, WeightCodes, nearest_codes


@pytest.fixture
def numbers():
    return torch.Generator().manual_seed(0)


def related_inputs(tokens, hidden, numbers):
    """Return inputs whose columns go together, in a few directions."""
    directions = torch.randn(max(hidden // 8, 1), hidden, generator=numbers)
    few = torch.randn(tokens, len(directions), generator=numbers)
    return few @ directions + 0.1 * torch.randn(tokens, hidden, generator=numbers)


def error(weight, outliers, chosen, x):
    restored = chosen.codes * chosen.scale
    restored[outliers] = weight[outliers]
    return float((x @ (restored - weight)).square().sum())


def gptq_codes(weight, outliers, gram, scale, largest):
    """Return GPTQ's codes as in its paper, by the Cholesky factor of an inverse."""
    kept = [column for column in range(len(weight)) if column not in outliers.tolist()]
    kept.sort(key=lambda column: -float(gram[column, column]))
    rest, scale = weight[kept].double(), scale.double()
    inner = gram[kept][:, kept].double()
    inner += 0.01 * inner.diagonal().mean() * torch.eye(len(kept))
    inverse = torch.linalg.cholesky(torch.linalg.inv(inner), upper=True)
    codes = torch.zeros(weight.shape, dtype=torch.int8)
    for place, column in enumerate(kept):
        code = (rest[place] / scale).round().clamp(-largest, largest)
        codes[column] = code
        lost = (rest[place] - code * scale) / inverse[place, place]
        rest[place + 1 :] -= inverse[place, place + 1 :, None] * lost
    return codes


def codes_by_column(weight, scale, feedback, largest):
    """Return the codes of LDLQ, where each goal is a sum over all columns before."""
    codes, errors = torch.zeros_like(weight), torch.zeros_like(weight)
    for column in range(len(weight)):
        goal = weight[column] + feedback[:column, column] @ errors[:column]
        codes[column] = (goal / scale).round().clamp(-largest, largest)
        errors[column] = weight[column] - codes[column] * scale
    return codes.to(torch.int8)


@pytest.mark.parametrize("bits, largest", [(8, 127), (4, 7)])
@pytest.mark.parametrize("hidden, features", [(1, 1), (63, 5), (64, 40), (150, 33), (257, 16)])
def test_codes_of_blocks_are_those_of_single_columns(numbers, bits, largest, hidden, features):
    # powers of two and few digits: every sum is exact, in any order and with fused multiplications
    weight = torch.randint(-400, 400, (hidden, features), generator=numbers) / 64
    scale = 2.0 ** torch.randint(-6, -2, (features,), generator=numbers)
    shares = torch.randint(-4, 5, (hidden, hidden), generator=numbers) / 16
    feedback = shares.triu(1) + torch.eye(hidden)

    codes, columns = torch.empty(features, hidden, dtype=torch.int8), torch.arange(hidden)
    tensors = (weight.t(), scale, columns.int(), feedback.t(), codes)
    run_function(CHOOSE_CODES, tensors, (largest,))
    codes = codes.t()

    assert torch.equal(codes, codes_by_column(weight, scale, feedback, largest))
    if hidden > 1:
        assert (codes != (weight / scale).round().clamp(-largest, largest)).any()


@pytest.mark.parametrize("bits, largest", [(8, 127), (4, 7)])
@pytest.mark.parametrize("hidden, features", [(8, 3), (100, 40), (150, 5)])
def test_codes_are_those_of_gptq(numbers, hidden, features, bits, largest):
    weight = torch.randn(hidden, features, generator=numbers)
    x = related_inputs(300, hidden, numbers)
    outliers = torch.arange(1, 1 + OUTLIERS)

    scale, codes = rounded_codes(weight, outliers, [x.t() @ x], bits)

    expected = gptq_codes(weight, outliers, x.t() @ x, scale, largest)
    # fp32 decides another way where a value is almost half way between two codes
    assert (codes == expected).float().mean() > 0.98
    assert not codes[outliers].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_errors_on_the_inputs_are_smaller_than_those_of_the_nearest_codes(numbers, bits):
    weight, outliers = torch.randn(96, 70, generator=numbers), torch.arange(OUTLIERS)
    x = related_inputs(600, 96, numbers)
    seen, others = x[:400], x[400:]

    codes = rounded_codes(weight, outliers, [seen.t() @ seen], bits)

    nearest = nearest_codes(weight, outliers, bits)
    for inputs in (seen, others):
        assert error(weight, outliers, codes, inputs) < 0.5 * error(
            weight, outliers, nearest, inputs
        )


def test_columns_that_never_go_together_get_the_nearest_codes(numbers):
    weight, outliers = torch.randn(30, 9, generator=numbers), torch.arange(OUTLIERS)
    gram = torch.diag(torch.rand(30, generator=numbers))

    chosen, nearest = rounded_codes(weight, outliers, [gram]), nearest_codes(weight, outliers)
    assert torch.equal(chosen.codes, nearest.codes)
    assert torch.equal(chosen.scale, nearest.scale)


def test_scales_of_4_bits_have_the_smallest_error_of_the_nearest_codes(numbers):
    weight, outliers = torch.randn(200, 9, generator=numbers), torch.arange(OUTLIERS)
    gram = torch.diag(torch.rand(200, generator=numbers))
    x = gram.sqrt()

    chosen = rounded_codes(weight, outliers, [gram], 4)

    # of normal numbers, the largest is so far out that it costs more than it is worth
    whole = nearest_codes(weight, outliers, 4)
    assert (chosen.scale < whole.scale).any()
    for feature in range(9):
        column = weight[:, [feature]]
        errors = []
        for factor in (1.0, 0.9, 0.8, 0.7):
            scale = whole.scale[[feature]] * factor
            codes = (column / scale).round().clamp(-7, 7)
            errors.append(error(column, outliers, WeightCodes(scale, codes), x))
        own = WeightCodes(chosen.scale[[feature]], chosen.codes[:, [feature]])
        assert error(column, outliers, own, x) <= min(errors) * (1 + 1e-5)


@pytest.mark.parametrize("value", [0.0, 1e-30])
def test_columns_without_values_have_codes(numbers, value):
    weight, outliers = torch.randn(20, 9, generator=numbers), torch.arange(OUTLIERS)

    chosen = rounded_codes(weight, outliers, [torch.full((20, 20), value)])

    assert chosen.codes.abs().max() <= 127


def test_many_features_have_the_codes_that_they_have_alone(numbers, monkeypatch):
    monkeypatch.setattr(layer_inputs, "_FEATURES", 4)
    weight, outliers = torch.randn(40, 10, generator=numbers), torch.arange(OUTLIERS)
    x = related_inputs(100, 40, numbers)
    gram = x.t() @ x

    alone = [rounded_codes(weight[:, i : i + 1], outliers, [gram]).codes for i in range(10)]

    assert torch.equal(rounded_codes(weight, outliers, [gram]).codes, torch.cat(alone, 1))


@pytest.mark.parametrize(
    "batches, most, passes", [(1, 1, 1), (2, 2**20, 1), (2, 1600, 3), (4, 1, 3)]
)
@pytest.mark.parametrize("cores", [1, 3])
def test_layers_are_observed_as_memory_allows(numbers, monkeypatch, batches, most, passes, cores):
    monkeypatch.setattr(layer_inputs, "_MOST_SUMS", most)
    weights = [torch.randn(40, 40, generator=numbers) for _ in range(3)]
    ops = Recorder()
    hidden = ops.input("x", ("tokens", 40), torch.float32)
    for weight in weights:
        hidden = ops.linear(hidden, weight, None)
    program = ops.finish(hidden)
    x = related_inputs(200, 40, numbers)
    runs = []

    def run(kernels):
        runs.append(kernels)
        for batch in x.chunk(batches):
            # an arena has other values in the same memory later
            values, room = batch, torch.empty(2, *batch.shape)
            for i, weight in enumerate(weights):
                values = kernels.linear(values, weight, out=room[i % 2])

    layers = calibrate_layers([program], [program], run, batches=batches, cores=cores)

    assert len(runs) == passes
    inputs = x
    for weight, layer in zip(weights, layers.values(), strict=True):
        expected = rounded_codes(weight, layer.outliers, [inputs.t() @ inputs])
        # sums in another order decide another way where a value is almost half way between two codes
        assert (layer.codes == expected.codes).float().mean() > 0.98
        outputs = cpu.linear(inputs, weight)
        restored = layer.codes * layer.scale
        restored[layer.outliers] = weight[layer.outliers]
        assert 0 < layer.error < 0.05
        assert float((inputs @ restored - outputs).norm() / outputs.norm()) < 0.05
        inputs = outputs


def test_wide_inputs_are_corrected_in_parts(numbers, monkeypatch):
    monkeypatch.setattr(layer_inputs, "_TOGETHER", 16)
    weight = torch.randn(40, 9, generator=numbers)
    ops = Recorder()
    program = ops.finish(ops.linear(ops.input("x", ("tokens", 40), torch.float32), weight, None))
    x = related_inputs(200, 40, numbers)

    (layer,) = calibrate_layers(
        [program], [program], lambda kernels: kernels.linear(x, weight)
    ).values()
    outliers, chosen = layer.outliers, WeightCodes(layer.scale, layer.codes)

    for part in (slice(0, 14), slice(14, 27), slice(27, 40)):
        is_other = torch.ones(40, dtype=torch.bool)
        is_other[part] = False
        others = torch.cat([outliers, is_other.nonzero()[:, 0]]).unique()
        expected = gptq_codes(weight, others, x.t() @ x, chosen.scale, 127)
        # columns of other parts change the damping a little
        assert (chosen.codes[part] == expected[part]).float().mean() > 0.9
    nearest = nearest_codes(weight, outliers)
    assert error(weight, outliers, chosen, x) < error(weight, outliers, nearest, x)


@pytest.mark.parametrize("bits", [8, 4])
def test_inputs_that_are_not_finite_leave_the_nearest_codes(numbers, bits):
    weight, outliers = torch.randn(20, 9, generator=numbers), torch.arange(OUTLIERS)

    chosen = rounded_codes(weight, outliers, [torch.full((20, 20), torch.nan)], bits)

    assert torch.equal(chosen.codes, nearest_codes(weight, outliers, bits).codes)


@pytest.mark.parametrize("bits, most", [(8, 127), (4, 7)])
def test_a_weight_that_was_widened_keeps_its_codes(numbers, bits, most):
    codes = torch.randint(-most, most + 1, (150, 9), generator=numbers)
    codes[100] = most
    # the largest code of the second feature is the lowest one; the third feature has none
    codes[100, 1], codes[:, 2] = -most - 1, 0
    scale = torch.rand(9, generator=numbers) + 0.01
    outliers = torch.arange(3, 3 + OUTLIERS)

    found = stored_codes(codes * scale, outliers, bits)

    assert torch.equal(found.codes, codes.index_fill(0, outliers, 0).to(torch.int8))
    kept = [0, 1, *range(3, 9)]
    torch.testing.assert_close(found.scale[kept], scale[kept], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
def test_other_weights_have_no_stored_codes(numbers, bits):
    outliers = torch.arange(OUTLIERS)
    weight = torch.randn(150, 9, generator=numbers)
    assert stored_codes(weight, outliers, bits) is None

    codes = torch.randint(-7, 8, (150, 9), generator=numbers).float()
    codes[140] = 7.0
    # beyond the part that is looked at first
    codes[120, 3] = 1.3
    assert stored_codes(codes, outliers, bits) is None


@pytest.mark.parametrize(
    "form, bits", [("int8", 8), ("llm-int8", 8), ("packed-8", 8), ("packed-4-channel", 4)]
)
def test_layers_of_a_quantized_checkpoint_keep_their_codes(tmp_path, form, bits):
    save_quantized(tmp_path, form)
    program, _, _ = record_step(tmp_path, 8, 4, torch.float32)
    outliers = torch.arange(OUTLIERS)

    found = [
        stored_codes(weight, outliers, bits) is not None
        for weight, _ in linear_weights([program]).values()
    ]

    # the output layer stays as it is
    assert found == [*[True] * (len(found) - 1), False]
