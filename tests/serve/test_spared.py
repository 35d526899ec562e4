"""Goal: what a server leaves out of torch and transformers is there for whoever asks for it after all.

Method: a process of its own, as the imports are what is tried; a function that is compiled, a part of the
compiler, a module that was hidden.
"""

import subprocess
import sys

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
