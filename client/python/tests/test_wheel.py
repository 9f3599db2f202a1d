"""The wheel: builds, carries the library, and works in an environment that has nothing else of kvq."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([CHECKOUT / "tools/wheel", sys.executable, out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return pathlib.Path(CHECKOUT, done.stdout.strip().splitlines()[-1])


def test_the_wheel_carries_the_library_and_its_header(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvqd/_native/libkvq.so" in names and "kvqd/_native/kvq.h" in names
    assert wheel.name.endswith("_x86_64.whl") or wheel.name.endswith("_aarch64.whl")
    assert "-py3-none-" in wheel.name


def test_it_works_in_a_clean_environment(wheel, tmp_path, daemon):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel], check=True)
    code = (
        "import kvqd, importlib.metadata as m, sys\n"
        "assert kvqd.version() == m.version('kvqd')\n"
        "assert sys.prefix in kvqd.__file__\n"
        "from kvqd._abi import library, _locations\n"
        "layer = kvqd.Layer(kv_heads=1, head_dim=64, query_heads=1)\n"
        f"with kvqd.Client({str(daemon.socket)!r}) as c, c.register([layer], bytes(32)) as model:\n"
        "    print(model.info().device)\n"
        "libraries = [line.split()[-1] for line in open('/proc/self/maps') if '.so' in line]\n"
        "ours = [path for path in libraries if any(name in path for name in ('capnp', 'libkj', 'libkvq'))]\n"
        "outside = [path for path in ours if sys.prefix not in path]\n"
        "assert not outside, outside\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVQ_", "PYTHON", "LD_"))}
    out = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "host"
