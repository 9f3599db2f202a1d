"""Rows of a result and what follows from them: peers joined to kvq's, shares of the ceiling, how many times as fast kvq is, who is best.

Invariant: numbers come from rows of one document, measured in one run on one GPU; a peer without a row for a shape has a reason there instead.
"""

import json
import os

OURS = ("kvq_int4", "kvq_dense")


def load(path):
    return json.loads(path.read_text())


def store(document, path):
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    os.replace(draft, path)


def rows_of(document, shape):
    return {row["name"]: row for row in document["rows"] if row["shape"] == shape and "value" not in row}


def shapes_of(document):
    return list(dict.fromkeys(row["shape"] for row in document["rows"] if "value" not in row))


def speed(row):
    """Work a time: tokens where the row counts them, since then batches may differ, else calls. None: there is nothing to divide by."""
    if "tokens_s" in row:
        return row["tokens_s"] or None
    return 1e6 / row["median_us"] if row.get("median_us") else None


def ratio(ours, theirs):
    """How many times as fast `ours` is."""
    return speed(ours) / speed(theirs) if ours and theirs and speed(ours) and speed(theirs) else None


def is_peer(row):
    return not row["name"].startswith("kvq_")


def join(document, rows, absent, versions):
    """kvq's document with peers' rows in it, each with the ceiling of the document and how many times as fast kvq is."""
    read_tb_s = document["ceilings"]["read_tb_s"]
    for row in rows:
        row = {key: value for key, value in row.items() if key not in ("topic", "took_s")}
        if "median_us" in row:
            row["floor_us"] = row["bytes"] / read_tb_s * 1e-6
            row["of_ceiling"] = row["floor_us"] / row["median_us"]
        ours = rows_of(document, row["shape"])
        int4 = ours.get("kvq_int4", {})
        if "tflop_s" in int4 and "median_us" in row:  # of the same work
            row["tflop_s"] = int4["tflop_s"] * int4["median_us"] / row["median_us"]
        for name in OURS:
            if (times := ratio(ours.get(name), row)) is not None:
                row[f"speed_of_{name}"] = times
        document["rows"].append(row)
    document["absent"] = group(absent)
    document["peers"] = versions
    return document


def group(absent):
    """One entry for each name and reason, with its shapes."""
    found = {}
    for entry in absent:
        found.setdefault((entry["name"], entry["reason"]), []).append(entry["shape"])
    return [{"name": name, "reason": reason, "shapes": shapes} for (name, reason), shapes in found.items()]


def best(document, shape, bits):
    """The fastest peer's row that reads so many bits a value."""
    found = [row for row in rows_of(document, shape).values() if is_peer(row) and row.get("kv_bits") == bits and speed(row)]
    return max(found, key=speed, default=None)


def losses(document):
    """(shape, peer, kvq_int4's share of its speed) where kvq_int4 is slower."""
    return [(row["shape"], row["name"], row["speed_of_kvq_int4"]) for row in document["rows"] if row.get("speed_of_kvq_int4", 1) < 1]
