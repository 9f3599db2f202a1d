"""tools/gpu-bench without a GPU: over a bundle whose benchmark and peers are small scripts with the rows that each test is about.

Invariant: no test needs a GPU or torch; what gpu-bench writes and prints is all that is looked at.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Says its shapes, or writes the rows that lie beside it as ROWS.json, or fails.
BENCHMARK = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
topic = options.get("--list") or options["--topic"]
rows = json.loads((here / "ROWS.json").read_text()).get(topic)
if "--list" in options:
    print(json.dumps([{{"shape": shape, "kv_bytes": options["--kv-bytes"]}} for shape in dict.fromkeys(row["shape"] for row in rows)]))
elif rows is None:
    sys.exit("kvq_bench_gpu_attend: 8x32768: attention is 0.5 away from the oracle")
else:
    document = {{"topic": topic if topic == "decode" else "attend_" + topic, "device": "Fake", "driver": "CUDA 13.0", "rows": rows,
                "commit": options["--commit"], "date": options["--date"], "command": "", "ceilings": {{"read_tb_s": 4.0, "copy_tb_s": 3.5}}}}
    pathlib.Path(options["--out"]).write_text(json.dumps(document))
"""


def ours(name, shape, us, megabytes):
    return {"name": name, "shape": shape, "median_us": us, "bytes": megabytes * 1e6, "floor_us": megabytes / 4, "of_ceiling": megabytes / 4 / us,
            "relative_error": 3e-4}


def theirs(name, shape, us, megabytes, bits, topic="decode"):
    return {"topic": topic, "name": name, "shape": shape, "median_us": us, "bytes": megabytes * 1e6, "kv_bits": bits, "relative_error": 2e-4, "took_s": 1}


class GpuBench(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bundle = pathlib.Path(folder.name).resolve()
        shutil.copy(ROOT / "tools/gpu-bench", self.bundle / "gpu-bench")
        shutil.copytree(ROOT / "tests/bench/report", self.bundle / "tests/bench/report")
        (self.bundle / "commit").write_text("abc1234\n")
        (self.bundle / "bin").mkdir()
        benchmark = self.bundle / "bin/kvq_bench_gpu_attend"
        benchmark.write_text(BENCHMARK.format(python=sys.executable))
        benchmark.chmod(0o755)
        self.ours({"decode": [ours("kvq_int4", "1x4096", 10, 4), ours("kvq_dense", "1x4096", 20, 16),
                              ours("kvq_int4", "8x32768", 100, 300), ours("kvq_dense", "8x32768", 300, 1000)]})
        self.peers([])

    def ours(self, rows_by_topic):
        (self.bundle / "bin/ROWS.json").write_text(json.dumps(rows_by_topic))

    def peers(self, lines, body=""):
        """A program of peers that says `lines`, each a line of JSON, from the one that begins case --start on."""
        script = self.bundle / "tests/bench/peers/peers.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"import json, os, sys\nstart, wanted = int(sys.argv[2]), json.load(sys.stdin)\nlines = {lines!r}\n{body}\n"
                          "begun = start == 0\nfor line in lines:\n    begun = begun or line.get('begin', -1) >= start\n"
                          "    if begun and line == {'die': True}: sys.exit('illegal memory access')\n"
                          "    if begun: print(json.dumps(line), flush=True)\n")

    def bench(self, *options):
        done = subprocess.run([sys.executable, self.bundle / "gpu-bench", *options], capture_output=True, text=True, timeout=60,
                              env=dict(os.environ, PATH="/usr/bin:/bin", PYTHONDONTWRITEBYTECODE="1"))
        self.assertNotIn("Traceback", done.stderr)
        return done

    def result(self, name="decode"):
        return json.loads((self.bundle / f"results/{name}.json").read_text())

    def row(self, name, shape, topic="decode"):
        return next(row for row in self.result(topic)["rows"] if (row["name"], row["shape"]) == (name, shape))

    def begin(self, number, name, shape, topic="decode"):
        return {"begin": number, "topic": topic, "name": name, "shape": shape}

    def test_peers_get_the_ceiling_and_how_much_faster_kvq_is(self):
        self.peers([{"versions": {"torch": "2.11"}}, self.begin(0, "fi_fp16", "8x32768"), {"row": theirs("fi_fp16", "8x32768", 250, 800, 16)}, {"end": True}])
        done = self.bench("--topics", "decode")
        self.assertEqual(done.returncode, 0, done.stderr)
        row = self.row("fi_fp16", "8x32768")
        self.assertAlmostEqual(row["floor_us"], 200)
        self.assertAlmostEqual(row["of_ceiling"], 0.8)
        self.assertAlmostEqual(row["speed_of_kvq_int4"], 2.5)
        self.assertAlmostEqual(row["speed_of_kvq_dense"], 250 / 300)
        self.assertNotIn("took_s", row)
        self.assertEqual((self.result()["peers"], self.result()["commit"]), ({"torch": "2.11"}, "abc1234"))
        self.assertIn("| 8x32768 | 75.0 us | 100.0 us, 75 % | 300.0 us, 83 % | 250.0 us, 80 % (fi_fp16) | - | 2.50 | - | **0.83** |", done.stdout)
        self.assertIn("| 8x32768 | fi_fp16 | 250.0 us, 80 % | 800.0 | 2.0e-04 | 2.50 | **0.83** |", done.stdout)
        self.assertNotIn("is slower than", done.stdout)

    def test_the_best_peer_of_each_width_is_in_the_first_table_and_all_in_the_second(self):
        names = {"a_fp16": (260, 16), "b_fp16": (240, 16), "c_fp8": (150, 8), "d_fp8": (160, 8)}
        self.peers([*({"row": theirs(name, "8x32768", us, 500, bits)} for name, (us, bits) in names.items()), {"end": True}])
        said = self.bench("--topics", "decode").stdout
        first, second = said.split("| shape | kernel")
        self.assertIn("240.0 us, 52 % (b_fp16) | 150.0 us, 83 % (c_fp8) | 2.40 | 1.50 |", first)
        self.assertNotIn("a_fp16", first)
        for name in names:
            self.assertIn(f"| 8x32768 | {name} |", second)

    def test_where_kvq_loses_is_said(self):
        self.peers([{"row": theirs("xqa_fp8", "1x4096", 8, 8, 8)}, {"end": True}])
        said = self.bench("--topics", "decode").stdout
        self.assertIn("| 1x4096 | xqa_fp8 | 8.0 us, 25 % | 8.0 | 2.0e-04 | **0.80** |", said)
        self.assertIn("kvq_int4 is slower than xqa_fp8 at 1x4096: 0.80 of its speed.", said)

    def test_an_absent_peer_is_listed_with_its_reason(self):
        reason = "No module named 'flashinfer'; pip install flashinfer-python"
        absent = [{"absent": {"topic": "decode", "name": "fi_fp16", "shape": shape, "reason": reason}} for shape in ("1x4096", "8x32768")]
        self.peers([*absent, {"end": True}])
        done = self.bench("--topics", "decode")
        self.assertEqual(done.returncode, 0)
        self.assertEqual(self.result()["absent"], [{"name": "fi_fp16", "reason": reason, "shapes": ["1x4096", "8x32768"]}])
        self.assertIn(f"| fi_fp16 | {reason} | 2 |", done.stdout)

    def test_without_torch_every_peer_is_absent_from_every_topic(self):
        self.peers([{"absent": {"topic": "", "name": "every peer", "shape": "", "reason": "No module named 'torch'"}}, {"end": True}])
        self.assertIn("| every peer | No module named 'torch' | all |", self.bench("--topics", "decode").stdout)

    def test_a_peer_that_ends_its_process_costs_its_own_case_alone(self):
        self.peers(["talk of a package", self.begin(0, "a", "1x4096"), {"row": theirs("a", "1x4096", 20, 16, 16)}, self.begin(1, "bad", "1x4096"), {"die": True},
                    self.begin(2, "c", "1x4096"), {"row": theirs("c", "1x4096", 30, 16, 16)}, {"end": True}],
                   "lines = [line for line in lines if isinstance(line, dict)]; print('talk of a package')")
        self.assertEqual(self.bench("--topics", "decode").returncode, 0)
        self.assertEqual([self.row(name, "1x4096")["median_us"] for name in "ac"], [20, 30])
        self.assertEqual(self.result()["absent"], [{"name": "bad", "reason": "its process ended: illegal memory access", "shapes": ["1x4096"]}])

    def test_a_process_that_ends_after_its_answer_loses_nothing(self):
        self.peers([self.begin(0, "a", "1x4096"), {"absent": {"topic": "decode", "name": "a", "shape": "1x4096", "reason": "refused"}}, {"die": True},
                    self.begin(1, "b", "1x4096"), {"row": theirs("b", "1x4096", 20, 16, 16)}, {"end": True}])
        self.bench("--topics", "decode")
        self.assertEqual([entry["reason"] for entry in self.result()["absent"]], ["refused"])
        self.assertEqual(self.row("b", "1x4096")["median_us"], 20)

    def test_a_program_of_peers_that_never_begins_is_given_up(self):
        self.peers([], "sys.exit('no GPU driver')")
        self.assertIn("| every peer | its process ended: no GPU driver | all |", self.bench("--topics", "decode").stdout)

    def test_steps_are_compared_by_tokens_a_second_since_batches_differ(self):
        shape = "what fits in 128 GB of 131072 tokens, 32 layers"
        step = {"batch": 27, "layers_in_memory": 32, "tokens_s": 800.0}
        self.ours({"step": [{**ours("kvq_int4", shape, 33750, 127000), **step}]})
        self.peers([{"row": {**theirs("fi_fp16", shape, 28000, 120000, 16, "step"), **step, "batch": 7, "tokens_s": 250.0}},
                    {"row": {"topic": "step", "name": "fi_fp32", "shape": shape, "kv_bits": 32, "batch": 0, "tokens_s": 0}}, {"end": True}])
        said = self.bench("--topics", "step", "--kv-bytes", "128000000000").stdout
        self.assertAlmostEqual(self.row("fi_fp16", shape, "attend_step")["speed_of_kvq_int4"], 3.2)
        self.assertIn(f"| {shape} | fi_fp16 | 7 | 28.00 ms, 107 % | 250 | 32 | 2.0e-04 | 3.20 |", said)
        self.assertIn(f"| {shape} | fi_fp32 | none | does not fit | 0 | - | - | - |", said)

    def test_what_computes_more_than_it_reads_is_told_in_flops_of_the_same_work(self):
        shape = "1x139264, 8192 queries"
        self.ours({"prefill": [{**ours("kvq_int4", shape, 50000, 160), "tflop_s": 300.0}, {"name": "int4_speed_of_dense", "shape": shape, "value": 0.9, "unit": "ratio"}]})
        self.peers([{"row": theirs("fa3_fp16", shape, 30000, 570, 16, "prefill")}, {"end": True}])
        said = self.bench("--topics", "prefill").stdout
        self.assertIn("| 50.00 ms, 300 TFLOP/s | - | 30.00 ms, 500 TFLOP/s (fa3_fp16) | - | **0.60** |", said)

    def test_kvqs_own_failure_is_the_exit_code_and_leaves_an_old_result_alone(self):
        (self.bundle / "results").mkdir()
        (self.bundle / "results/attend_heads.json").write_text("old")
        done = self.bench("--topics", "heads,decode")
        self.assertEqual(done.returncode, 1)
        self.assertIn("heads: exit code 1: kvq_bench_gpu_attend: 8x32768: attention is 0.5 away from the oracle", done.stderr)
        self.assertEqual((self.bundle / "results/attend_heads.json").read_text(), "old")
        self.assertIn("## decode", done.stdout)

    def test_plots_are_drawn_from_json_alone_and_are_the_same_each_time(self):
        self.ours({"decode": [ours(name, f"1x{tokens}", us * tokens / 1000, megabytes * tokens / 1000)
                              for tokens in (4096, 131072, 1048576) for name, us, megabytes in (("kvq_int4", 0.3, 1.12), ("kvq_dense", 1, 4.096))]})
        self.peers([{"row": theirs("fi_fp8", "1x4096", 9, 8, 8)}, {"end": True}])
        self.bench("--topics", "decode")
        names = ["capacity.svg", "decode_ceiling.svg", "decode_context.svg"]
        first = {name: (self.bundle / "results" / name).read_bytes() for name in names}
        for name in names:
            (self.bundle / "results" / name).unlink()
        shutil.rmtree(self.bundle / "tests/bench/peers")
        self.assertEqual(self.bench("--from", str(self.bundle / "results")).returncode, 0)
        for name in names:
            self.assertEqual((self.bundle / "results" / name).read_bytes(), first[name])
            self.assertEqual(ElementTree.fromstring(first[name]).tag, "{http://www.w3.org/2000/svg}svg")
        self.assertIn(b">93 %<", first["decode_ceiling.svg"])  # 1.12 MB a thousand tokens at 4 TB/s in 0.3 us
        self.assertIn(b">1M<", first["decode_context.svg"])
        self.assertIn(b">954 K<", first["capacity.svg"])  # 125 GB in 16 bits of 4096 bytes a token and layer
        self.assertIn(b">3488 K<", first["capacity.svg"])

    def test_a_bad_command_line_is_an_error_that_names_it(self):
        for options, word in [(("--topics", "decode,nosuch"), "nosuch"), (("--from", "/nosuch"), "/nosuch")]:
            done = self.bench(*options)
            self.assertEqual(done.returncode, 2)
            self.assertIn(word, done.stderr)
        (self.bundle / "bin/kvq_bench_gpu_attend").unlink()
        self.assertEqual(self.bench("--topics", "decode").returncode, 2)

    def test_the_gpu_says_what_steps_may_fill(self):
        tools = self.bundle / "tools"
        tools.mkdir()
        (tools / "nvidia-smi").write_text("#!/bin/sh\necho 143771\n")
        (tools / "nvidia-smi").chmod(0o755)
        done = subprocess.run([sys.executable, self.bundle / "gpu-bench", "--topics", "decode"], capture_output=True, text=True, timeout=60,
                              env=dict(os.environ, PATH=f"{tools}:/usr/bin:/bin"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.peers([], "print(json.dumps({'absent': {'topic': 'decode', 'name': 'x', 'shape': '', 'reason': str(wanted['decode'][0]['kv_bytes'])}})); print('{\"end\": true}')")
        done = subprocess.run([sys.executable, self.bundle / "gpu-bench", "--topics", "decode"], capture_output=True, text=True, timeout=60,
                              env=dict(os.environ, PATH=f"{tools}:/usr/bin:/bin"))
        self.assertIn("| x | 128000000000 | all |", done.stdout)


if PROGRAM := os.environ.get("KVQ_BENCH_GPU_ATTEND"):  # a build with CUDA names it

    class Shapes(unittest.TestCase):
        """The real benchmark's list, which needs no GPU either."""

        def listed(self, topic, *options):
            return json.loads(subprocess.run([PROGRAM, "--list", topic, *options], check=True, capture_output=True, text=True).stdout)

        def test_every_topic_lists_what_peers_take_and_no_text_stands_for_two_shapes(self):
            fields = re.findall(r"^    (\w+):", (ROOT / "tests/bench/peers/case.py").read_text(), re.M)
            self.assertEqual(fields, ["shape", "lengths", "queries", "kv_heads", "group", "head_dim"])
            for topic in ("decode", "heads", "formats", "ragged", "verify", "prefill"):
                shapes = self.listed(topic)
                self.assertTrue(all(sorted(entry) == sorted(fields) for entry in shapes), topic)
                self.assertEqual(len({entry["shape"] for entry in shapes}), len(shapes), topic)

        def test_ragged_lengths_are_the_same_each_time_and_spread_over_three_decades(self):
            self.assertEqual(self.listed("ragged"), self.listed("ragged"))
            lengths = self.listed("ragged")[-1]["lengths"]
            self.assertEqual(len(lengths), 64)
            self.assertTrue(100 <= min(lengths) < 200 and 50_000 < max(lengths) < 100_000)

        def test_steps_say_their_model_and_what_they_may_fill(self):
            steps = self.listed("step", "--kv-bytes", "20000000000")
            self.assertEqual({entry["layers"] for entry in steps}, {32})
            self.assertEqual([entry["sequences"] for entry in steps], [8, 1, 0, 0, 0])
            self.assertEqual({entry["kv_bytes"] for entry in steps if not entry["sequences"]}, {2e10})
            self.assertIn("what fits in 20 GB of 131072 tokens, 32 layers", {entry["shape"] for entry in steps})

        def test_no_topic_is_an_error_that_names_those_there_are(self):
            done = subprocess.run([PROGRAM, "--list", "nosuch"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1)
            self.assertIn("no topic nosuch: one of decode, heads", done.stderr)


if __name__ == "__main__":
    unittest.main()
