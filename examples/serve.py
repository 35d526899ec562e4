"""A daemon, an OpenAI-compatible server and its page on the example model, with one command: `make serve`.

    python examples/serve.py [--port 8000] [--dtype float32] [MODEL]

Ends both with Ctrl-C or SIGTERM, and frees their memory. Listens on 127.0.0.1 only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import model as example_model

EXPECT = """A daemon and a server start now, in some ten seconds, and say their address, page and curl line.
Ask the same twice: the second answer begins sooner, and usage.prompt_tokens_details.cached_tokens in it says
how much of the prompt was not computed again. The page shows the same beside each answer. Ctrl-C ends both.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", help="a model directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--port", default="8000")
    parser.add_argument("--memory", default="1GiB", help="of the daemon")
    dtype = "the server's; without instructions for bf16, %(default)s is several times faster"
    parser.add_argument("--dtype", default="float32", help=dtype)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    directory = chosen.model or str(example_model.ensure())
    with tempfile.TemporaryDirectory(prefix="kvstored-serve-") as home, contextlib.ExitStack() as ends:
        run = Path(home) / "run"
        daemon = [sys.executable, "-m", "kvstored", "serve", "--dir", str(run), "--memory", chosen.memory]
        daemon.append("--discard")  # its directory goes with it: nobody would find its memory again
        server = [sys.executable, "-m", "kvclient.serve", directory, "--dir", str(run), "--port", chosen.port,
                  "--dtype", chosen.dtype]  # fmt: skip
        print(EXPECT, flush=True)
        for command in (daemon, server):
            process = subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"})
            ends.callback(process.wait)
            ends.callback(process.terminate)  # a background job of a shell ignores SIGINT
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
