"""A terminal that remembers its screen: runs a program in a pseudo-terminal, types, and reads what is to be seen.

Invariant: it knows the sequences that ncurses sends for TERM=xterm (with or without colours) and fails on any other, so that nothing
that a program draws goes unseen. Nothing sleeps: every wait is for the program's output, with a deadline.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time

PATIENCE_S = 30
SEQUENCE = re.compile(r"\x1b(?:\[([?>]?)([0-9;]*)([@-~])|[()][0AB]|([=>78M])|\][^\x07]*\x07)")


class Screen:
    def __init__(self, columns, rows):
        self.styles = set()  # of SGR parameters that were ever used
        self.row = self.column = 0
        self.inserts = False
        self.resize(columns, rows)

    def resize(self, columns, rows):
        self.columns, self.rows = columns, rows
        self.cells = [[" "] * columns for _ in range(rows)]
        self.top, self.bottom = 0, rows - 1  # of what scrolls
        self.row, self.column = min(self.row, rows - 1), min(self.column, columns - 1)

    def lines(self):
        return ["".join(row).rstrip() for row in self.cells]

    def feed(self, text):
        """Returns the beginning of a sequence whose rest has not come yet."""
        at = 0
        while at < len(text):
            char = text[at]
            if char == "\x1b":
                match = SEQUENCE.match(text, at)
                if not match:
                    if len(text) - at < 32:
                        return text[at:]
                    raise AssertionError(f"unknown sequence {text[at:at + 32]!r}")
                self.obey(match)
                at = match.end()
                continue
            at += 1
            if char == "\r":
                self.column = 0
            elif char == "\n":
                if self.row == self.bottom:
                    self.shift(self.top, -1)
                else:
                    self.row = min(self.row + 1, self.rows - 1)
            elif char == "\b":
                self.column = max(self.column - 1, 0)
            elif char >= " ":
                self.put(char)
            elif char != "\x0f" and char != "\x07":
                raise AssertionError(f"unknown control character {char!r}")
        return ""

    def put(self, char):
        if self.column >= self.columns:
            self.column, self.row = 0, min(self.row + 1, self.rows - 1)
        if self.inserts:
            self.cells[self.row].insert(self.column, " ")
            self.cells[self.row].pop()
        self.cells[self.row][self.column] = self.last = char
        self.column += 1

    def obey(self, match):
        private, parameters, final = match.group(1), match.group(2), match.group(3)
        if final is not None and final in "hl" and parameters == "4":
            self.inserts = final == "h"
        if match.group(4) == "M":
            if self.row == self.top:
                self.shift(self.top, 1)
            else:
                self.row = max(self.row - 1, 0)
        if final is None or private or final in "hlt":  # charsets, modes, the size of the window
            return
        numbers = [int(word) if word else 0 for word in parameters.split(";")] if parameters else []
        first = numbers[0] if numbers else 0
        count = max(first, 1)
        if final in "Hf":
            self.row = min(count, self.rows) - 1
            self.column = min(max(numbers[1], 1) if len(numbers) > 1 else 1, self.columns) - 1
        elif final in "ABCDGd":
            self.row += {"A": -count, "B": count}.get(final, 0)
            self.column += {"C": count, "D": -count}.get(final, 0)
            self.column = count - 1 if final == "G" else min(max(self.column, 0), self.columns - 1)
            self.row = count - 1 if final == "d" else min(max(self.row, 0), self.rows - 1)
        elif final == "J":
            for row in range(self.row + 1 if first == 0 else 0, self.rows if first != 1 else self.row):
                self.cells[row] = [" "] * self.columns
            self.erase(first)
        elif final == "K":
            self.erase(first)
        elif final == "X":
            self.cells[self.row][self.column:self.column + count] = [" "] * min(count, self.columns - self.column)
        elif final == "P":
            row = self.cells[self.row]
            self.cells[self.row] = (row[:self.column] + row[self.column + count:] + [" "] * count)[:self.columns]
        elif final == "@":
            row = self.cells[self.row]
            self.cells[self.row] = (row[:self.column] + [" "] * count + row[self.column:])[:self.columns]
        elif final in "LMST":
            self.shift(self.row if final in "LM" else self.top, count if final in "LT" else -count)
        elif final == "r":
            self.top, self.bottom = (first or 1) - 1, (numbers[1] if len(numbers) > 1 else self.rows) - 1
            self.row = self.column = 0
        elif final == "b":
            for _ in range(count):
                self.put(self.last)
        elif final == "m":
            self.styles.update(numbers or [0])
        else:
            raise AssertionError(f"unknown sequence {match.group()!r}")

    def shift(self, first, lines):
        """Moves the rows from `first` to the bottom of what scrolls, down or (below 0) up."""
        part = self.cells[first:self.bottom + 1]
        size, blank = len(part), [[" "] * self.columns for _ in range(abs(lines))]
        self.cells[first:self.bottom + 1] = (blank + part)[:size] if lines > 0 else (part + blank)[-lines:][:size]

    def erase(self, kind):
        row = self.cells[self.row]
        if kind in (0, 2):
            row[self.column:] = [" "] * len(row[self.column:])
        if kind in (1, 2):
            row[:self.column + 1] = [" "] * len(row[:self.column + 1])


class Terminal:
    def __init__(self, argv, columns=80, rows=24, **environment):
        self.screen, self.rest, self.code = Screen(columns, rows), "", None
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.pop("NO_COLOR", None)
            os.environ.update({"TERM": "xterm-256color", "LC_ALL": "C"}, **environment)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execv(argv[0], argv)
        self.modes = termios.tcgetattr(self.fd)

    def close(self):
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def read(self, wait_s):
        """What has come within that time, on the screen; False at the program's end."""
        if not select.select([self.fd], [], [], wait_s)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux tells the end so
            return False
        self.rest = self.screen.feed(self.rest + data.decode("latin-1"))
        return bool(data)

    def see(self, what, wait_s=PATIENCE_S):
        """Waits for a text, or for what a function of the lines accepts."""
        sought = what if callable(what) else lambda lines: any(what in line for line in lines)
        until = time.monotonic() + wait_s
        while not sought(self.screen.lines()):
            if time.monotonic() > until or not self.read(0.2):
                raise AssertionError(f"never seen: {what}; the screen is\n" + "\n".join(self.screen.lines()))

    def settle(self):
        """Reads until nothing has come for a while: a frame that is whole."""
        while select.select([self.fd], [], [], 0.1)[0] and self.read(0):
            pass

    def type(self, keys):
        os.write(self.fd, keys.encode())

    def resize(self, columns, rows):
        self.screen.resize(columns, rows)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def end(self):
        """The exit code, once the program has ended by itself."""
        until = time.monotonic() + PATIENCE_S
        while self.read(0.2):
            if time.monotonic() > until:
                raise AssertionError("it does not end; the screen is\n" + "\n".join(self.screen.lines()))
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code
