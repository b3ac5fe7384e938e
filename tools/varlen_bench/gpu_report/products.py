"""Matrix products of an encoder in both layouts, and GELU in them.

Our weights are [in, out], a checkpoint's are [out, in]. GELU is a pass of its own, or in its tanh form the epilogue
of the product.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F  # noqa: N812  # as everyone writes it
from torch import Tensor

from varlen_bench.gpu_report.figures import Figure, figure
from varlen_bench.kernels.machine import Machine
from varlen_bench.kernels.timing import WARM
from varlen_bench.ops.call import Inputs, Tensors, relative_error

# Tokens, and (hidden, features) of BERT-base and MiniLM.
_TOKENS = (8192, 4096, 512, 64, 16)
_WIDTHS = ((768, 3072), (384, 1536))
# As many weights as a model has layers, so that they are where a model finds them.
_LAYERS = 8


def measure_products(machine: Machine, tokens: int, hidden: int, features: int) -> Iterator[Figure]:
    """Yield times of the four products of a layer, one with GELU."""
    sizes = {
        "qkv": (hidden, 3 * hidden),
        "out": (hidden, hidden),
        "up": (hidden, features),
        "down": (features, hidden),
    }
    for name, (width, columns) in sizes.items():
        case = f"{name} {tokens}x{width}x{columns}"
        layers = [_layer(machine.device, seed, tokens, width, columns) for seed in range(_LAYERS)]
        turned = [{**layer, "weight": layer["weight"].t().contiguous().t()} for layer in layers]
        forms = {"[in, out]": layers, "[out, in]": turned}
        for form, inputs in forms.items():
            yield _timed(machine, case, form, _linear, inputs)
        if name == "up":
            exact = F.gelu(_linear_exact(layers[0]))
            gelu: dict[str, Callable[[Inputs], Tensor]] = {
                "exact GELU after it": partial(_then_gelu, machine.kernels),
                "tanh GELU in it": _with_gelu,
            }
            for (form, inputs), (kind, call) in product(forms.items(), gelu.items()):
                yield _timed(machine, case, f"{form}, {kind}", call, inputs)
            for kind, call in gelu.items():
                error = relative_error(call(layers[0]), exact)
                yield figure("product", case, f"error of {kind}", error, "of the norm")


def _timed(
    machine: Machine,
    case: str,
    name: str,
    call: Callable[[Inputs], Tensor],
    inputs: list[dict[str, Tensor]],
) -> Figure:
    spread = machine.timer.graph(call, inputs, WARM)
    return figure("product", case, name, spread.median, "us")


def _layer(
    device: torch.device, seed: int, tokens: int, width: int, columns: int
) -> dict[str, Tensor]:
    make = Tensors(torch.bfloat16, device, seed)
    return {
        "x": make.random(tokens, width),
        "weight": make.random(width, columns) * width**-0.5,
        "bias": make.random(columns),
        "out": make.unwritten(tokens, columns),
    }


def _linear(layer: Inputs) -> Tensor:
    out: Tensor = layer["out"]
    return torch.addmm(layer["bias"], layer["x"], layer["weight"], out=out)


def _linear_exact(layer: Inputs) -> Tensor:
    x, weight, bias = (layer[name].double() for name in ("x", "weight", "bias"))
    exact: Tensor = x @ weight + bias
    return exact


def _then_gelu(kernels: object, layer: Inputs) -> Tensor:
    out = _linear(layer)
    activated: Tensor = kernels.activate(out, kind="gelu", out=out)  # type: ignore[attr-defined]
    return activated


def _with_gelu(layer: Inputs) -> Tensor:
    out: Tensor = torch.ops.aten._addmm_activation.out(
        layer["bias"], layer["x"], layer["weight"], use_gelu=True, out=layer["out"]
    )
    return out


@torch.inference_mode()
def measure_all(machine: Machine) -> Iterator[Figure]:
    """Yield all figures."""
    for width, tokens in product(_WIDTHS, _TOKENS):
        yield from measure_products(machine, tokens, *width)
