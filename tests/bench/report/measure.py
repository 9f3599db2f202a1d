"""Runs kvq's benchmark and the peers' program, and reads what they say.

Invariant: whatever a peer does to its process, what was measured before stays, and the cases behind it are still tried.
"""

import json
import subprocess
import sys

MAX_DEATHS = 20


def shapes(program, topic, kv_bytes):
    return json.loads(subprocess.run([program, "--list", topic, "--kv-bytes", str(kv_bytes)], check=True, capture_output=True, text=True).stdout)


def kvq(program, topic, options, path, limit_s):
    """None, or why there is no result: the program's last words."""
    try:
        done = subprocess.run([program, "--topic", topic, *options, "--out", path], capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"no result within {limit_s} s"
    except OSError as error:
        return str(error)
    said = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else f"exit code {done.returncode}: {said[-1] if said else 'silent'}"


class Peers:
    """Rows, reasons and versions of all topics."""

    def __init__(self):
        self.rows, self.absent, self.versions, self.at, self.ended = [], [], {}, None, False

    def take(self, line):
        try:
            said = json.loads(line)
        except ValueError:
            return  # a package's own words
        if not isinstance(said, dict):
            return
        if "begin" in said:
            self.at = said
        elif "row" in said:
            self.rows.append(said["row"])
        elif "absent" in said:
            self.absent.append(said["absent"])
        self.versions = said.get("versions", self.versions)
        self.ended = said.get("end", self.ended)

    def answered(self):
        last = (self.rows[-1:], self.absent[-1:])
        return any(entry and all(entry[0].get(key) == self.at[key] for key in ("topic", "name", "shape")) for entry in last)

    def give_up(self, why):
        if self.at is None:
            self.absent.append({"topic": "", "name": "every peer", "shape": "", "reason": why})
        elif not self.answered():
            self.absent.append({**{key: self.at[key] for key in ("topic", "name", "shape")}, "reason": why})

    def of(self, topic):
        return [row for row in self.rows if row["topic"] == topic], [entry for entry in self.absent if entry["topic"] in (topic, "")]


def peers(script, wanted, limit_s):
    """`wanted`: {topic: shapes}."""
    found, start = Peers(), 0
    for _ in range(MAX_DEATHS):
        process = subprocess.Popen([sys.executable, script, "--start", str(start)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, said = process.communicate(json.dumps(wanted), timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, said = process.communicate()
            said += f"\nno end within {limit_s} s"
        for line in out.splitlines():
            found.take(line)
        if found.ended:
            return found
        found.give_up(f"its process ended: {(said.strip().splitlines() or ['silent'])[-1][:200]}")
        if found.at is None or found.at["begin"] < start:
            break  # it does not even begin
        start = found.at["begin"] + 1
    return found
