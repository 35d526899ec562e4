"""Proves that the wheel and the sdist of `make wheels` are what a user needs: no compiler, no checkout.

Method: WHEELS names a folder that `make wheels` has filled, or they are built; installed in a fresh
environment whose path has no compiler. There a program of a user's starts the daemon, puts and gets, and
mypy checks it. C and C++ programs are built against the installed wheel by the lines of docs/c-api.md, and
run beside its daemon.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATH = f"{os.environ['PATH']}:{ROOT / '.venv/bin'}"  # the checkout's CMake, where the system has none
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = '''"""A user's first program."""
import subprocess
import sys
import time

import kvclient

home = sys.argv[1]
command = [sys.executable, "-m", "kvstored", "serve", "--dir", home, "--memory", "64MiB", "--discard"]
daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
assert daemon.stderr is not None
for line in daemon.stderr:
    if " ready " in line:
        break
try:
    client = kvclient.connect(dir=home)
    layout = client.register_layout(kvclient.Layout(2, 2, 16))
    chain = kvclient.chain(bytes(32), list(range(300)))
    with client.create(chain, layout) as writer:
        for index in writer.granted:
            writer[index].view[:] = bytes([index + 1]) * len(writer[index].view)
    with client.get(chain) as blocks:
        for index, block in enumerate(blocks):
            assert block is not None and set(bytes(block.view)) == {index + 1}
    print(len(chain), "blocks came back", kvclient.__file__)
finally:
    daemon.terminate()
    daemon.wait()
'''


def run(*args, cwd, env=None, timeout_s=1200):
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environ = {key: value for key, value in os.environ.items() if key not in hidden} | (env or {})
    done = subprocess.run(
        [str(arg) for arg in args], cwd=cwd, env=environ, text=True, timeout=timeout_s,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{args}: exit {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """(the wheel, the sdist)."""
    folder = Path(os.environ["WHEELS"]) if "WHEELS" in os.environ else tmp_path_factory.mktemp("wheels")
    if "WHEELS" not in os.environ:
        run(ROOT / ".ci/wheels", folder, cwd=ROOT, env={"PYTHON": sys.executable})
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel.resolve(), sdist.resolve()


def test_the_names_say_where_they_run_and_what_is_inside_is_enough(wheels):
    wheel, sdist = wheels
    assert re.search(r"-cp3\d+-cp3\d+-manylinux_\d+_\d+_(x86_64|aarch64)", wheel.name), wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"kvclient/py.typed", "kvclient/_core.pyi", "kvclient/serve/http/page.html"} <= names
    with tarfile.open(sdist) as tar:
        inside = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "native/capi/exports.map"} <= inside
    assert not any(name.endswith((".so", ".pyc")) or name.startswith((".git/", "build/")) for name in inside)


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """(the environment, variables without a compiler)."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "venv", with_pip=True)
    bare = {"PATH": str(home / "venv/bin"), "CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    pip = (home / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--only-binary", ":all:", wheels[0], cwd=home, env=bare)
    return home / "venv", bare


def test_it_installs_without_a_compiler_and_a_users_program_runs_and_is_typed(installed, tmp_path):
    environment, bare = installed
    python = environment / "bin/python"
    (tmp_path / "user.py").write_text(PROGRAM)
    told = run(python, "user.py", tmp_path / "run", cwd=tmp_path, env=bare, timeout_s=120)
    assert "2 blocks came back" in told
    assert str(environment) in told
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", python)
    assert "Success" in run(*mypy, "user.py", cwd=tmp_path)
    assert "usage" in run(environment / "bin/kvclient-serve", "--help", cwd=tmp_path, env=bare)
    assert "torch" not in run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)


C_PROGRAM = """#include <stdio.h>
#include <kvstored/kvstored.h>

int main(int count, char **words) {
  kvs_options options;
  kvs_client *client;
  kvs_default_options(&options);
  options.directory = words[count - 1];
  if (kvs_connect(&options, &client)) return fprintf(stderr, "%s\\n", kvs_last_error()), 1;
  kvs_close(client);
  puts("connected");
  return 0;
}
"""


@pytest.fixture
def running(installed, tmp_path):
    """The directory of the wheel's own daemon."""
    command = [
        installed[0] / "bin/kvstored",
        "serve",
        "--dir",
        tmp_path / "run",
        "--memory=64MiB",
        "--discard",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as daemon:
        assert any(" ready " in line for line in daemon.stderr)
        yield tmp_path / "run"
        daemon.terminate()
        daemon.communicate(timeout=60)


def test_the_documented_lines_build_c_and_cpp_against_the_installed_wheel(installed, running, tmp_path):
    tools = ("gcc", "c++", "cmake", "pkg-config")
    if missing := [tool for tool in tools if shutil.which(tool, path=PATH) is None]:
        pytest.skip(f"not here: {', '.join(missing)}")
    page = (ROOT / "docs/c-api.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (lines,) = [block for block in blocks if "CMAKE_PREFIX_PATH" in block]
    lines = lines.replace("/run/kvstored", str(running)).partition("\n")[2]  # it is installed
    shutil.copytree(ROOT / "examples/cpp", tmp_path / "examples/cpp")
    (tmp_path / "user.c").write_text(C_PROGRAM)
    env = {"PATH": f"{installed[0] / 'bin'}:{PATH}"}
    told = run("bash", "-euc", lines, cwd=tmp_path, env=env) + run("./own_allocator", running, cwd=tmp_path)
    assert told.count("8 blocks of 4 layers: put, found") == 2
    flags = "-std=c11 -Wall -Wextra -pedantic -Werror"
    strict = f"gcc {flags} user.c -o user $(pkg-config --cflags --libs kvstored)"
    (where,) = installed[0].glob("lib/python*/site-packages/kvclient/native/lib")
    more = {"PKG_CONFIG_PATH": str(where / "pkgconfig"), "LD_LIBRARY_PATH": str(where)}
    run("bash", "-euc", strict, cwd=tmp_path, env=env | more)
    assert run(tmp_path / "user", running, cwd=tmp_path, env=more) == "connected\n"
