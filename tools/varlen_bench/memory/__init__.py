"""The memory benchmark: what a forward pass takes beside its weights, with the arena, without it, and in transformers.

A request is `batch` sequences of one length, as in the paper, so that nobody pays for padding; the lengths of 150
requests are uniform in 5-500; larger batches and encoders run every second, third or tenth of them by length, the
longest always (the column `requests` counts). Weights are random. Every system has a process of its own.

Systems
    varlen            as served: every op writes into the arena
    varlen-no-arena   the same program, kernels, lanes and threads; each op makes its own result, which goes as soon as
                      nothing reads it. It runs a third of the requests, the longest one among them
    transformers      BertModel, SDPA attention, inference mode, no mask, mean pooling
    exact-arena       computed, not run: an arena that is allocated anew for each request, at its plan's size
    stub, server      the processes of a real tritonserver, under thousands of requests

Memory above weights
    On a CPU: all weights are read and a tiny batch is run; what is resident then counts for nothing. From there on the
    kernel keeps the peak. Where it cannot be told to begin anew, a thread looks every millisecond.
    On a GPU: the most that PyTorch's allocator reserved and allocated while the requests ran, less the weights. What a
    system takes when it is loaded and keeps, our arena and graphs, is in it; what loading alone took is not.

Speed with and without the arena
    Both run each request, in turns, in one process and on the same weights, and their answers must be equal bit by
    bit. A round is ten requests; its ratio is that of its two totals.

CSV columns, MiB where no unit is given; empty where a system has no such figure
    footprint_vs_bound, _max   plan's footprint over the peak of its live bytes: mean and maximum over the requests
    bound_largest_mib          the peak of live bytes of the largest request; no plan can use fewer
    reserved_mib               the most that the arena held
    reserved_vs_bound          its ratio to bound_largest_mib
    new_mib_per_request        memory that was taken from the system, over the requests; exact-arena: the mean footprint
    asked_mib_longest          asked of torch's allocator during the longest request; the arena is not part of it
    peak_mib                   above weights; for stub and server the most they ever had resident
    allocated_mib              of that, the most that was in use (GPU alone)
    vs_pytorch                 peak_mib over that of transformers
    seconds, plan_share        of all requests; the share of it that planning took
    vs_no_arena, _p20, _p80    speed, the median over rounds and its spread
    rss_least, _median, _most  resident memory at rest, every 500 requests after those that warm up
    rss_flatness               (most - least) / median

Keys of the BENCH line: of each figure the worst over all encoders and batches
    footprint_vs_bound      mean over the requests
    vs_pytorch              our peak above weights over that of transformers
    plan_share              seconds spent planning over seconds spent running
    speed_vs_no_arena       above 1: the arena is faster
    new_bytes_per_request   taken from the system by our arena, mean over the requests
    rss_flatness            of the process that serves the model
A key whose systems did not run reads n/a. A system that fails leaves a row with the reason, and the others go on.
"""
