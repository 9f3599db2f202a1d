"""What an operator's Prometheus makes of kvqd's metrics: names, alerts and dashboard, and a real Prometheus that scrapes a real kvqd.

Arguments: kvqd, the repository. promtool and prometheus are those of the PATH, else those that tools/setup unpacked into
build/prometheus; without them only what needs none is tested, and the test ends as skipped (77) with a line that says so.
"""

import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

KVQD, ROOT = sys.argv[1], pathlib.Path(sys.argv[2])
MONITORING = ROOT / "docs" / "monitoring"
PATIENCE_S = 60


def program(name):
    unpacked = ROOT / "build" / "prometheus" / "usr" / "bin" / name
    return shutil.which(name) or (str(unpacked) if unpacked.exists() else None)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


def until(what, ask):
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            if found := ask():
                return found
        except OSError as error:
            found = error
        if time.monotonic() > end:
            raise AssertionError(f"still waiting for {what}: {found}")
        time.sleep(0.1)


class Kvqd:
    def __init__(self, directory):
        self.directory, self.port = directory, free_port()
        settings = pathlib.Path(directory) / "kvqd.toml"
        settings.write_text(f'socket = "{directory}/kvqd.sock"\nmetrics = "127.0.0.1:{self.port}"\narena_bytes = "4MiB"\n'
                            'slab_bytes = "256KiB"\nmax_pages = 1024\n[[tenants]]\nname = "chat"\nuids = [4000000]\n')
        self.url = f"http://127.0.0.1:{self.port}/metrics"
        self.settings = settings
        self.start()

    def start(self):
        self.process = subprocess.Popen([KVQD, "--config", str(self.settings)], stderr=subprocess.DEVNULL)
        until("kvqd", lambda: get(self.url))

    def stop(self):
        self.process.terminate()
        self.process.wait()


class Monitoring(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="kvq-prometheus-")
        cls.kvqd = Kvqd(cls.directory.name)
        cls.text = get(cls.kvqd.url)
        cls.families = set(re.findall(r"^# TYPE (\w+) ", cls.text, re.M))
        cls.rules = (MONITORING / "kvq.rules.yml").read_text()

    @classmethod
    def tearDownClass(cls):
        cls.kvqd.stop()
        cls.directory.cleanup()

    def check_names(self, text):
        """Every metric that `text` names is one that kvqd has."""
        names = set(re.findall(r"\bkvq_[a-z0-9_]+", text))
        self.assertTrue(names)
        self.assertFalse({n for n in names if re.sub(r"_(bucket|sum|count)$", "", n) not in self.families and n not in self.families})

    def test_alerts_and_dashboard_name_what_exists(self):
        expressions = re.findall(r"expr: (.*)", self.rules)
        self.check_names("\n".join(expressions))
        dashboard = json.loads((MONITORING / "kvq.dashboard.json").read_text())
        targets = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
        queries = [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
        self.assertGreater(len(targets), 15)
        for expression in targets + queries:
            self.check_names(expression)
        self.assertEqual(len({p["id"] for p in dashboard["panels"]}), len(dashboard["panels"]))

    def test_each_alert_and_each_metric_is_in_the_manual(self):
        manual = (ROOT / "docs" / "monitoring" / "README.md").read_text()
        alerts = re.findall(r"- alert: (\w+)", self.rules)
        self.assertGreater(len(alerts), 10)
        for alert in alerts:
            self.assertTrue(f"\n### {alert}\n" in manual, f"{alert} is not explained")
            self.assertTrue(f"docs/monitoring/README.md#{alert.lower()}\n" in self.rules, f"{alert} does not lead to its explanation")
        self.assertEqual([family for family in self.families if f"`{family}`" not in manual], [])

    def test_promtool_accepts_names_and_rules(self):
        for arguments, given in [(["check", "metrics"], self.text), (["check", "rules", "kvq.rules.yml"], None),
                                 (["test", "rules", "kvq.rules.test.yml"], None), (["check", "config", "prometheus.yml"], None)]:
            done = subprocess.run([program("promtool"), *arguments], input=given, text=True, cwd=MONITORING, capture_output=True, timeout=60)
            self.assertEqual(done.returncode, 0, f"promtool {arguments}: {done.stdout}{done.stderr}")
            self.assertEqual(done.stderr if arguments[1] == "metrics" else "", "")
        tested = set(re.findall(r"alertname: (\w+)", (MONITORING / "kvq.rules.test.yml").read_text()))
        self.assertEqual(tested, set(re.findall(r"- alert: (\w+)", self.rules)), "alerts without a test")

    def test_prometheus_scrapes_kvqd_and_loads_the_alerts(self):
        port, data = free_port(), pathlib.Path(self.directory.name) / "data"
        config = pathlib.Path(self.directory.name) / "prometheus.yml"
        shutil.copy(MONITORING / "kvq.rules.yml", self.directory.name)
        config.write_text((MONITORING / "prometheus.yml").read_text().replace("127.0.0.1:9477", f"127.0.0.1:{self.kvqd.port}")
                          .replace("scrape_interval: 15s", "scrape_interval: 1s"))
        prometheus = subprocess.Popen([program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={data}",
                                       f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def query(expression):
            reply = json.loads(get(f"http://127.0.0.1:{port}/api/v1/query?query=" + urllib.parse.quote(expression)))
            return [(r["metric"], float(r["value"][1])) for r in reply["data"]["result"]]

        try:
            until("the first scrape", lambda: query("kvq_arena_bytes"))
            self.assertEqual([v for _, v in query("kvq_arena_bytes - on (device) sum by (device) (kvq_memory_bytes)")], [0])
            self.assertEqual([m["tenant"] for m, _ in query("kvq_tenant_sessions")], ["chat"])
            stored = {m["__name__"] for m, _ in query('{__name__=~"kvq_.*"}')}
            self.assertEqual({re.sub(r"_(bucket|sum|count)$", "", n) for n in stored} - self.families, set())
            rules = json.loads(get(f"http://127.0.0.1:{port}/api/v1/rules"))["data"]["groups"][0]["rules"]
            self.assertEqual([r["name"] for r in rules], re.findall(r"- alert: (\w+)", self.rules))
            self.kvqd.stop()
            until("the end of kvqd to be seen", lambda: query('up{job="kvqd"} == 0'))
            self.kvqd.start()
            until("the next kvqd", lambda: query('up{job="kvqd"} == 1 and on () kvq_arena_bytes'))
        finally:
            prometheus.terminate()
            prometheus.wait()


if __name__ == "__main__":
    missing = [name for name in ("promtool", "prometheus") if program(name) is None]
    if missing:
        for name in ("test_promtool_accepts_names_and_rules", "test_prometheus_scrapes_kvqd_and_loads_the_alerts"):
            setattr(Monitoring, name, unittest.skip("not installed")(getattr(Monitoring, name)))
    ended = unittest.main(argv=sys.argv[:1], exit=False).result
    if missing and ended.wasSuccessful():
        print(f"SKIPPED: {' and '.join(missing)} not found; tools/setup unpacks Debian's package prometheus into build/prometheus")
        sys.exit(77)
    sys.exit(not ended.wasSuccessful())
