"""Fused ops do not make the host wait, so CUDA graphs can capture them.

Tensors on the meta device have no elements, so an op in torch that reads one on the host fails there.
"""

import inspect
from functools import partial

import pytest
import torch

from tests.kernels.ops import OPS
from varlen_kernels import fused, reference

# with codes, a linear layer has a kernel
IN_TORCH = [
    name for name in OPS if name == "linear" or getattr(fused, name) is getattr(reference, name)
]


def arguments(dtype):
    """Return arguments for each op that a GPU runs in torch."""
    x = torch.empty(7, 12, dtype=dtype, device="meta")
    return {
        "add": (x, torch.empty_like(x)),
        "add_scaled": (x, torch.empty_like(x, dtype=torch.float32)),
        "round_tanh": (x,),
        "concat": (x, torch.empty(7, 5, dtype=dtype, device="meta")),
        "normalize_rows": (x, torch.empty(7, dtype=torch.bool, device="meta")),
        "linear": (x, torch.empty(12, 5, dtype=dtype, device="meta"), x.new_empty(5)),
        "route_tokens": (x.float(),),
        "select_rows": (x, torch.empty(3, dtype=torch.int32, device="meta")),
        "sum_experts": (x, x.new_empty(4, 2).float(), x.new_empty(4, 2).int()),
        "tanh": (x,),
        "to_fp32": (x,),
        "window_rows": (x, torch.empty(4, dtype=torch.int32, device="meta")),
        "top_terms": (x, torch.empty(12, 3000, dtype=dtype, device="meta"), x.new_empty(3000)),
    }


@pytest.mark.parametrize("name", IN_TORCH)
@pytest.mark.parametrize("has_out", [False, True], ids=["fresh", "out"])
def test_reads_no_element_on_the_host(name, has_out):
    op, args = getattr(fused, name), arguments(torch.bfloat16)[name]
    attributes = {
        "add_scaled": {"factor": 0.5},
        "round_tanh": {"limit": 127.0},
        "route_tokens": {"count": 3, "normalize": 1},
        "top_terms": {"count": 5},
        "window_rows": {"size": 3},
    }
    op = partial(op, **attributes.get(name, {}))
    result = op(*args)

    if has_out:
        is_one = isinstance(result, torch.Tensor)
        out = torch.empty_like(result) if is_one else tuple(map(torch.empty_like, result))
        result = op(*args, out=out)

    assert all(each.is_meta for each in (result if isinstance(result, tuple) else (result,)))


def test_every_op_in_torch_is_tested():
    assert set(IN_TORCH) == set(arguments(torch.float32))


def test_an_op_that_reads_lengths_on_the_host_fails_here():
    qkv = torch.empty(7, 36, device="meta")

    with pytest.raises(NotImplementedError):
        reference.attention_varlen(
            qkv, torch.empty(4, dtype=torch.int32, device="meta"), num_heads=3, scale=1.0
        )


def test_launchers_do_not_wait_for_the_device():
    for name in set(OPS) - set(IN_TORCH):
        module = inspect.getsource(inspect.getmodule(getattr(fused, name)))
        assert not any(call in module for call in (".item()", ".tolist()", ".cpu()", "synchronize"))
