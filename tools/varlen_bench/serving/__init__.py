"""The load lab: real servers, ours and plain ones, under the same arrivals until they cannot keep up.

A caller does not wait for other callers, so neither do the requests here: the loop is open. A generator in a process
of its own sends single sequences of token ids over gRPC at times that were fixed before. Every system is a real
tritonserver on the same machine, one after another, with the same checkpoint; what each answers is compared with
transformers (fp32, each sequence alone) before it is timed.

Systems
    varlen-dp, -token-budget, -none   ours by policy, packed; dtype as by default
    varlen-dp-padded, -fifo-padded    the world of the paper: padding is computed, at most 20 sequences a batch
    transformers-*-dynamic            what people serve today: a python-backend model that fills up to the longest of
                                      what the server's dynamic batcher gives it; SDPA attention, inference mode, all
                                      cores
                                      It joins at most 8 requests (--peer-batch). transformers took 27, 23, 22, 23, 24
                                      ms of one core for a short request in batches of 1, 4, 8, 16, 32; for a uniform
                                      one 84, 127, 143, 155, 163: padding, which *-single goes without
    onnxruntime-fp32-dynamic          the same with the graph of `bench_encoder`, pooling inside
    *-single                          both without a batcher, one request a call
    bf16 on a CPU without bf16 instructions is emulated and slow; such a row is kept.

Lengths
    uniform   uniform in 5-500 tokens, cut to the model's positions
    short     uniform in 2-100 tokens, as in the paper
    --trace   a CSV's first column of whole numbers, in its order; divided so that 99 % fit the model, the rest cut.
              The label says by how much. Arrivals are Poisson here too.

Arrivals
    Poisson, given their number: exactly rate x seconds arrive, at independent uniform times. Uniform lengths are the
    mix's quantiles in random order, so that every load of one size holds the same work. One seed, the same arrivals
    for every system at the same step of its search.
    The first second warms up and is not measured. Requests that are due while too many wait (3 s of what the system
    serves in a closed loop, at least 16) are not sent, and counted so: nobody who waits behind them could be answered
    in time. A load on the way to `sustained` is given up once more than one in a hundred is late.

Loads of one system and one mix (column `kind`)
    closed         8 requests in flight: about what it can serve; later loads are multiples of it
    load           open: 0.3 of that, then by bisection towards the largest that is sustained
    most           open: twice what the best system so far served. Ours come first, so this is the same for all peers
    paired         varlen-dp and varlen-token-budget as two models of one server, under the same arrivals, one at a
                   time in the order A B B A, at 0.6 and 0.8 of the token budget's closed loop, which is run
                   anew before each turn (column `turn`): the machine's speed may have changed. --paired N
                   does only this, in N turns
    perf_analyzer  the server's own generator at the load of the row before it; its latency begins when it sends
    overload       --overload: twice the closed loop for two minutes, each request with a deadline of 500 ms
    result         no load of its own: the result of a system on a mix
    failed         what did not run; the note says why

CSV columns; n/a where a row has no such figure
    offered, served          requests/s that were due, and good answers/s that came in the measured seconds
    warmup                   of the requests sent, those before the measured seconds
    sent = ok + refused + failed + lost; not_sent is no part of it. lost: never answered, within a minute
    share                    good answers over requests that were due
    mean_ms, p50_ms, p99_ms  of good answers, from when a request was due; a p99 is one of the values
    lateness_p99_ms          from due to sent: the generator's own fault
    refused_p99_ms           from sent to refused
    kept_deadline            share of good answers that came within the deadline, from when they were sent
    mean_batch               sequences a batch, as the server counts them
    padding_share            padding over all tokens that ran; where the system counts them
    prediction_error         predicted over actual seconds of the batches, less 1; the same
    rss_mib, rss_flatness    resident memory of the process that runs the model; its spread over the median, looked at
                             every second of an overload after the first tenth
    machine_gflops           fp32 matrix products on all cores, measured for 0.2 s before the load while no system works
    cosine_min               the least cosine of eight answers, asked for at once, to the reference
    sustained                the largest load with p99 <= 500 ms and share >= 98 %, below every load that failed
    saturated                served/s at `most`

Keys of the BENCH line (uniform lengths; others with the name of their mix before them)
    sustained_vs_dynamic_batcher  sustained: varlen-dp over transformers-fp32-dynamic
    sustained_vs_best_peer        sustained: varlen-dp over the best peer of any engine, dtype and batching
    dp_padded_vs_fifo_padded      saturated: what the paper compares
    dp_mean_vs_token_budget       mean latency of the paired loads, geometric mean of the ratios; below 1: dp is faster
    dp_p99_vs_token_budget        the same of p99
    lost                          of all requests to all systems
Keys of the BENCH line of --overload: of each figure the worst over all loads.

Time goes where these keys come from: systems that they are about get four steps of bisection, the others two, and peers
that serve less at most than another one sustains get one. A load of few requests/s is measured for up to half as long
again, to see a hundred requests.
"""
