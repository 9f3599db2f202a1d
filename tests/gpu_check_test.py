"""tools/gpu-check without a GPU: over a bundle whose programs are small scripts, each with the end that its test is about.

Invariant: no test needs a GPU, torch or compute-sanitizer; what gpu-check says (table, logs, exit code) is all that is looked at.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ["gpu_entries_test", "gpu_transcode_test", "gpu_attend_test", "gpu_backend_test", "gpu_conformance_test", "gpu_client_test",
            "kvq_bench_gpu_transcode", "kvq_bench_gpu_attend", "kvq_bench_gpu_node"]


def write_program(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bundle = pathlib.Path(folder.name).resolve() / "bundle"
        self.bundle.mkdir()
        self.packages, self.tools = self.bundle / "packages", self.bundle / "tools"
        shutil.copy(ROOT / "tools/gpu-check", self.bundle / "gpu-check")
        (self.bundle / "commit").write_text("abc1234-dirty\n")
        for name in PROGRAMS:
            write_program(self.bundle / "bin" / name, 'echo "$0 $*"\necho fine')
        write_program(self.tools / "compute-sanitizer", 'echo "========= COMPUTE-SANITIZER"\necho "$*"')
        self.environment = dict(os.environ, PYTHONPATH=str(self.packages), PATH=f"{self.tools}:{os.environ['PATH']}")
        self.environment.pop("KVQ_MODEL", None)

    def package(self, name, body=""):
        self.packages.mkdir(exist_ok=True)
        (self.packages / f"{name}.py").write_text(body)

    def check(self, *options):
        """(exit code, the table as {step: (verdict, words)}, stderr)."""
        done = subprocess.run([sys.executable, self.bundle / "gpu-check", *options], env=self.environment, capture_output=True, text=True, timeout=120)
        rows = re.findall(r"^(\S+) +(passed|too long|absent|left out|failed -?\d+) +[\d.]+ s  (.*)$", done.stdout, re.M)
        return done.returncode, {name: (verdict, words) for name, verdict, words in rows}, done.stderr

    def log(self, name):
        return (self.bundle / "results" / f"{name}.log").read_text()

    def test_what_passes_is_said_and_logged(self):
        code, table, _ = self.check("--only", "gpu_entries_test,bench:,memcheck:gpu_entries")
        self.assertEqual(code, 0)
        self.assertEqual(len(table), 15)
        self.assertEqual({verdict for verdict, _ in table.values()}, {"passed"})
        self.assertEqual(table["gpu_entries_test"][1], "fine")
        self.assertIn("--gtest_brief=1\nfine", self.log("gpu_entries_test"))
        self.assertIn("--topic decode --commit abc1234-dirty --date 2", self.log("bench.decode"))
        self.assertIn(f"--out {self.bundle}/results/decode.json", self.log("bench.decode"))
        self.assertIn("--topic recovery --commit abc1234-dirty", self.log("bench.recovery"))
        self.assertIn(f"--tool memcheck --error-exitcode 9 {self.bundle}/bin/gpu_entries_test", self.log("memcheck.gpu_entries_test"))

    def test_a_failure_has_its_code_and_its_first_line_in_the_table(self):
        write_program(self.bundle / "bin/gpu_client_test",
                      'echo \'{"name": "oracle_relative_error"}\'\necho "  layer 0: relative error 1e-4"\n'
                      'echo "a_test.cc:7: Failure"\necho "[  FAILED  ] A.B"\necho "last words"\nexit 3')
        write_program(self.bundle / "bin/kvq_bench_gpu_node", 'echo "  layer 0: relative error 1e-4"\necho "kvq_bench_gpu_node: no GPU" >&2\nexit 1')
        code, table, _ = self.check("--only", "gpu_client_test,gpu_attend_test,bench:recovery")
        self.assertEqual(code, 1)
        self.assertEqual(table["gpu_client_test"], ("failed 3", "a_test.cc:7: Failure"))
        self.assertEqual(table["bench:recovery"], ("failed 1", "kvq_bench_gpu_node: no GPU"))
        self.assertEqual(table["gpu_attend_test"][0], "passed")  # none stops the others
        self.assertIn("last words", self.log("gpu_client_test"))

    def test_what_a_sanitizer_finds_is_said(self):
        write_program(self.tools / "compute-sanitizer",
                      'echo "========= COMPUTE-SANITIZER"\necho "========= Invalid __global__ read"\necho "========= ERROR SUMMARY: 1 error"\nexit 9')
        code, table, _ = self.check("--only", "racecheck:gpu_attend")
        self.assertEqual((code, table), (1, {"racecheck:gpu_attend_test": ("failed 9", "========= Invalid __global__ read")}))

    def test_a_death_by_signal_is_a_failure(self):
        write_program(self.bundle / "bin/gpu_attend_test", "echo before\nkill -SEGV $$")
        code, table, _ = self.check("--only", "gpu_attend_test")
        self.assertEqual((code, table), (1, {"gpu_attend_test": ("failed -11", "before")}))

    def await_death(self, pid_file):
        pid = int(pid_file.read_text())
        for _ in range(100):
            try:  # a zombie that nobody waits for is dead too
                if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    return
            except OSError:
                return
            time.sleep(0.05)
        self.fail(f"{pid} lives")

    def test_what_takes_too_long_is_killed_with_all_that_it_started(self):
        pid = self.bundle / "pid"
        write_program(self.bundle / "bin/gpu_attend_test", f"sleep 60 &\necho $! >{pid}\necho waiting\nwait")
        began = time.monotonic()
        code, table, _ = self.check("--only", "gpu_attend_test", "--budget", "6")
        self.assertLess(time.monotonic() - began, 30)
        self.assertEqual((code, table), (1, {"gpu_attend_test": ("too long", "waiting")}))
        self.await_death(pid)

    def test_what_a_step_leaves_behind_is_killed(self):
        pid = self.bundle / "pid"
        write_program(self.bundle / "bin/gpu_attend_test", f"sleep 60 &\necho $! >{pid}")
        self.assertEqual(self.check("--only", "gpu_attend_test")[0], 0)
        self.await_death(pid)

    def test_without_budget_nothing_runs_and_nothing_is_proved(self):
        code, table, _ = self.check("--only", "gpu_attend_test,gpu_entries_test", "--budget", "0")
        self.assertEqual(code, 1)
        self.assertEqual(set(table.values()), {("left out", "the budget is spent")})
        self.assertFalse((self.bundle / "results/gpu_attend_test.log").exists())

    def test_what_a_step_needs_and_is_not_here_is_named(self):
        (self.bundle / "bin/gpu_attend_test").unlink()
        (self.tools / "compute-sanitizer").unlink()
        self.package("torch", "raise ImportError\n")
        self.environment["PATH"] = "/usr/bin:/bin"
        code, table, _ = self.check("--only", "gpu_attend_test,memcheck:gpu_entries,python")
        self.assertEqual(code, 1)
        self.assertEqual(table["gpu_attend_test"], ("absent", f"no {self.bundle}/bin/gpu_attend_test"))
        self.assertEqual(table["memcheck:gpu_entries_test"], ("absent", "no compute-sanitizer"))
        self.assertEqual(table["python"], ("absent", "no torch"))

    def test_python_steps_need_no_model_and_fidelity_does(self):
        for name in ("torch", "cffi"):
            self.package(name)
        self.package("pytest", "import os, sys\nif __name__ == '__main__': print(sys.argv[1:], os.environ['KVQ_BIN_DIR'], os.environ['KVQ_LIBRARY'])\n")
        for name in ("gguf", "tokenizers"):
            self.package(name, "raise ImportError\n")
        write_program(self.bundle / "tests/python/shared_prefix.py", "")
        self.assertEqual(self.check("--only", "python,shared_prefix")[0], 0)
        self.assertIn(f"{self.bundle}/tests/python", self.log("python"))
        self.assertIn(f"{self.bundle}/bin {self.bundle}/lib/libkvq.so.1", self.log("python"))
        self.assertEqual(self.check("--only", "fidelity")[0], 2)  # there is no such step without a model
        self.environment["KVQ_MODEL"] = "/model.gguf"
        self.assertEqual(self.check("--only", "fidelity")[:2], (1, {"fidelity": ("absent", "no gguf")}))
        for name in ("gguf", "tokenizers"):
            self.package(name)
        (self.bundle / "tests/python/smollm2.py").write_text("import sys\nprint(sys.argv[1:])\n")
        self.assertEqual(self.check("--only", "fidelity")[0], 0)
        self.assertIn(f"'--commit', 'abc1234-dirty', '--out', '{self.bundle}/results/fidelity.json'", self.log("fidelity"))

    def test_steps_are_listed_and_chosen_by_the_beginning_of_their_names(self):
        def listed(*options):
            done = subprocess.run([sys.executable, self.bundle / "gpu-check", "--list", *options], env=self.environment, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0)
            return done.stdout.split()
        every = listed()
        self.assertEqual(len(every), len(set(every)))
        self.assertEqual(every[0], "gpu_entries_test")
        self.assertEqual(every[-1], "bench:mps_crash")
        self.assertEqual(listed("--only", "bench:", "--skip", "bench:mps_crash,bench:recovery,bench:attend"),
                         ["bench:transcode", "bench:decode", "bench:latencies", "bench:interference", "bench:pacing", "bench:million_tokens"])
        self.assertEqual(listed("--skip", "gpu_,python,shared,memcheck,racecheck,initcheck"), [n for n in every if n.startswith("bench:")])
        self.assertFalse((self.bundle / "results").exists())

    def test_a_bad_command_line_is_an_error_that_names_it(self):
        for options, word in [(("--only", "gpu_attend_test,nosuch"), "nosuch"), (("--skip", "nosuch"), "nosuch"),
                              (("--only", "python", "--skip", "python"), "no step is left"), (("--out", str(self.bundle / "commit/x")), "commit/x")]:
            code, table, said = self.check(*options)
            self.assertEqual((code, table), (2, {}), options)
            self.assertIn(word, said)
            self.assertNotIn("Traceback", said)

    def test_results_go_where_they_are_wanted(self):
        self.assertEqual(self.check("--only", "bench:decode", "--out", str(self.bundle / "a/b"))[0], 0)
        self.assertIn(f"--out {self.bundle}/a/b/decode.json", (self.bundle / "a/b/bench.decode.log").read_text())


if __name__ == "__main__":
    unittest.main()
