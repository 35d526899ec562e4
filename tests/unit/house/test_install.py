"""Goal: a plain `pip install .` in a fresh environment gives both packages, built, and a working command.

Method: install a clean export of what git would commit (not the checkout, whose built modules could hide a
missing one) into a new virtual environment, and import from a directory where the checkout is not in sight.
"""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*args: object, cwd: Path, timeout_s: float = 800.0) -> str:
    """Runs a command without the checkout on its path; its output, which is also the failure's text."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [str(arg) for arg in args], cwd=cwd, env=env, text=True, timeout=timeout_s,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{args}: exit {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git would commit, as a directory without a .git."""
    target = tmp_path_factory.mktemp("export")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    archive = target.parent / "export.tar"
    with tarfile.open(archive, "w") as tar:
        for name in names:
            if name and (ROOT / name).is_file():
                tar.add(ROOT / name, arcname=name)
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return target


def fresh_environment(path: Path) -> Path:
    venv.create(path, with_pip=True)
    return path / "bin" / "python"


def test_pip_install(export: Path, tmp_path: Path):
    python = fresh_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", export, cwd=tmp_path)

    program = "import kvclient._core, kvstored._core; print(kvstored._core.__file__, kvclient._core.__file__)"
    assert run(python, "-c", program, cwd=tmp_path).count("site-packages") == 2
    run(python, "-c", "from kvstored.v1 import store_pb2, store_pb2_grpc, admin_pb2", cwd=tmp_path)
    run(python, "-c", "import kvclient; kvclient.InMemoryClient().close()", cwd=tmp_path)

    import kvstored

    assert kvstored.__version__ in run(tmp_path / "venv/bin/kvstored", "--version", cwd=tmp_path)
    # The base install must not drag in torch: the daemon runs without it.
    assert "torch" not in run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)


def test_the_wheel_has_everything_and_nothing_else(export: Path, tmp_path: Path):
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--wheel-dir", tmp_path, export, cwd=tmp_path,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"kvstored", "kvclient"}
    for package in ("kvstored", "kvclient"):
        assert sum(name.startswith(f"{package}/_core") and name.endswith(".so") for name in names) == 1
    assert "kvstored/v1/store_pb2_grpc.py" in names
    assert {"kvclient/kernels/_cpu.so", "kvclient/py.typed", "kvclient/__init__.pyi"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    native = {"include/kvstored/kvstored.h", "include/kvstored/kvstored.hpp", "lib/libkvstored_client.so",
              "lib/cmake/kvstored/kvstoredConfig.cmake", "lib/pkgconfig/kvstored.pc"}  # fmt: skip
    assert {f"kvclient/native/{name}" for name in native} <= set(names)
    run(sys.executable, "-m", "zipfile", "-e", wheel, tmp_path / "unpacked", cwd=tmp_path)
    prefix, cmake = f"-DCMAKE_PREFIX_PATH={tmp_path}/unpacked/kvclient/native", ROOT / ".venv/bin/cmake"
    run(cmake, "-S", ROOT / "examples/cpp", "-B", tmp_path / "cpp", prefix, cwd=tmp_path)
    run(cmake, "--build", tmp_path / "cpp", cwd=tmp_path)  # a C++ program against the wheel alone
