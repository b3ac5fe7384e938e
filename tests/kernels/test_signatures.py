"""All forms of an op have the signature of its specification."""

from inspect import isfunction, signature

import pytest

from tests.kernels.ops import OPS
from varlen_kernels import cpu, fused, op_table, reference

FORMS = [(fused, name) for name in OPS] + [(cpu, name) for name in op_table.OPS]


@pytest.mark.parametrize("form, name", FORMS, ids=lambda each: getattr(each, "__name__", each))
def test_an_op_has_the_signature_of_its_specification(form, name):
    specification = op_table.OPS[name].specification

    assert signature(getattr(form, name)) == signature(specification)


def test_every_fused_op_has_a_reference():
    ops = {name for name, op in vars(fused).items() if isfunction(op)}

    assert ops == set(OPS)


def test_every_op_of_the_reference_has_a_row():
    ops = {name for name, op in vars(reference).items() if isfunction(op)}

    assert ops <= set(op_table.OPS)


@pytest.mark.parametrize("name, op", op_table.OPS.items(), ids=op_table.OPS)
def test_a_form_of_an_op_is_not_its_specification(name, op):
    for form in (cpu, fused):
        has_form = form.__name__.rpartition(".")[2] in op.forms
        assert (getattr(form, name, op.specification) is not op.specification) is has_form
