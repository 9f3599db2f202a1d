"""Times as tests/bench/gpu_attend/timing.cu takes them: the median over replays of one graph of several calls, divided by the calls.

Invariant: the host waits for nothing inside what is timed, and consecutive calls take other copies of the cache.
"""

import statistics

import torch

MIN_CALLS, REPLAYS = 12, 15
LONG_US, LONG_CALLS = 3_000, 3  # calls that long need no dozen to be timed well


def median_us(run, sets, calls=None):
    """`run(i)` puts one call on the current stream, over copy i % sets."""
    stream = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for i in range(2):  # outside the graph: what is made on a first call
            begin.record()
            run(i % sets)
            end.record()
    torch.cuda.synchronize()
    if calls is None:
        calls = LONG_CALLS if 1000 * begin.elapsed_time(end) > LONG_US else max(MIN_CALLS, sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            run(i % sets)
    times = []
    with torch.cuda.stream(stream):
        for i in range(-2, REPLAYS):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 0:
                times.append(1000 * begin.elapsed_time(end) / calls)
    return statistics.median(times)
