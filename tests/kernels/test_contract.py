"""Proves that native/kernels.h is plain C, and that Python's structs and both libraries mean it.

Method: a C99 compiler, pedantic, says where each field of each struct lies; every function that takes a
versioned struct is called with a size and a version of another time, and must refuse before it looks at
anything else. The CUDA library is asked in its emulation.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvclient.errors import InvalidArgument
from kvclient.kernels import contract, triton_calls
from tests.kernels import cpu_paths
from tests.kernels.cuda import emulated

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "native/kernels.h"
STRUCTS = {
    "kvk_segment": contract.Segment,
    "kvk_sequence": contract.Sequence,
    "kvk_attention": contract.Attention,
    "kvk_conversion": contract.Conversion,
    "kvk_rotation": contract.Rotation,
    "kvk_loading": contract.Loading,
    "kvk_scoring": contract.Scoring,
    "kvk_pages": contract.Pages,
    "kvk_awq": contract.Awq,
    "kvk_linear": contract.Linear,
    "kvk_norm": contract.Norm,
    "kvk_turns": contract.Turns,
    "kvk_product": contract.Product,
    "kvk_weights": contract.Weights,
    "kvk_layer_in": contract.LayerIn,
    "kvk_layer_out": contract.LayerOut,
}


def test_the_header_is_c_and_says_where_fields_lie(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    assert set(re.findall(r"^struct (\w+) \{", HEADER.read_text(), re.M)) == set(STRUCTS)
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "kernels.h"', "int main(void) {"]
    wanted = []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        wanted.append(f"{name} {ctypes.sizeof(struct)}")
        for field, _ in struct._fields_:
            spelled = field.rstrip("_")  # `in` and `from` are words of Python
            place = f"offsetof(struct {name}, {spelled}), sizeof(((struct {name}*)0)->{spelled})"
            lines.append(f'printf("{field} %zu %zu\\n", {place});')
            wanted.append(f"{field} {getattr(struct, field).offset} {getattr(struct, field).size}")
    (tmp_path / "fields.c").write_text("\n".join([*lines, "return 0; }"]))
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}"]
    subprocess.run(
        [compiler, *strict, "fields.c", "-o", "fields"], cwd=tmp_path, check=True, capture_output=True
    )
    said = subprocess.run([tmp_path / "fields"], capture_output=True, check=True, text=True).stdout
    assert said.splitlines() == wanted


CALLS = [("cpu", *call) for call in contract.CPU_FUNCTIONS.items()]
CALLS += [("cuda", *call) for call in contract.CUDA_FUNCTIONS.items()]


@pytest.mark.parametrize(("kind", "function", "struct"), CALLS, ids=[f"{k}-{f}" for k, f, _ in CALLS])
def test_structs_of_another_version_are_refused(kind, function, struct):
    """With null pointers all through: nothing is looked at before size and version are known."""
    path = {"cpu": cpu_paths.LIBRARY, "cuda": emulated.LIBRARY}[kind]
    if not path.exists():
        pytest.skip("the emulation is not built: `make native-tests`")
    library = contract.opened(path, kind, getattr(contract, f"{kind.upper()}_FUNCTIONS"))
    size = ctypes.sizeof(struct)
    for wrong in ((size - 8, contract.ABI), (size + 8, contract.ABI), (size, contract.ABI + 1)):
        assert getattr(library, function)(ctypes.byref(struct(*wrong))) == contract.INVALID
        assert f"{wrong[0]} bytes, ABI {wrong[1]}".encode() in library.kvk_last_error()
    assert getattr(library, function)(None) == contract.INVALID


@pytest.mark.parametrize("call", ["attend", "quantise"])
def test_the_triton_twins_refuse_structs_of_another_version(call):
    """Before triton is imported: it need not be here."""
    struct = {"attend": contract.Attention, "quantise": contract.Conversion}[call]
    for wrong in ((ctypes.sizeof(struct) - 8, contract.ABI), (ctypes.sizeof(struct), contract.ABI + 1)):
        with pytest.raises(InvalidArgument, match=f"{wrong[0]} bytes, ABI {wrong[1]}"):
            getattr(triton_calls, call)(struct(*wrong))


THREADS = """
import os, numpy as np, torch
from kvclient import kernels
count = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
x = torch.ones(1 << 22)
before = float((x + 1).sum())
alone = count()
k = np.ones((2, 4096, 64), np.float32)
q, at = np.ones((1, 2, 1, 64), np.float32), np.array([[4095]])
for _ in range(3):
    kernels.attend(q, at, [[kernels.segment(k, k, 0)]], 0.1, threads=4)
print(count() - alone, torch.get_num_threads(), float((x + 1).sum()) == before, count() - alone)
"""


def test_the_kernels_have_threads_of_their_own():
    """As many as were asked for, less the caller's; torch has as many as before, and its own runtime."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", THREADS], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["3", "3", "True", "3"], done.stderr
    library = (contract._OWN / "_cpu.so").read_bytes()
    assert b"libstdc++" in library and b"libgomp" not in library and b"libtorch" not in library
