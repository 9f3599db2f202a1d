"""A result file, as the benchmarks write theirs, and what it says about where it was made.

Invariant: every number in it was measured by the program that writes it; what cannot be found out is "unknown", never a guess.
"""

import datetime
import json
import pathlib
import subprocess
import sys

import torch


def _asked(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=pathlib.Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else "unknown"


class Result:
    def __init__(self, topic, device, commit=None):
        on_gpu = torch.device(device).type == "cuda"
        self.document = {
            "topic": topic,
            "device": torch.cuda.get_device_name(device) if on_gpu else "host",
            "driver": _asked(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if on_gpu else "none",
            "date": datetime.date.today().isoformat(),
            "commit": commit or _asked(["git", "rev-parse", "--short", "HEAD"]),
            "command": " ".join(["python3", "tests/gpu/python/" + pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
            "rows": [],
        }

    def add(self, name, shape, value, unit):
        self.document["rows"].append({"name": name, "shape": shape, "value": value, "unit": unit})

    def write(self, path):
        pathlib.Path(path).write_text(json.dumps(self.document, indent=1) + "\n")

    def print_table(self):
        rows = [(r["name"], r["shape"], f"{r['value']:.8g} {r['unit']}" if r["unit"] else str(r["value"])) for r in self.document["rows"]]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for row in rows:
            print("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())
