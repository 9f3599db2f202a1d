"""Times other kernels at kvq's shapes: python3 tests/bench/peers/peers.py [--start N] < {topic: shapes}, as kvq_bench_gpu_attend --list says them.

Answers with JSON, a line each: {"versions": ...}; {"begin": N} before case N (so that whoever reads knows which one ended the process, and starts again behind it),
then {"row": ...} or {"absent": ...} of it; a last line {"end": true}. Invariant: nothing is timed whose output was not compared with float64
first; a case without a row has a reason.
"""

import argparse
import gc
import json
import sys
import time


def say(**line):
    print(json.dumps(line), flush=True)


def cases(topics):
    """(topic, peer, shape) in an order that depends on the shapes alone."""
    from flashinfer_paged import ONE_TOKEN, SEVERAL_TOKENS
    from model_step import STEPS
    from torch_sdpa import SDPA

    for topic, shapes in topics.items():
        for entry in shapes:
            peers = STEPS if topic == "step" else (SEVERAL_TOKENS if entry["queries"] > 1 else ONE_TOKEN) + SDPA
            yield from ((topic, peer, entry) for peer in peers)


def versions():
    from importlib import metadata

    found = {}
    for name in ("torch", "flashinfer-python"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def timed(topic, peer, entry):
    from case import Case

    step = topic == "step"
    prepared = peer.prepare(entry if step else Case.of(entry))
    if prepared is None:
        return {"kv_bits": 8 * peer.dtype.itemsize, "batch": 0, "tokens_s": 0}
    us, error = min(measured(prepared, choice, getattr(peer, "tolerance", 2e-3), 1 if step else None) for choice in prepared.choices)
    layers = prepared.layers if step else 1
    more = prepared.more(us) if step else {}
    return {"kv_bits": 8 * peer.dtype.itemsize, "median_us": us, "bytes": layers * prepared.case.kv_bytes(peer.dtype), "relative_error": error, **more}


def measured(prepared, choice, tolerance, calls):
    """(microseconds, relative error) of one setting of the call."""
    from case import Refused
    from clock import median_us
    from reference import worst_error

    prepared.choice = choice
    prepared.run(0)  # what is compiled is compiled now
    prepared.poison()
    prepared.run(0)
    error = worst_error(prepared.case, prepared.q, prepared.result(), prepared.values)
    if not error < tolerance:
        raise Refused(f"not timed: {error:.2g} away from float64, at most {tolerance:.2g}")
    return median_us(prepared.run, prepared.sets, calls), error


def answer(topic, peer, entry):
    """False when the GPU is lost to this process."""
    import torch
    from case import Refused

    torch.manual_seed(len(entry["shape"]))
    where = {"topic": topic, "name": peer.name, "shape": entry["shape"]}
    began = time.monotonic()
    try:
        row = timed(topic, peer, entry)
        say(row={**where, **row, "took_s": round(time.monotonic() - began, 2)})
    except Refused as error:
        say(absent={**where, "reason": str(error)})
    except Exception as error:  # whatever a package throws is its reason
        said = str(error).strip().splitlines() or [""]
        say(absent={**where, "reason": f"{type(error).__name__}: {said[0][:200]}"})
    try:
        torch.cuda.synchronize()
        make_room()
    except RuntimeError:
        return False
    return True


def make_room():
    """A look for unreachable objects takes longer than most cases: only when memory runs short."""
    import torch

    free, total = torch.cuda.mem_get_info()
    if free < total / 2:
        gc.collect()
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0)
    start = parser.parse_args().start
    topics = json.load(sys.stdin)
    try:
        import torch

        if not torch.cuda.is_available():
            raise ImportError("torch finds no GPU")
    except ImportError as error:
        say(absent={"topic": "", "name": "every peer", "shape": "", "reason": str(error)})
        return say(end=True)
    say(versions=versions())
    for number, (topic, peer, entry) in enumerate(cases(topics)):
        if number < start:
            continue
        say(begin=number, topic=topic, name=peer.name, shape=entry["shape"])
        if not answer(topic, peer, entry):
            return 3
    say(end=True)


if __name__ == "__main__":
    sys.exit(main())
