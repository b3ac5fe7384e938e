"""`fused` has the same ops as `reference`, with the same signatures."""

from inspect import isfunction, signature

import pytest

from tests.kernels.ops import OPS
from varlen_kernels import fused


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_the_signature_of_its_reference(name):
    assert signature(getattr(fused, name)) == signature(OPS[name])


def test_every_fused_op_has_a_reference():
    ops = {name for name, op in vars(fused).items() if isfunction(op)}

    assert ops == set(OPS)
