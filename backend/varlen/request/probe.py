"""Probes: tiny requests that ask whether this replica takes work.

A probe runs for real. It is admitted to a full queue, since a replica that has much to do is not broken: otherwise all
replicas would be taken out of service together. A full queue admits a bounded number of probes.
"""

from varlen.errors import RequestError
from varlen.request.request import Request, RequestOptions

# Probes that a full queue admits.
_ADMITTED = 4
# A prompt template of a reranker has more than a hundred tokens.
MAX_PROBE_TOKENS = 256
MAX_PROBE_BYTES = 1024
_MAX_NEW_TOKENS = 4


def check_probe(request: Request) -> None:
    """Refuse a probe that asks for more than a tiny answer.

    Raises:
        RequestError: the request is a probe with several rows, a long prompt, or more than 4 tokens to generate.
    """
    if not request.options.probe:
        return
    tokens = request.num_tokens
    if len(request.prompts) != 1 or tokens > MAX_PROBE_TOKENS:
        raise RequestError(
            f"the probe has {len(request.prompts)} rows and {tokens} tokens;"
            f" send one row of at most {MAX_PROBE_TOKENS} tokens"
        )
    generation = request.options.generation
    if generation is not None and generation.max_tokens > _MAX_NEW_TOKENS:
        raise RequestError(
            f"the probe has max_tokens {generation.max_tokens}; send at most {_MAX_NEW_TOKENS}"
        )


def reserve(options: RequestOptions, each: int) -> int:
    """Return by how much a limit on queued work is larger for a request.

    Args:
        each: share of one probe in what the limit counts.
    """
    return _ADMITTED * each if options.probe else 0
