"""What the demo prints at its end: the table, and which expectations held.

Invariant: report() returns 0 only if at least one expectation was stated and all held.
"""

from __future__ import annotations


class Expectations:
    def __init__(self):
        self._held: list[tuple[str, bool]] = []

    def __call__(self, what: str, held: bool) -> None:
        self._held.append((what, bool(held)))

    def report(self, seconds: float) -> int:
        broken = [what for what, held in self._held if not held]
        for what in broken:
            print(f"BROKEN: {what}")
        print(f"{len(self._held) - len(broken)} of {len(self._held)} expectations held; {seconds:.0f} s")
        return 0 if self._held and not broken else 1


def table(rows: list[tuple[str, str]]) -> None:
    left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
    line = f"+{'-' * (left + 2)}+{'-' * (right + 2)}+"
    print(line, *(f"| {name:<{left}} | {value:<{right}} |" for name, value in rows), line, sep="\n")
