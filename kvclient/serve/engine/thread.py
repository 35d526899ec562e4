"""The thread that computes, and what its death means.

Owns the rule that a server whose engine thread died of an error ends: its requests would wait for nobody, and
whoever watches the process starts it again. Never ends it for a request's own error: the loop takes those.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable


def start(run: Callable[[], None], name: str) -> threading.Thread:
    """A thread that runs `run`. Whatever that raises is shown, and ends the process with EX_SOFTWARE (70)."""

    def guarded() -> None:
        try:
            run()
        except BaseException:
            print(f"{name} died, and the process with it:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(os.EX_SOFTWARE)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
