"""The rules of this code base that a program can check: who includes what, sizes, names, banned calls, dead files.

Each rule is a function from text to a list of findings; the class Rules proves on small strings that each can fail, the class Tree
applies them to the repository. Run by ctest (label tidy), or directly: python3 tests/tidy_test.py
"""

import ast
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SKIPPED_FOLDERS = {"build", ".git", ".venv", "__pycache__", "_native"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70

# --- rooms: the first matching prefix decides. "std" is the C++ library, "os" the C library and Linux; other words are prefixes
# of what may be included. tests/ may include anything. docs/architecture.md draws the graph.
ROOMS = [
    ("contract", ["include/kvq/"], ["std", "kvq/types.h", "kvq/result.h", "kvq/kvq.h", "kvq/page_format.h", "kvq/directory.h",
                                    "kvq/memory_site.h"]),
    ("cuda kernels", ["kernels/cuda/"], ["std", "os", "cuda", "kvq/", "kernels/"]),
    ("kernels", ["kernels/"], ["std", "os", "hwy/", "kvq/", "kernels/"]),
    ("core", ["daemon/core/"], ["std", "kvq/", "daemon/core/"]),
    ("shm", ["daemon/shm/"], ["std", "os", "boost/interprocess/", "kvq/", "daemon/shm/"]),
    ("device", ["daemon/device/"], ["std", "os", "kvq/", "daemon/device/", "daemon/shm/descriptor.h", "daemon/shm/memfd.h", "daemon/gpu/worker_protocol.h", "daemon/gpu/worker_socket.h",
                                      "kernels/host_kernels.h", "kernels/logit_noise.h"]),
    ("gpu worker", ["daemon/gpu/"], ["std", "os", "cuda", "kvq/", "daemon/gpu/", "daemon/shm/descriptor.h", "kernels/cuda/", "kernels/page_sum.h",
     "kernels/logit_noise.h"]),
    ("store", ["daemon/store"],
     ["std", "os", "kvq/", "daemon/core/", "daemon/shm/", "daemon/device/device.h", "daemon/store", "spdlog/"]),
    ("loop", ["daemon/event_loop"], ["std", "os", "kj/", "uv.h", "kvq/result.h", "daemon/event_loop.h"]),
    ("config", ["daemon/config"], ["std", "os", "CLI/", "toml++/", "kvq/types.h", "daemon/config", "daemon/exit_code.h"]),
    ("startup", ["daemon/limits", "daemon/listen_socket", "daemon/metrics_socket", "daemon/exit_code"],
     ["std", "os", "systemd/", "daemon/limits.h", "daemon/listen_socket.h", "daemon/metrics_socket.h", "daemon/exit_code.h"]),
    ("metrics", ["daemon/metrics/"],
     ["std", "kj/", "kvq/", "daemon/metrics/", "daemon/rpc/rpc.h", "daemon/store.h", "daemon/store_counts.h"]),
    ("rpc", ["daemon/rpc/"],
     ["std", "os", "kj/", "capnp/", "nlohmann/", "kvq/", "schema", "daemon/rpc/", "daemon/store.h", "daemon/event_loop.h",
      "daemon/config_setting.h",  # parse_size: one spelling of sizes for the file and for kvqctl set
      "daemon/event_line.h"]),  # one reading of an event's words for the journal and for kvqctl events
    ("main", ["daemon/"], ["std", "os", "kj/", "spdlog/", "systemd/", "openssl/", "kvq/", "daemon/"]),
    ("client on CUDA", ["client/cuda_"],
     ["std", "os", "cuda", "kvq/", "client/", "kernels/host_kernels.h", "kernels/cuda/"]),
    ("client", ["client/"],
     ["std", "os", "kj/", "capnp/", "boost/interprocess/", "openssl/", "kvq/", "schema", "client/", "kernels/host_kernels.h"]),
    ("kvq-hold", ["tools/kvq-hold/"], ["std", "os", "CLI/", "tools/kvq-hold/"]),
    ("kvq-bench", ["tools/kvq-bench/"],
     ["std", "os", "CLI/", "nlohmann/", "kvq/", "client/abi.h", "tools/kvq-bench/", "tools/kvqctl/admin_client.h", "tools/kvqctl/text.h"]),
    ("kvqctl", ["tools/kvqctl/"], ["std", "os", "kj/", "capnp/", "CLI/", "nlohmann/", "kvq/", "schema", "tools/kvqctl/",
                                      "daemon/config.h", "daemon/config_edit.h"]),  # kvqctl set --save writes what kvqd reads
]
LIBRARIES = re.compile(r"^(uv\.h|(kj|capnp|boost|spdlog|fmt|CLI|toml\+\+|hwy|openssl|nlohmann|systemd|gtest|gmock|benchmark)[/.]|cuda)")
CLOCKLESS = {"chrono", "random", "thread", "mutex", "shared_mutex", "condition_variable", "future", "iostream", "fstream"}

# --- banned calls: (where, except where, pattern, what to do)
BANNED = [
    # log.cc and notify.cc read what systemd says about the journal and about itself; the socket path comes from KVQ_SOCKET where a client starts;
    # a client that misses its GPU names CUDA_VISIBLE_DEVICES.
    ("", ["daemon/config", "daemon/kill_at.cc", "daemon/log.cc", "daemon/notify.cc", "client/abi.cc", "client/cuda_side.cc", "tools/", "tests/"], r"\b(secure_)?getenv\s*\(",
     "settings are read in daemon/config and where a client connects"),
    ("daemon/", [], r"\b(u|nano)?sleep\s*\(|\bsleep_(for|until)\b", "the daemon waits in its loop"),
    ("daemon/", [], r"\bstd::\w*mutex\b|\bpthread_mutex|\bstd::condition_variable|\bstd::j?thread\b",
     "one thread owns the daemon's state; blocking work goes to EventLoop::submit_blocking"),
    ("daemon/core/", [], r"\bthrow\b|\bclock_gettime\b|\bspdlog\b", "core asserts; time is passed in; it logs nothing"),
    ("daemon/store", ["daemon/store.cc"], r"\bthrow\b", "only making the store may throw: once the loop runs, failures are values"),
    ("daemon/store", [], r"\bclock_gettime\b", "time is passed in"),
    # Deadlines are of the monotonic clock, so that a changed wall clock changes nothing; the log's time is spdlog's.
    ("daemon/", [], r"\bsystem_clock\b|\bCLOCK_REALTIME\b|\bgettimeofday\b|\btimespec_get\b|\b(std::)?time\s*\(\s*(nullptr|NULL|0|&)",
     "time is the loop's monotonic clock"),
    ("daemon/", [], r"\bstd::(cout|cerr)\b", "kvqd speaks through the log; main prints start-up errors with fputs"),
]
PROMISES = re.compile(r"\b(TO" r"DO|FIX" r"ME|GTEST_" r"SKIP|DISA" r"BLED_)|\bXX" r"X\b")
MACHINE_PATHS = re.compile(r"/(work|farm)/|/ro" r"ot/|/home/\w")


def without_comments_and_strings(text):
    """C++ text with comments, strings and characters blanked; line numbers and braces of code stay."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'', re.S)
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def room_of(path):
    for name, prefixes, rights in ROOMS:
        if any(path.startswith(prefix) for prefix in prefixes):
            return name, rights
    return None


def include_findings(path, text):
    room = room_of(path)
    if room is None:
        return []
    name, rights = room
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if not match:
            continue
        target = match.group(1)
        if target.endswith(".capnp.h"):
            allowed = "schema" in rights
        elif LIBRARIES.match(target) or "/" in target and '"' in line:
            allowed = any(target.startswith(right) for right in rights)
        elif '"' in line:
            allowed = False  # paths are written from the top of the repository
        elif target.endswith(".h"):
            allowed = "os" in rights or target in ("stdint.h", "stddef.h")
        else:
            allowed = not (name in ("core", "store") and target in CLOCKLESS)
        if not allowed:
            findings.append(f"{path}:{number}: room {name} may not include {target}")
    return findings


def function_spans(text):
    """(first line, last line) of each function body at namespace or class level."""
    code = without_comments_and_strings(re.sub(r"^\s*#.*?(?<!\\)$", "", text, flags=re.M | re.S))
    spans, stack, head, head_line, line = [], [], "", 1, 1
    for i, char in enumerate(code):
        if char == "\n":
            line += 1
        if char == "{":
            at_scope = all(entry[0] == "scope" for entry in stack)
            if not at_scope:
                kind = "inner"
            elif re.search(r"\b(namespace|class|struct|enum|union|extern)\b(?!.*\)\s*[\w\s]*$)", head, re.S):
                kind = "scope"
            else:
                kind = "function" if "(" in head and not head.rstrip().endswith("=") else "inner"
            stack.append((kind, head_line, head))
            head = ""
        elif char == "}":
            kind, start, before = stack.pop() if stack else ("scope", line, "")
            member = code[i + 1:i + 200].lstrip()[:1] in (",", "{")  # "y_{x}" in a constructor's list: the body is to come
            head = before if member else ""
            if kind == "function" and not member:
                spans.append((start, line))
        elif char == ";" and all(entry[0] == "scope" for entry in stack):
            head = ""
        elif all(entry[0] == "scope" for entry in stack):
            if not head.strip():
                head_line = line
            head += char
    return spans


def function_findings(path, text):
    if path.endswith(".py"):
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        spans = [(n.lineno, n.end_lineno) for n in nodes]
    else:
        spans = function_spans(text)
    return [f"{path}:{first}: function of {last - first + 1} lines, at most {MAX_FUNCTION_LINES}"
            for first, last in spans if last - first + 1 > MAX_FUNCTION_LINES]


def length_findings(path, text):
    lines = text.count("\n")
    return [f"{path}: {lines} lines, at most {MAX_FILE_LINES}: split by idea"] if lines > MAX_FILE_LINES else []


def name_findings(path):
    stem = pathlib.PurePosixPath(path).name.split(".")[0]
    return [] if re.fullmatch(r"[a-z0-9_]+(-inl)?", stem) else [f"{path}: file names are snake_case"]


def opening_findings(path, text):
    first = text.split("\n", 1)[0]
    opened = first.startswith(("//", "/*", "#", '"""')) and not first.startswith(("#pragma", "#include", "#if"))
    return [] if opened or not text.strip() else [f"{path}:1: the first line is a comment that says what holds in this file"]


def banned_findings(path, text):
    code = without_comments_and_strings(text)
    findings = []
    for where, exceptions, pattern, advice in BANNED:
        if not path.startswith(where) or any(path.startswith(exception) for exception in exceptions):
            continue
        for match in re.finditer(pattern, code):
            findings.append(f"{path}:{code.count(chr(10), 0, match.start()) + 1}: {match.group().strip()}: {advice}")
    return findings


def text_findings(path, text):
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := PROMISES.search(line):
            findings.append(f"{path}:{number}: {match.group()}: finish it or leave it out")
        if match := MACHINE_PATHS.search(line):
            findings.append(f"{path}:{number}: {match.group()}: a path of one machine")
    return findings


def dead_file_findings(paths, cmake):
    """Source files that no target names; "${x}" in CMake stands for a word of the file."""
    patterns = [re.sub(r"\\\$\\\{\w+\\\}", r"(\\w+)", re.escape(token)) for token in re.findall(r"[\w./${}-]+\.(?:cc|cu)", cmake)]
    words = set(re.findall(r"\w+", cmake))
    findings = []
    for path in paths:
        matches = (re.fullmatch(pattern, path) for pattern in patterns)
        if not any(match and all(group in words for group in match.groups()) for match in matches):
            findings.append(f"{path}: in no target of CMakeLists.txt")
    return findings


def label_findings(cmake):
    """gtest_discover_tests silently keeps the first of several labels, so a second one needs kvq_threads_too."""
    calls = re.findall(r"gtest_discover_tests\((\S+)([^)]*)\)", cmake)
    return [f"CMakeLists.txt: {name} loses its second label; call kvq_threads_too" for name, rest in calls
            if re.search(r"LABELS\s+\"\w+;", rest)]


class Rules(unittest.TestCase):
    """Each rule fails on what it forbids and passes what it allows."""

    def test_includes_stay_in_their_room(self):
        for path, include in [("daemon/core/x.cc", "<kj/async.h>"), ("daemon/core/x.cc", "<chrono>"),
                              ("daemon/core/x.cc", "<unistd.h>"), ("daemon/store.cc", "<uv.h>"),
                              ("daemon/store.cc", '"daemon/rpc/rpc.h"'), ("kernels/x.h", '"daemon/store.h"'),
                              ("include/kvq/x.h", "<boost/config.hpp>"), ("client/x.cc", '"daemon/event_loop.h"'),
                              ("daemon/rpc/x.cc", '"daemon/core/limbo.h"'), ("daemon/config.cc", "<uv.h>"),
                              ("daemon/shm/x.cc", '"kvq/protocol.capnp.h"'), ("client/x.cc", '"x.h"')]:
            self.assertEqual(len(include_findings(path, f"// x\n#include {include}\n")), 1, (path, include))
        for path, include in [("daemon/core/x.cc", "<vector>"), ("daemon/core/x.cc", '"kvq/types.h"'),
                              ("daemon/event_loop.cc", "<uv.h>"), ("daemon/rpc/x.cc", '"kvq/protocol.capnp.h"'),
                              ("daemon/shm/x.cc", "<sys/mman.h>"), ("tests/x.cc", "<uv.h>"), ("daemon/main.cc", "<spdlog/spdlog.h>")]:
            self.assertEqual(include_findings(path, f"// x\n#include {include}\n"), [], (path, include))

    def test_long_functions_are_found(self):
        body = "  call();\n" * 80
        for head in ["void f() {", "int A::f(int x) const {", "A::A(int x)\n    : x_(x), y_{x} {", "template <class T>\nvoid g(T t) {",
                     "static const char* f(const struct stat& s) {"]:
            self.assertEqual(len(function_findings("x.cc", f"namespace kvq {{\n{head}\n{body}}}\n}}\n")), 1, head)
            self.assertEqual(function_findings("x.cc", f"namespace kvq {{\n{head}\n  call();\n}}\n}}\n"), [], head)
        self.assertEqual(len(function_findings("x.h", f"class A {{\n public:\n  int f() {{\n{body}  }}\n}};\n")), 1)
        self.assertEqual(function_findings("x.cc", "const int k[] = {\n" + "  1,\n" * 90 + "};\n"), [])
        self.assertEqual(function_findings("x.h", "class A {\n" + "  void f();\n" * 90 + "};\n"), [])
        self.assertEqual(len(function_findings("x.py", "def f():\n" + "    g()\n" * 80)), 1)

    def test_text_in_quotes_and_comments_is_no_code(self):
        text = 'auto s = "getenv(\\"x\\") {"; // sleep(1) {\nchar c = \'{\'; int n = 1\'000\'000;\nR"(std::mutex {)"\n'
        self.assertNotIn("{", without_comments_and_strings(text))
        self.assertIn("000", without_comments_and_strings(text))
        self.assertEqual(banned_findings("daemon/x.cc", text), [])

    def test_banned_calls_are_found_where_they_are_banned(self):
        for path, call in [("daemon/store.cc", 'getenv("X")'), ("client/model.cc", 'std::getenv("X")'), ("daemon/x.cc", "usleep(1)"),
                           ("daemon/x.cc", "std::this_thread::sleep_for(d)"), ("daemon/rpc/x.h", "std::mutex m"),
                           ("daemon/x.cc", "std::shared_mutex m"), ("daemon/core/x.cc", "throw 1"), ("daemon/x.cc", "std::thread t"),
                           ("daemon/store_tick.cc", "clock_gettime(a, b)"),
                           ("daemon/rpc/x.cc", "std::chrono::system_clock::now()"), ("daemon/x.cc", "std::time(nullptr)"), ("daemon/x.cc", "gettimeofday(&t, 0)"),
                           ("daemon/x.cc", "std::cout << 1")]:
            self.assertEqual(len(banned_findings(path, f"void f() {{ {call}; }}\n")), 1, (path, call))
        for path, call in [("daemon/config.cc", 'getenv("X")'), ("client/abi.cc", 'getenv("X")'), ("tests/x.cc", "std::mutex m"),
                           ("client/x.cc", "std::mutex m"), ("daemon/x.cc", "std::this_thread::get_id()"), ("daemon/x.cc", "throw 1")]:
            self.assertEqual(banned_findings(path, f"void f() {{ {call}; }}\n"), [], (path, call))

    def test_sizes_names_and_openings(self):
        self.assertEqual(len(length_findings("x.cc", "\n" * 501)), 1)
        self.assertEqual(length_findings("x.cc", "\n" * 500), [])
        for bad in ["daemon/SlabPool.cc", "daemon/slab-pool.h", "tests/slabPool_test.cc"]:
            self.assertEqual(len(name_findings(bad)), 1, bad)
        for good in ["daemon/slab_pool.cc", "kernels/tile-inl.h", "include/kvq/protocol.capnp", "client/python/kvqd/__init__.py"]:
            self.assertEqual(name_findings(good), [], good)
        for bad in ["#pragma once\n", "#include <vector>\n", "int x;\n", "\n// late\n"]:
            self.assertEqual(len(opening_findings("x.h", bad)), 1, bad)
        for good in ["// Why.\n", "/* C header */\n", '"""Doc."""\n', "# Schema.\n", "#!/usr/bin/env bash\n"]:
            self.assertEqual(opening_findings("x.h", good), [], good)

    def test_promises_and_machine_paths_are_found(self):
        for bad in ["// TO" + "DO: later", "GTEST_" + "SKIP();", "see /wo" + "rk/main", "/ro" + "ot/.cache", "/ho" + "me/joe/x"]:
            self.assertEqual(len(text_findings("x.md", bad)), 1, bad)
        self.assertEqual(text_findings("x.md", "network/work, home/x and /run/kvq are fine"), [])

    def test_dead_files_and_lost_labels_are_found(self):
        cmake = "add_library(a daemon/a.cc)\nforeach(t one two)\n add_executable(x tests/${t}_test.cc)\nendforeach()\n"
        self.assertEqual(dead_file_findings(["daemon/a.cc", "tests/one_test.cc"], cmake), [])
        self.assertEqual(len(dead_file_findings(["daemon/b.cc", "tests/three_test.cc", "a.cc"], cmake)), 3)
        self.assertEqual(len(label_findings('gtest_discover_tests(x PROPERTIES LABELS "unit;threads")\n')), 1)
        self.assertEqual(label_findings("gtest_discover_tests(x PROPERTIES LABELS unit)\n"), [])


class Tree(unittest.TestCase):
    """The rules applied to this repository."""

    @classmethod
    def setUpClass(cls):
        cls.texts = {}
        for path in sorted(ROOT.rglob("*")):
            relative = path.relative_to(ROOT)
            if path.is_file() and not SKIPPED_FOLDERS & set(relative.parts) and not any("egg-info" in p for p in relative.parts):
                try:
                    cls.texts[relative.as_posix()] = path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue
        cls.cmake = cls.texts["CMakeLists.txt"] + cls.texts["tests/tests.cmake"] + cls.texts["tests/gpu/gpu_tests.cmake"] + cls.texts["tests/support/simt/simt.cmake"]
        # Sources of a room with a CMake file of its own are named from there.
        room = cls.texts["kernels/cuda/CMakeLists.txt"].replace("${CMAKE_SOURCE_DIR}/", "")
        cls.cmake += re.sub(r"(?<![\w./])(\w+\.(?:cc|cu))\b", r"kernels/cuda/\1", room)

    def check(self, suffixes, rule, *arguments):
        findings = []
        for path, text in self.texts.items():
            if path.endswith(suffixes):
                findings += rule(path) if rule is name_findings else rule(path, text)
        self.assertFalse(findings, "\n" + "\n".join(findings))

    def test_there_is_something_to_check(self):
        self.assertGreater(sum(path.endswith(".cc") for path in self.texts), 20)

    def test_includes(self):
        self.check((".h", ".hpp", ".cc", ".cu", ".cuh"), include_findings)

    def test_functions(self):
        self.check((".h", ".hpp", ".cc", ".cu", ".cuh", ".py"), function_findings)

    def test_lengths(self):
        self.check((".h", ".hpp", ".cc", ".cu", ".cuh", ".py", ".capnp"), length_findings)

    def test_names(self):
        self.check((".h", ".hpp", ".cc", ".cu", ".cuh", ".py", ".capnp"), name_findings)

    def test_openings(self):
        self.check((".h", ".hpp", ".cc", ".cu", ".cuh", ".py", ".capnp"), opening_findings)

    def test_banned_calls(self):
        self.check((".h", ".hpp", ".cc", ".cu", ".cuh"), banned_findings)

    def test_promises_and_machine_paths(self):
        self.check(("",), text_findings)

    def test_dead_files(self):
        outside = "tests/package/"  # a project of its own, which names its files itself
        sources = [path for path in self.texts if path.endswith((".cc", ".cu")) and not path.startswith(outside)]
        findings = dead_file_findings(sources, self.cmake) + label_findings(self.cmake)
        self.assertFalse(findings, "\n" + "\n".join(findings))


if __name__ == "__main__":
    unittest.main()
