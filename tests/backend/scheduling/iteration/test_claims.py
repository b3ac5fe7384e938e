"""Claims: what waits in fair order is what they have unserved."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.backend.fakes.engine_parts import FakeReply
from tests.backend.requests import prompt_of
from varlen.request.generation import GenerationOptions
from varlen.request.request import Request, RequestOptions
from varlen.scheduling.admission import Claims
from varlen.scheduling.batch import RequestState


def first_of(tenant, tokens, *, n=1, num_beams=1, max_tokens=1):
    """Return the first sequence of a request of one prompt."""
    generation = GenerationOptions(max_tokens=max_tokens, n=n, num_beams=num_beams)
    options = RequestOptions(generation=generation, tenant=tenant)
    request = Request((prompt_of([1] * tokens),), options)
    return RequestState(request, FakeReply(), 0.0).sequences[0]


_GROUPS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(1, 9),
        st.lists(st.integers(1, 20), max_size=4),
    ),
    max_size=8,
)


@given(_GROUPS)
def test_the_waiting_work_of_a_tenant_is_what_its_claims_have_unserved(groups):
    claims = Claims()
    entered = []
    for tenant, tokens, steps in groups:
        _, claim = claims.enter(first_of(tenant, tokens, max_tokens=5))
        assert claim.unserved == tokens + 5
        entered.append((claim, steps))

    for claim, steps in entered:
        for step in steps:
            claims.serve([(claim, step)])
            unserved = Counter()
            for each, _ in entered:
                unserved[each.tenant] += each.unserved
            backlogs = claims._share._backlogs
            assert {tenant: backlog.work for tenant, backlog in backlogs.items()} == unserved
    for claim, _ in entered:
        claims.leave(claim)
    assert not claims._share._backlogs
    assert claims._share._waiting == 0


def test_samples_and_beams_claim_max_tokens_each():
    claims = Claims()

    assert claims.enter(first_of("", 4, max_tokens=10))[1].unserved == 14
    assert claims.enter(first_of("", 4, max_tokens=10, n=3))[1].unserved == 34
    assert claims.enter(first_of("", 4, max_tokens=10, num_beams=5))[1].unserved == 54


def test_a_claim_ends_with_its_last_group():
    claims = Claims()
    _, claim = claims.enter(first_of("", 4))
    claim.groups += 1

    claims.leave(claim)
    assert claims._share._backlogs
    claims.leave(claim)
    assert not claims._share._backlogs
