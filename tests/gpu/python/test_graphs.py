"""The ops of kvqd.torch inside CUDA graphs and torch.compile: lengths, tables and slots change, the graph does not."""

import torch

import kvqd
import kvqd.torch
from conftest import DIM, HEADS, LAYERS, Written, close, int32, reference


class Decoder:
    """One decode step of one sequence: append the newest token on each layer, then attend to all of them."""

    def __init__(self, cache, pages):
        self.cache = cache
        self.q, self.k, self.v = (
            torch.zeros((LAYERS, 1, heads, DIM), device="cuda", dtype=torch.float16) for heads in (HEADS, 1, 1)
        )
        self.slots = torch.full((1,), -1, dtype=torch.int64, device="cuda")
        self.table, self.lengths = torch.zeros((1, pages), dtype=torch.int32, device="cuda"), int32(1)
        self.starts, self.out = int32(0, 1), torch.zeros((LAYERS, 1, HEADS, DIM), device="cuda", dtype=torch.float16)

    def forward(self):
        for layer in range(LAYERS):
            self.cache.append(layer, self.k[layer], self.v[layer], self.slots)
            self.cache.attend(
                layer, self.q[layer], self.table, self.lengths, self.starts, out=self.out[layer], max_query_tokens=1
            )

    def load(self, written, position):
        """The token at `position` of a sequence that has room for it."""
        for tensor in (self.q, self.k, self.v):
            tensor.normal_()
        self.table[0, : len(written.sequence.block_table())] = torch.from_numpy(written.sequence.block_table()).cuda()
        self.slots.copy_(torch.from_numpy(written.sequence.slots(position, 1)))
        self.lengths.fill_(position + 1)

    def check(self, written, position):
        for layer in range(LAYERS):
            k, v = (torch.cat([old[layer][:position], new[layer]]) for old, new in ((written.k, self.k), (written.v, self.v)))
            close(self.out[layer], reference(self.q[layer], k, v)[0])


def run(model, decoder, launch):
    for written in (Written(model, 100, seed=11), Written(model, 150, seed=12)):
        position = written.k.shape[1]
        written.sequence.reserve(1, deadline_ms=10_000)
        decoder.load(written, position)
        with model.step():
            launch()
        torch.cuda.synchronize()
        decoder.check(written, position)
    assert model.fault() is None


def test_a_graph_is_captured_once_and_replayed(model):
    decoder = Decoder(kvqd.torch.Cache(model), pages=3)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), model.step():
        decoder.forward()  # the workspace is made
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with model.step():
        with torch.cuda.graph(graph):
            decoder.forward()
    run(model, decoder, graph.replay)


def test_the_ops_are_traced_whole(model):
    decoder = Decoder(kvqd.torch.Cache(model), pages=3)
    compiled = torch.compile(decoder.forward, fullgraph=True, backend="aot_eager")
    run(model, decoder, compiled)


def test_a_functional_use_is_traced_and_keeps_its_order(model):
    cache = kvqd.torch.Cache(model)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x, slots, table, lengths, starts):
        k = x[:, :1] * 2
        cache.append(0, k, k + 1, slots)
        return cache.attend(0, x * 1, table, lengths, starts) + 1

    sequence = model.open()
    sequence.reserve(8, deadline_ms=10_000)
    x = torch.randn((8, HEADS, DIM), device="cuda", dtype=torch.float16)
    slots = torch.from_numpy(sequence.slots(0, 8)).cuda()
    table = torch.from_numpy(sequence.block_table()[None]).cuda()
    with model.step():
        out = layer(x, slots, table, int32(8), int32(0, 8))
    k = x[:, :1] * 2
    close(out, reference(x, k, k + 1)[0] + 1)


def test_shapes_without_data(model):
    cache = kvqd.torch.Cache(model)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty((4, HEADS, DIM), device="cuda", dtype=torch.bfloat16)
        table = torch.empty((1, 2), dtype=torch.int32, device="cuda")
        lengths, starts = torch.empty(1, dtype=torch.int32, device="cuda"), torch.empty(2, dtype=torch.int32, device="cuda")
        out = cache.attend(0, q, table, lengths, starts)
    assert out.shape == (4, HEADS, DIM) and out.dtype == torch.bfloat16
