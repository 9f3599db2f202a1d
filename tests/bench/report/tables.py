"""Results as Markdown: for each topic the best of each kind beside kvq, then every row, then who is absent and why.

Invariant: a table shows every row of its document; where kvq is slower, the number is bold.
"""

import rows

COMPUTE_BOUND = 0.1  # a smaller share of the read ceiling says nothing of what takes long


def table(head, lines):
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in [head, ["---"] + ["---:"] * (len(head) - 1), *lines]])


def time(row):
    if row is None:
        return "-"
    if "median_us" not in row:
        return "does not fit"
    us = row["median_us"]
    said = f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"
    if row.get("of_ceiling", 1) < COMPUTE_BOUND and "tflop_s" in row:
        return f"{said}, {row['tflop_s']:.0f} TFLOP/s"
    return f"{said}, {100 * row['of_ceiling']:.0f} %" if "of_ceiling" in row else said


def times(value):
    if value is None:
        return "-"
    return f"{value:.2f}" if value >= 1 else f"**{value:.2f}**"


def named(row):
    return "-" if row is None else f"{time(row)} ({row['name']})"


def summary(document):
    """A line a shape: kvq and the fastest peer of 16 and of 8 bits."""
    lines = []
    for shape in rows.shapes_of(document):
        here = rows.rows_of(document, shape)
        int4, dense = here.get("kvq_int4"), here.get("kvq_dense")
        if not int4:
            continue
        of16, of8 = rows.best(document, shape, 16), rows.best(document, shape, 8)
        floor = f"{int4['floor_us']:.1f} us" if "floor_us" in int4 else "-"
        lines.append([shape, floor, time(int4), time(dense), named(of16), named(of8), times(rows.ratio(int4, of16)), times(rows.ratio(int4, of8)),
                      times(rows.ratio(dense, of16))])
    return table(["shape", "floor of our bytes", "kvq int4", "kvq dense", "best of 16 bits", "best of 8 bits", "int4 to 16", "int4 to 8", "dense to 16"],
                 lines)


def steps(document):
    """Of a whole model: tokens a second besides."""
    lines = []
    for row in document["rows"]:
        fits = str(row["batch"]) if row["batch"] else "none"
        layers = str(row.get("layers_in_memory", "-"))
        lines.append([row["shape"], row["name"], fits, time(row), f"{row['tokens_s']:.0f}", layers, error(row), times(row.get("speed_of_kvq_int4"))])
    lines.sort(key=lambda cells: rows.shapes_of(document).index(cells[0]))
    return table(["step", "kernel", "sequences", "attention and append", "tokens/s", "layers in memory", "error", "kvq int4 is faster by"], lines)


def error(row):
    return f"{row['relative_error']:.1e}" if "relative_error" in row else "-"


def full(document):
    lines = []
    for shape in rows.shapes_of(document):
        for row in sorted(rows.rows_of(document, shape).values(), key=lambda row: row.get("median_us", 0)):
            lines.append([shape, row["name"], time(row), f"{row['bytes'] / 1e6:.1f}", error(row), times(row.get("speed_of_kvq_int4")),
                          times(row.get("speed_of_kvq_dense"))])
    return table(["shape", "kernel", "time, of the ceiling", "MB", "error", "kvq int4 is faster by", "kvq dense by"], lines)


def absent(document):
    lines = [[entry["name"], entry["reason"], "all" if not any(entry["shapes"]) else str(len(entry["shapes"]))] for entry in document.get("absent", [])]
    return table(["absent", "why", "shapes"], lines) if lines else ""


def text(document):
    ceiling = document["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in document.get("peers", {}).items())
    parts = [f"## {document['topic']}\n\n{document['device']}, {document['driver']}, commit {document['commit']}, {document['date']}"
             f"{'; ' + versions if versions else ''}. Read {ceiling['read_tb_s']:.2f} TB/s, copy {ceiling['copy_tb_s']:.2f} TB/s."]
    if document["topic"] == "attend_step":
        parts.append(steps(document))
    else:
        parts += [summary(document), full(document)]
    parts.append(absent(document))
    for shape, peer, share in rows.losses(document):
        parts.append(f"kvq_int4 is slower than {peer} at {shape}: {share:.2f} of its speed.")
    return "\n\n".join(part for part in parts if part) + "\n"
