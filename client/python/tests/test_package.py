"""What holds without a daemon: the import, the header, the error for a missing one."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import kvqd
from kvqd import _abi, errors


def test_import_starts_no_thread_and_loads_no_library():
    code = (
        "import os, kvqd\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(len(os.listdir('/proc/self/task')), 'libkvq' in maps, 'blas' in maps)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
    )
    assert out.stdout.split() == ["1", "False", "False"]


def test_every_public_name_exists():
    for name in kvqd.__all__:
        assert getattr(kvqd, name) is not None
    with pytest.raises(AttributeError):
        kvqd.no_such_name


def test_every_status_of_the_header_has_its_exception():
    abi = _abi.library()
    statuses = {name: value for value, name in abi.ffi.typeof("kvq_status").elements.items() if value}
    assert set(statuses.values()) == set(errors.BY_STATUS)
    for status, kind in errors.BY_STATUS.items():
        name = abi.ffi.string(abi.lib.kvq_status_name(status)).decode()
        expected = {"system": "systemfailure"}.get(name, name.replace("_", ""))
        assert kind.__name__.lower() == expected


def test_the_library_has_every_function_of_the_header():
    header, _ = next(pair for pair in _abi._locations() if pair[0].exists())
    names = re.findall(r"\bKVQ_API\s[^;(]*?\b(kvq_\w+)\(", header.read_text())
    assert len(names) > 30
    for name in names:
        assert getattr(_abi.library().lib, name)


def test_struct_sizes_are_those_of_the_compiler(tmp_path):
    header, _ = next(pair for pair in _abi._locations() if pair[0].exists())
    structs = re.findall(r"^\} (kvq_\w+);", re.sub(r"typedef enum.*?;", "", header.read_text(), flags=re.S), flags=re.M)
    assert "kvq_attend_args" in structs
    lines = "".join(f'printf("%zu\\n", sizeof({name}));' for name in structs)
    (tmp_path / "sizes.c").write_text(
        f'#include <stdio.h>\n#include "{header}"\nint main(void) {{ {lines} return 0; }}\n'
    )
    subprocess.run(["cc", tmp_path / "sizes.c", "-o", tmp_path / "sizes"], check=True)
    sizes = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout.split()
    assert [int(size) for size in sizes] == [_abi.library().ffi.sizeof(name) for name in structs]


def test_a_missing_daemon_is_named_with_its_socket(tmp_path):
    with pytest.raises(kvqd.NoDaemon) as caught:
        kvqd.Client(tmp_path / "kvqd.sock", deadline_ms=200)
    assert str(tmp_path / "kvqd.sock") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ConnectionError)


def test_the_socket_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KVQ_SOCKET", str(tmp_path / "elsewhere.sock"))
    with pytest.raises(kvqd.NoDaemon, match="elsewhere.sock"):
        kvqd.Client(deadline_ms=200)


def test_a_missing_library_says_what_to_do():
    code = "import kvqd\ntry: kvqd.version()\nexcept kvqd.LibraryNotFound as error: print(error)"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(
            os.environ, KVQ_LIBRARY="/nonexistent/libkvq.so", PYTHONPATH=str(pathlib.Path(kvqd.__file__).parents[1])
        ),
    )
    assert "/nonexistent/libkvq.so" in out.stdout and "KVQ_LIBRARY" in out.stdout


def test_a_broken_expectation_of_the_demo_is_named_and_fails_it(capsys):
    from kvqd.demo_report import Expectations

    assert Expectations().report(1.0) == 1  # a demo that expects nothing proves nothing
    expect = Expectations()
    expect("water is wet", True)
    assert expect.report(1.0) == 0
    expect("memory returns", False)
    assert expect.report(1.0) == 1
    assert "BROKEN: memory returns" in capsys.readouterr().out


def test_a_server_that_cannot_start_is_an_error_not_a_hang(tmp_path):
    from kvqd.server_process import ServerFailed, ServerProcess

    with pytest.raises(ServerFailed, match="did not start"):
        ServerProcess("nobody", tmp_path / "no.sock")
