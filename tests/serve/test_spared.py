"""Goal: what a server leaves out of torch and transformers is there for whoever asks for it after all; and
malloc keeps no large block that was freed.

Method: a process of its own, as the imports are what is tried; a function that is compiled, a part of the
compiler, a module that was hidden; and what malloc says that it has mapped, behind a block that made it keep
larger ones.
"""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from kvclient.serve import spared
spared.import_transformers()
import torch
left_out = "torch._dynamo.eval_frame", "scipy", "boto3"
assert not set(left_out) & set(sys.modules), "nothing was left out"
assert "transformers.modeling_utils" in sys.modules
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2, 2]
import torch._dynamo
assert torch._dynamo.eval_frame is sys.modules["torch._dynamo.eval_frame"]
assert torch._dynamo._trace_wrapped_higher_order_op is sys.modules[spared.MASKS]
for name in spared.NEVER:
    assert name not in sys.modules or sys.modules[name] is not None, f"{name} is hidden still"
"""


def test_who_asks_for_what_was_left_out_has_it():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


MALLOC = """
import ctypes, sys
from kvclient.serve.engine.idle import LARGE_BYTES, large_blocks_apart
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
class Told(ctypes.Structure):
    names = "arena", "ordblks", "smblks", "hblks", "hblkhd", *"fghij"
    _fields_ = [(name, ctypes.c_size_t) for name in names]
libc.mallinfo2.restype = Told
if sys.argv[1] == "apart":
    large_blocks_apart()
libc.free(libc.malloc(24 << 20))  # from here on malloc keeps blocks of that size
before = libc.mallinfo2().hblkhd
block = libc.malloc(LARGE_BYTES + 4096)
print(libc.mallinfo2().hblkhd - before >= LARGE_BYTES)
"""


@pytest.mark.parametrize(
    ("how", "environment", "apart"),
    [("apart", {}, "True"), ("plain", {}, "False"), ("apart", {"MALLOC_ARENA_MAX": "9"}, "False")],
)
def test_malloc_keeps_no_large_block_that_was_freed(how, environment, apart):
    """A server kept 100 MiB of what eight prompts had left. The environment's own words stay."""
    there = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    asked = [sys.executable, "-c", MALLOC, how]
    ended = subprocess.run(asked, capture_output=True, text=True, env=there | environment, timeout=300)
    assert ended.stdout.strip() == apart, ended.stderr
