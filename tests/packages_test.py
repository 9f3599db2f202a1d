#!/usr/bin/env python3
"""The Debian packages from an operator's side, on a Debian machine of its own: installed, started, upgraded under a server that loses
nothing, restarted, killed, stopped, removed.

Invariant: the machine is a clean Debian that gets the packages by apt, so whatever they forget to depend on is missing. Where no such
machine can be had, it ends as skipped (77) with a line that says why. usage: packages_test.py PACKAGES KVQD_OLDER
"""

import json
import pathlib
import resource
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "packages"))
import machine  # noqa: E402
from machine import run  # noqa: E402

TESTS = pathlib.Path(__file__).resolve().parent
CACHE = TESTS.parent / "build" / "roots"
OLD_VERSION = "0.0.9"  # of kvqd_older, and of the package that is made of it
SMALL = 's/^arena_bytes = .*/arena_bytes = "64MiB"\\nslab_bytes = "1MiB"/'


def package(name):
    found = list(PACKAGES.glob(f"{name}_*.deb"))
    if len(found) != 1:
        raise machine.Failed(f"{len(found)} packages {name} in {PACKAGES}: run tools/packages")
    return found[0]


def older_package(work):
    """kvqd's package with an older kvqd in it."""
    tree = work / "older"
    run("dpkg-deb", "-R", package("kvqd"), tree)
    shutil.copy(KVQD_OLDER, tree / "usr/bin/kvqd")
    run("strip", tree / "usr/bin/kvqd")
    control = tree / "DEBIAN/control"
    lines = control.read_text().splitlines(keepends=True)
    control.write_text("".join(f"Version: {OLD_VERSION}\n" if line.startswith("Version:") else line for line in lines))
    out = work / "kvqd_older.deb"
    run("dpkg-deb", "--root-owner-group", "-b", tree, out)
    return out


def setUpModule():
    """BUILT: a machine with compilers and libkvq-dev, and in its /srv a server that was built there."""
    global BUILT
    BUILT = machine.copy_of(machine.compiler_root(CACHE), "built")
    unittest.addModuleCleanup(shutil.rmtree, BUILT, ignore_errors=True)
    for name in ("libkvq1", "libkvq-dev"):
        shutil.copy(package(name), BUILT / "srv" / f"{name}.deb")
    shutil.copytree(TESTS / "package", BUILT / "srv/outside")
    shutil.copy(TESTS / "packages/server.c", BUILT / "srv")
    machine.inside(BUILT, "apt-get", "-qq", "-y", "install", "/srv/libkvq1.deb", "/srv/libkvq-dev.deb")
    built("cc -std=c99 -Wall -Wextra -Werror -pedantic -o /srv/server /srv/server.c $(pkg-config --cflags --libs kvq)")


def built(command):
    return machine.inside(BUILT, "sh", "-ec", command)


class Outside(unittest.TestCase):
    """A server's build on a machine that has the compilers and libkvq-dev."""

    def test_find_package_serves_c_and_cpp(self):
        built("cmake -S /srv/outside -B /srv/by_cmake && cmake --build /srv/by_cmake")
        for program in ("server_c", "server_cc"):
            self.assertEqual(built(f"/srv/by_cmake/{program}"), f"{VERSION} no_daemon")

    def test_pkg_config_serves_c_and_cpp(self):
        for compiler, source in (("cc -std=c99", "outside/server.c"), ("c++ -std=c++20", "outside/server.cc")):
            built(f"{compiler} -Wall -Werror -o /srv/by_pkg_config /srv/{source} $(pkg-config --cflags --libs kvq)")
            self.assertEqual(built("/srv/by_pkg_config"), f"{VERSION} no_daemon")


class Node(unittest.TestCase):
    """One story, told in the order of the names: each step goes on from the one before."""

    @classmethod
    def setUpClass(cls):
        work = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, work, ignore_errors=True)
        cls.node = machine.Machine(machine.clean_root(CACHE))
        cls.addClassCleanup(cls.node.close)
        cls.files = cls.node.root / "srv"
        for path in PACKAGES.glob("*.deb"):
            shutil.copy(path, cls.files / f"{path.name.split('_')[0]}.deb")
        shutil.copy(older_package(work), cls.files / "older.deb")
        shutil.copy(BUILT / "srv/server", cls.files)
        cls.node.run("apt-get", "-qq", "update")

    # --- what the steps ask

    def shows(self, unit, name):
        return self.node.run("systemctl", "show", "--value", "-p", name, unit)

    def pid(self):
        return int(self.shows("kvqd.service", "MainPID"))

    def status(self):
        return json.loads(self.node.run("kvqctl", "status", "--json"))

    def proc(self, name):
        return self.node.run("cat", f"/proc/{self.pid()}/{name}")

    def as_kvqd_sees(self, *words):
        return self.node.run("nsenter", "--target", self.pid(), "--mount", "--root", "--wd", *words, check=False)

    def look(self, order="look"):
        """What the server sees of its pages."""
        Node.server.stdin.write(order + "\n")
        Node.server.stdin.flush()
        words = dict(word.split("=") for word in Node.server.stdout.readline().split())
        self.assertEqual(words.get("lost"), "0", words)
        return words["digest"]

    def expect_taken_over(self, pid_before, digest):
        """Another kvqd runs, has all that the one before had, and serves the same server on."""
        self.node.until("another kvqd", lambda: self.pid() not in (0, pid_before) and self.shows("kvqd.service", "ActiveState") == "active")
        adopt = self.status()["adopt"]
        self.assertEqual((adopt["adopted"], adopt["refused"], adopt["sessions"]), (True, "", 1), adopt)
        self.assertEqual(self.look(), digest)
        grown = self.look("grow")
        self.assertNotEqual(grown, digest)
        return grown

    # --- the story

    def test_01_an_installation_serves_at_the_first_connection(self):
        node = self.node
        node.install("/srv/libkvq1.deb", "/srv/kvqctl.deb", "/srv/older.deb")
        self.assertEqual(node.run("systemctl", "is-enabled", "kvqd.socket"), "enabled")
        self.assertEqual(node.run("systemctl", "is-active", "kvqd.socket"), "active")
        self.assertEqual(node.run("stat", "-c", "%U:%G %a", "/run/kvq/kvqd.sock"), "root:kvq 660")
        self.assertEqual(node.run("stat", "-c", "%U:%G %a", "/run/kvq"), "kvq:kvq 755")
        self.assertEqual(self.shows("kvqd.service", "ActiveState"), "inactive")
        node.run("sed", "-i", SMALL, "/etc/kvq/kvqd.toml")
        self.assertEqual(self.status()["version"], OLD_VERSION)
        self.assertEqual(self.shows("kvqd.service", "ActiveState"), "active")
        self.assertEqual(self.shows("kvqd.service", "StatusText"), "0 sessions; host 0 % of 64.0 MiB, calm; new")
        self.assertIn("event=ready", node.run("journalctl", "-u", "kvqd.service", "--no-pager"))

    def test_02_kvqd_has_what_its_unit_asks_for(self):
        asked = {name: self.shows("kvqd.service", name) for name in ("LimitMEMLOCK", "LimitNOFILE", "OOMScoreAdjust", "MemoryMin")}
        self.assertEqual(asked, {"LimitMEMLOCK": "infinity", "LimitNOFILE": "131072", "OOMScoreAdjust": "-900", "MemoryMin": str(64 << 20)})
        given = self.node.run("cat", "/sys/fs/cgroup/system.slice/kvqd.service/memory.min", check=False)  # there with control groups 2
        self.assertEqual(given.stdout.strip() if given.returncode == 0 else asked["MemoryMin"], asked["MemoryMin"])
        # The kernel gives what this test's own limits allow, where these may not be raised.
        locked, files = machine.limit(resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY), machine.limit(resource.RLIMIT_NOFILE, 131072)
        limits = self.proc("limits")
        self.assertRegex(limits, rf"Max locked memory +{'unlimited' if locked == resource.RLIM_INFINITY else locked} ")
        self.assertRegex(limits, rf"Max open files +{files} +{files}")
        if machine.may_raise_limits():
            self.assertEqual(self.proc("oom_score_adj"), "-900")
        # Private anonymous memory and ELF headers alone: bits 0 and 4.
        self.assertEqual(int(self.proc("coredump_filter"), 16), 0x11)
        self.assertEqual(self.shows("kvqd.service", "WatchdogUSec"), "30s")
        self.assertGreater(int(self.shows("kvqd.service", "NFileDescriptorStore")), 0)

    def test_03_kvqd_sees_no_network_no_device_and_nothing_to_gain(self):
        status = dict(line.split(":", 1) for line in self.proc("status").splitlines())
        self.assertEqual({name: status[name].strip() for name in ("NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "CapAmb")},
                         {"NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0" * 16, "CapBnd": "0" * 16, "CapAmb": "0" * 16})
        self.assertEqual(self.node.run("id", "-u", "kvq"), status["Uid"].split()[1])
        interfaces = [line.split(":")[0].strip() for line in self.proc("net/dev").splitlines()[2:]]
        self.assertEqual(interfaces, ["lo"])
        self.node.add_device("nvidia0", 195, 0)
        self.assertIn("nvidia0", self.node.run("ls", "/dev"))
        self.assertNotIn("nvidia0", self.as_kvqd_sees("ls", "/dev").stdout)
        for folder in ("/usr", "/etc/kvq", "/var/lib"):
            self.assertIn("Read-only file system", self.as_kvqd_sees("touch", f"{folder}/x").stdout)

    def test_04_a_member_of_the_group_is_served_and_nobody_else(self):
        self.node.run("useradd", "--system", "stranger")
        self.node.run("useradd", "--system", "--groups", "kvq", "member")
        refused = self.node.run("runuser", "-u", "stranger", "--", "/srv/server", check=False)
        self.assertIn("permission_denied", refused.stdout)
        # In a container of its own it is served as well: nothing passes but the socket.
        Node.server = self.node.start("unshare", "--ipc", "--net", "--pid", "--fork", "--mount", "--mount-proc", "sh", "-ec",
                                      "mount -t tmpfs none /dev/shm; exec runuser -u member -- /srv/server")
        self.addClassCleanup(Node.server.kill)
        self.assertEqual(Node.server.stdout.readline(), "ready cached=0\n")
        Node.digest = self.look()
        self.assertEqual(self.look(), Node.digest)
        self.assertNotEqual(self.look("grow"), Node.digest)
        Node.digest = self.look()
        self.node.until("live figures", lambda: self.shows("kvqd.service", "StatusText").startswith("1 session; host "))

    def test_05_an_upgrade_loses_nothing_of_a_running_server(self):
        before = self.pid()
        settings = self.node.run("cat", "/etc/kvq/kvqd.toml")
        self.node.install("/srv/kvqd.deb")
        Node.digest = self.expect_taken_over(before, Node.digest)
        self.assertEqual(self.status()["version"], VERSION)
        self.assertEqual(self.node.run("cat", "/etc/kvq/kvqd.toml"), settings, "an operator's settings are theirs")
        checked = json.loads(self.node.run("kvqctl", "verify", "--json"))
        self.assertTrue(checked["finished"])
        self.assertEqual((checked["bad"], checked["pages"] > 20), (0, True), checked)

    def test_05_an_upgrade_that_would_refuse_the_settings_leaves_kvqd_alone(self):
        before = self.pid()
        self.node.run("sed", "-i", "1i arena_byte = 1", "/etc/kvq/kvqd.toml")
        said = self.node.run("dpkg", "-i", "/srv/kvqd.deb")
        self.assertIn("kvqd.toml:1", said)
        self.assertIn("was not restarted", said)
        self.assertEqual((self.pid(), self.look()), (before, Node.digest))
        self.node.run("sed", "-i", "1d", "/etc/kvq/kvqd.toml")

    def test_05_an_upgrade_that_was_a_mistake_is_taken_back_and_loses_nothing(self):
        for file, version in (("older", OLD_VERSION), ("kvqd", VERSION)):
            before = self.pid()
            self.node.install("--allow-downgrades", f"/srv/{file}.deb")
            Node.digest = self.expect_taken_over(before, Node.digest)
            self.assertEqual(self.status()["version"], version)

    def test_06_a_reload_changes_marks_and_replaces_no_kvqd(self):
        before = self.pid()
        self.node.run("sh", "-ec", "sed -i 's/^quantize_at = .*/quantize_at = 0.61/' /etc/kvq/kvqd.toml; systemctl reload kvqd")
        self.node.until("the new mark", lambda: self.status()["watermarks"]["quantize_at"] == 0.61)
        self.node.until("the end of it", lambda: self.shows("kvqd.service", "ActiveState") == "active")
        self.assertEqual((self.pid(), self.look()), (before, Node.digest))
        told = self.node.run("journalctl", "-u", "kvqd.service", "KVQ_EVENT=reloaded", "-o", "cat", "--no-pager")
        self.assertEqual(told, 'event=reloaded changed="quantize_at"')

    def test_06_a_restart_loses_nothing(self):
        before = self.pid()
        self.node.run("systemctl", "restart", "kvqd.service")
        Node.digest = self.expect_taken_over(before, Node.digest)
        self.assertIn("adopted", self.shows("kvqd.service", "StatusText"))

    def test_07_a_kill_loses_nothing(self):
        before = self.pid()
        self.node.run("sh", "-c", f"kill -KILL {before}")
        Node.digest = self.expect_taken_over(before, Node.digest)
        self.assertEqual(self.shows("kvqd.service", "NRestarts"), "1")

    def test_08_a_kvqd_that_stands_still_is_replaced_and_loses_nothing(self):
        folder = "/run/systemd/system/kvqd.service.d"
        self.node.run("sh", "-ec", f"mkdir -p {folder}; printf '[Service]\\nWatchdogSec=2s\\n' > {folder}/watchdog.conf; systemctl daemon-reload")
        before = self.pid()
        self.node.run("systemctl", "restart", "kvqd.service")
        Node.digest = self.expect_taken_over(before, Node.digest)
        before = self.pid()
        self.node.run("sh", "-c", f"kill -STOP {before}")
        Node.digest = self.expect_taken_over(before, Node.digest)
        self.assertIn("watchdog", self.node.run("journalctl", "-u", "kvqd.service", "--no-pager").lower())
        self.node.run("sh", "-ec", f"rm -r {folder}; systemctl daemon-reload")

    def test_09_the_drop_ins_do_what_they_say(self):
        folder, before = "/etc/systemd/system/kvqd.service.d", self.pid()
        self.node.run("sh", "-ec", f"""for name in gpu metrics; do install -D -m 644 /usr/share/kvqd/kvqd-$name.conf {folder}/$name.conf; done
            sed -i '1i metrics = "127.0.0.1:9477"' /etc/kvq/kvqd.toml; systemctl daemon-reload; systemctl restart kvqd""")
        Node.digest = self.expect_taken_over(before, Node.digest)
        self.assertIn("nvidia0", self.as_kvqd_sees("ls", "/dev").stdout)
        asked = "exec 3<>/dev/tcp/127.0.0.1/9477; printf 'GET /metrics HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n' >&3; cat <&3"
        self.assertIn("kvq_build_info", self.node.run("bash", "-c", asked))
        before = self.pid()
        self.node.run("sh", "-ec", f"rm -r {folder}; sed -i 1d /etc/kvq/kvqd.toml; systemctl daemon-reload; systemctl restart kvqd")
        Node.digest = self.expect_taken_over(before, Node.digest)

    def test_10_python_is_served_by_the_installed_package(self):
        self.node.install("/srv/python3-kvqd.deb")
        shutil.copy(TESTS / "packages/server.py", self.files)
        self.assertEqual(self.node.run("python3", "/srv/server.py"), f"{VERSION} 128 tokens, then 128 cached")

    def test_11_the_tools_have_their_pages_and_completions(self):
        for name in ("bash-completion/completions/kvqctl", "zsh/vendor-completions/_kvqctl", "fish/vendor_completions.d/kvqctl.fish"):
            self.assertIn("kvqctl", (self.node.root / "usr/share" / name).read_text())
        for page in (TESTS.parent / "docs/man").iterdir():
            self.assertTrue((self.node.root / f"usr/share/man/man{page.suffix[1:]}/{page.name}.gz").exists(), page)
        self.assertEqual(self.node.run("bash", "-ec", ". /usr/share/bash-completion/completions/kvqctl; complete -p kvqctl"),
                         "complete -F _kvqctl kvqctl")

    def test_12_a_removal_stops_it_and_keeps_the_settings(self):
        self.node.run("apt-get", "-qq", "-y", "remove", "kvqd")
        self.assertEqual(self.node.run("pidof", "kvqd", check=False).stdout, "")
        for unit in ("kvqd.service", "kvqd.socket"):
            self.assertEqual((self.shows(unit, "LoadState"), self.shows(unit, "ActiveState")), ("not-found", "inactive"))
        self.assertTrue((self.node.root / "etc/kvq/kvqd.toml").exists())
        Node.server.stdin.close()
        Node.server.wait(30)

    def test_13_what_was_removed_can_be_installed_again(self):
        self.node.install("/srv/kvqd.deb")
        self.assertEqual(self.status()["arena"]["bytes"], 64 << 20, "the settings from before")
        self.assertEqual(self.node.run("systemctl", "is-active", "kvqd.socket"), "active")

    def test_14_a_purge_leaves_no_file(self):
        self.node.run("apt-get", "-qq", "-y", "purge", "kvqd", "kvqctl", "libkvq1", "python3-kvqd")
        self.assertEqual(self.node.run("find", "/", "/run", "/tmp", "-xdev", "-name", "*kvq*", "-not", "-path", "/srv/*"), "")
        self.assertEqual(self.node.run("sh", "-c", "systemctl list-unit-files --no-legend 'kvqd*'; systemctl list-units --all --no-legend 'kvqd*'"), "")


if __name__ == "__main__":
    if why := machine.why_not():
        print(f"SKIPPED: the packages were not tested: {why}", flush=True)
        sys.exit(77)
    PACKAGES, KVQD_OLDER = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    VERSION = run("dpkg-deb", "-f", package("kvqd"), "Version")
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2, failfast=True)
