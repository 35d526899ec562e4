"""Goal: a program ends as it wanted to while a daemon thread is in a call. Method: a program whose thread
waits for a layer that nobody writes, or asks without end; the last object of it to be deleted, when no thread
gets the interpreter back, stays until that thread has wanted it, and is asleep for ever.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading, time, types
import kvclient

client = kvclient.connect(sys.argv[1])
writer = client.create([bytes(32)], client.register_layout(kvclient.Layout(1, 1, 8)))
blocks = client.get([bytes(32)], follow=True)
calls = {
    "follow": lambda: blocks.wait_layer(0, 600.0),
    "ask": lambda: [client.touch([bytes(32)]) for _ in range(10**9)],
}
thread = threading.Thread(target=calls[sys.argv[2]], daemon=True)
thread.start()

class Last:
    def __init__(self):
        self.open, self.now, self.exit = open, time.monotonic, sys.exit
        self.path, self.until = f"/proc/self/task/{thread.native_id}/syscall", time.monotonic() + 60

    def __del__(self):
        while self.open(self.path).read().split()[0] != "34" and self.now() < self.until:  # pause()
            pass

sys.modules["last"] = types.ModuleType("last")
sys.modules["last"].last = Last()
print("done", flush=True)
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python ends no thread")
@pytest.mark.parametrize("call", ["follow", "ask"])
def test_a_daemon_thread_in_a_call_ends_no_program(daemon, call):
    directory = daemon(memory="8MiB").dir
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, directory, call], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
