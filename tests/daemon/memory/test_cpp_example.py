"""Goal: a C++ programmer has what an installed kvstored carries: headers, library, find_package, pkg-config;
and the example runs.

Method: `cmake --install` of the C part into a prefix of its own; the example is built against that prefix
both ways, every warning an error, and run against a real daemon.
"""

import os
import shutil
import subprocess

import pytest

from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "cpp"
CMAKE = ROOT / ".venv" / "bin" / "cmake"
SAID = (
    "8 blocks of 4 layers: put, found, read, loaded, given back\n"
    "8 blocks sealed where they lie, read, and their slots taken back"
)


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    target = tmp_path_factory.mktemp("prefix")
    run(CMAKE, "--install", ROOT / "build/dev", "--component", "capi", "--prefix", target)
    return target


def test_find_package_builds_it_and_it_runs(daemon, prefix, tmp_path):
    if shutil.which("c++") is None:
        pytest.skip("there is no c++ here")
    run(CMAKE, "-S", EXAMPLE, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release")
    run(CMAKE, "--build", tmp_path)
    assert SAID in run(tmp_path / "own_allocator", daemon(memory="64MiB").dir)


@pytest.fixture(scope="module")
def example(prefix, tmp_path_factory):
    """Built by what pkg-config says."""
    if shutil.which("c++") is None or shutil.which("pkg-config") is None:
        pytest.skip("there is no c++ or no pkg-config here")
    env = {**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", "kvstored", env=env).split()
    program = tmp_path_factory.mktemp("example") / "own_allocator"
    strict = ["-std=c++20", "-Wall", "-Wextra", "-pedantic", "-Werror"]
    run("c++", *strict, EXAMPLE / "own_allocator.cc", "-o", program, *flags, f"-Wl,-rpath,{prefix}/lib")
    return program


def test_pkg_config_builds_it_and_it_runs(daemon, example):
    assert SAID in run(example, daemon(memory="64MiB").dir)


def test_without_a_daemon_it_says_so(example, tmp_path):
    done = subprocess.run([example, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "kvs_connect" in done.stderr
