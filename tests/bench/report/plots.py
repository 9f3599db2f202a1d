"""The plots of a folder of results: share of the ceiling by shape, time against context, tokens that memory holds.

Invariant: a plot is drawn from the files alone, and only when they have what it shows.
"""

import chart
import rows

KINDS = ["kvq int4", "kvq dense", "best of 16 bits", "best of 8 bits"]
MEMORIES_GB, WEIGHT_GB, LAYERS = (24, 48, 80, 141), 16, 32
FORMATS = {"16 bits": ("kvq_dense", 1), "8 bits": ("kvq_dense", 0.5), "kvq k8v4": ("kvq_k8v4", 1), "kvq int4+k8": ("kvq_int4_k8", 1),
           "kvq int4": ("kvq_int4", 1)}


def kinds(document, shape):
    here = rows.rows_of(document, shape)
    return [here.get("kvq_int4"), here.get("kvq_dense"), rows.best(document, shape, 16), rows.best(document, shape, 8)]


def ceiling(document):
    groups = []
    for shape in rows.shapes_of(document):
        found = kinds(document, shape)
        if any(found):
            groups.append((shape, [100 * row["of_ceiling"] if row and "of_ceiling" in row else None for row in found]))
    return chart.bars(f"Share of the read ceiling, {document['topic']}, {document['device']}", groups, KINDS, " %", top=100) if groups else None


def context(document):
    """Of one sequence."""
    series = {name: [] for name in [*KINDS, "floor of int4's bytes"]}
    for shape in rows.shapes_of(document):
        batch, _, length = shape.partition("x")
        if batch != "1" or not length.isdigit():
            continue
        for name, row in zip(KINDS, kinds(document, shape)):
            if row and "median_us" in row:
                series[name].append((int(length), row["median_us"]))
        if (int4 := rows.rows_of(document, shape).get("kvq_int4")) and "floor_us" in int4:
            series["floor of int4's bytes"].append((int(length), int4["floor_us"]))
    series = {name: line for name, line in series.items() if line}
    return chart.lines(f"One query token over one sequence, {document['device']}", series, "tokens of context", "us") if series else None


def token_bytes(documents, name):
    """Bytes of a token in all layers, of a row over whole pages of one length."""
    for document in documents:
        for row in document["rows"]:
            batch, _, length = row["shape"].partition("x")
            if row["name"] == name and batch.isdigit() and length.isdigit():
                return row["bytes"] / (int(batch) * int(length)) * LAYERS
    return None


def capacity(documents):
    """Thousands of tokens of Llama-3-8B's shape beside its weights."""
    bytes_of = {name: factor * size for name, (of, factor) in FORMATS.items() if (size := token_bytes(documents, of))}
    if not bytes_of:
        return None
    groups = [(f"{gb} GB", [(gb - WEIGHT_GB) * 1e9 / size / 1000 for size in bytes_of.values()]) for gb in MEMORIES_GB]
    return chart.bars(f"Tokens beside {WEIGHT_GB} GB of weights, 32 layers, 8 KV heads, d 128", groups, list(bytes_of), " K")


def draw(documents):
    """{file name: SVG} of documents by topic."""
    found = {f"{topic}_ceiling.svg": ceiling(documents[topic]) for topic in ("decode", "attend_heads", "attend_ragged") if topic in documents}
    if "decode" in documents:
        found["decode_context.svg"] = context(documents["decode"])
    found["capacity.svg"] = capacity([documents[topic] for topic in ("attend_formats", "decode") if topic in documents])
    return {name: text for name, text in found.items() if text}
