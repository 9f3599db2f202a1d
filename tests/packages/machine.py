"""Debian machines for tests: roots made by debootstrap, and one of them booted by systemd-nspawn with a systemd of its own.

Invariant: the cached roots (build/roots) are only copied. What a test boots or changes is a copy, which goes with it, as do its processes.
The distribution and its mirror are those of the machine that runs the test.
"""

import os
import pathlib
import resource
import shutil
import signal
import subprocess
import tempfile
import time

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", "HOME": "/"}
PROGRAMS = ("debootstrap", "systemd-nspawn", "nsenter", "dpkg-deb", "apt-get")
COMPILERS = ("g++", "cmake", "make", "pkg-config")
BOOT_S, APT_S = 90, 600


class Failed(AssertionError):
    """A command that was to succeed; str() has all that it said."""


def run(*command, timeout=120, check=True, **more):
    words = [str(word) for word in command]
    more.setdefault("stderr", subprocess.STDOUT)
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace", timeout=timeout, **more)
    if check and done.returncode:
        raise Failed(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr or ''}")
    return done.stdout.strip() if check else done


def why_not():
    """What keeps this machine from booting another one; empty when nothing does."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=ENVIRONMENT["PATH"]) is None]
    return f"needs {', '.join(missing)}: tools/setup" if missing else ""


def may_raise_limits():
    """Whether root is whole here: it may lack CAP_SYS_RESOURCE."""
    words = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return bool(int(words["CapEff"], 16) >> 24 & 1)


def limit(which, asked):
    """What a service gets that asks for `asked`."""
    most = resource.getrlimit(which)[1]
    return asked if may_raise_limits() or most == resource.RLIM_INFINITY or 0 <= asked <= most else most


def distribution():
    """Code name of this machine's distribution, a mirror of it as apt is configured, and those of its components that are free."""
    release = dict(line.split("=", 1) for line in pathlib.Path("/etc/os-release").read_text().splitlines() if "=" in line)
    name = release["VERSION_CODENAME"].strip('"')
    targets = run("apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI) $(COMPONENT)", "Created-By: Packages").splitlines()
    mirrors = [line.split()[1:] for line in targets if line.split()[0] == name]
    if ["main"] not in [mirror[1:] for mirror in mirrors]:
        raise Failed(f"apt knows no mirror of {name} main")
    uri = next(mirror[0] for mirror in mirrors if mirror[1] == "main")
    return name, uri, [component for at, component in mirrors if at == uri and component in ("main", "universe")]


def inside(root, *command, timeout=APT_S):
    """Runs a command in a root that is not booted."""
    return run("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--pipe", "-D", root, *command, timeout=timeout, env=ENVIRONMENT,
               stderr=subprocess.PIPE)


def cached_root(cache, name, make):
    """build/roots/NAME; `make` fills an empty folder. Half a root is none."""
    root = cache / name
    if not root.exists():
        cache.mkdir(parents=True, exist_ok=True)
        work = pathlib.Path(tempfile.mkdtemp(dir=cache, prefix=f"{name}."))
        try:
            make(work)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        work.chmod(0o755)
        work.rename(root)
    return root


def clean_root(cache):
    """Debian with systemd and nothing else."""
    name, mirror, components = distribution()

    def make(work):
        run("debootstrap", "--variant=minbase", "--include=systemd,systemd-sysv,dbus", f"--components={','.join(components)}", name, work, mirror,
            timeout=APT_S, env=ENVIRONMENT)

    return cached_root(cache, name, make)


def compiler_root(cache):
    """The same with what builds a model server."""
    def make(work):
        run("cp", "-a", f"{clean_root(cache)}/.", work)
        inside(work, "apt-get", "-qq", "update")
        inside(work, "apt-get", "-qq", "-y", "--no-install-recommends", "install", *COMPILERS)

    return cached_root(cache, f"{distribution()[0]}-compilers", make)


def copy_of(root, name):
    for left in root.parent.glob("*.*"):  # by a run that was killed
        if time.time() - left.stat().st_ctime > 24 * 3600:
            shutil.rmtree(left, ignore_errors=True)
    work = pathlib.Path(tempfile.mkdtemp(dir=root.parent, prefix=f"{name}."))
    run("cp", "-a", "--reflink=auto", f"{root}/.", work)
    return work


class Machine:
    """A booted copy of a root."""

    def __init__(self, root):
        self.root = copy_of(root, "booted")
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--machine=test", "-D", self.root, "--boot"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=ENVIRONMENT, start_new_session=True)
        try:
            self.leader = self._await("the container's first process", self._first_process)
            self._await("systemd", lambda: self.run("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded"))
        except BaseException:
            self.close()
            raise

    def _await(self, what, ask):
        end = time.monotonic() + BOOT_S
        while not (answer := ask()):
            if self.process.poll() is not None or time.monotonic() > end:
                self.log.seek(0)
                raise Failed(f"no {what}: {self.log.read().decode(errors='replace')[-2000:]}")
            time.sleep(0.2)
        return answer

    def _first_process(self):
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next((int(pid) for pid in children if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")), 0)

    def command(self, *words):
        return ["nsenter", "--target", str(self.leader), "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd",
                *(str(word) for word in words)]

    def run(self, *words, **more):
        return run(*self.command(*words), env=ENVIRONMENT, **more)

    def add_device(self, name, major, minor):
        """A device node in the machine's /dev; what it stands for need not be there."""
        run("mknod", pathlib.Path(f"/proc/{self.leader}/root", "dev", name), "c", major, minor)

    def start(self, *words):
        """A process of the machine that goes on, with pipes."""
        return subprocess.Popen(self.command(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)

    def install(self, *packages):
        """By apt, files by their name in /srv/packages."""
        return self.run("apt-get", "-qq", "-y", "-o", "Dpkg::Use-Pty=0", "--no-install-recommends", "install", *packages, timeout=APT_S)

    def until(self, what, ask, patience_s=60):
        end = time.monotonic() + patience_s
        while not (answer := ask()):
            if time.monotonic() > end:
                raise Failed(f"still waiting for {what}\n{self.run('journalctl', '-u', 'kvqd.service', '-n', '30', '--no-pager', check=False).stdout}")
            time.sleep(0.1)
        return answer

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)  # systemd-nspawn passes an orderly power-off on
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()
        shutil.rmtree(self.root, ignore_errors=True)
