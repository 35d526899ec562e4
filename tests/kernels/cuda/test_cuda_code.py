"""Proves that the CUDA kernels compile for every architecture of a release, without spills and local memory.

Method: nvcc for each file and architecture; ptxas says what each function needs, and any stack frame or spill
is a failure that names the function. Where a disassembler is found (CUDA's own, or the one Triton carries)
the machine code is read too: no LDL, no STL, and tensor cores in what must have them. No GPU is needed. What
was compiled is kept by content under build/cuda-code.
"""

import hashlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "native/cuda").glob("*.cu"))
HEADERS = [*sorted((ROOT / "native/cuda").glob("*.h")), *sorted((ROOT / "native").glob("*.h"))]
ARCHITECTURES = ("75", "80", "86", "89", "90", "90a")
FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v", "-lineinfo")
MULTIPLIES = ("awq", "attend_decode", "attend_prefill")  # beginnings of names of files with mma in them
EMPTY = {("attend_prefill_256", "75")}  # its tiles need more shared memory than a block has there
HOST_ONLY = ("attend", "transfer")  # files without a kernel
NVCC = shutil.which("nvcc")
COMPILE_S = 1200  # a minute or two on a quiet machine
KEPT = ROOT / "build/cuda-code"


def disassembler() -> str | None:
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    carried = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return str(carried) if carried.exists() else None


def compiled(source: Path, architecture: str) -> tuple[str, Path]:
    """What ptxas said, and the machine code."""
    version = subprocess.run([NVCC, "--version"], capture_output=True, check=True).stdout
    content = b"".join(path.read_bytes() for path in (source, *HEADERS)) + version + repr(FLAGS).encode()
    kept = KEPT / f"{source.stem}-{architecture}-{hashlib.sha256(content).hexdigest()[:16]}.cubin"
    said = kept.with_suffix(".txt")
    if not said.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        for old in KEPT.glob(f"{source.stem}-{architecture}-*"):
            old.unlink()
        target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
        done = subprocess.run(
            [NVCC, *FLAGS, "-I", ROOT / "native", target, "-cubin", "-o", kept, source],
            capture_output=True, text=True, timeout=COMPILE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        said.write_text(done.stdout + done.stderr)
    return said.read_text(), kept


@pytest.mark.slow
@pytest.mark.timeout(2 * COMPILE_S)
@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nothing_is_spilled(source, architecture):
    text, code = compiled(source, architecture)
    needs = r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores"
    functions = re.findall(needs, text)
    assert functions or source.stem in HOST_ONLY
    assert [function for function in functions if function[1:] != ("0", "0")] == []
    if (tool := disassembler()) is None or not functions:
        return
    sass = subprocess.run([tool, "-sass", code], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\b(LDL|STL)\b", sass)
    if source.stem.startswith(MULTIPLIES) and (source.stem, architecture) not in EMPTY:
        assert re.search(r"\bHMMA\b", sass)


def test_there_is_something_to_compile():
    assert len(SOURCES) >= 8 and all(path.read_text().startswith("//") for path in SOURCES)
