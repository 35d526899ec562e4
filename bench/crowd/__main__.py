"""The core under a crowd.

    make native-tests && python -m bench.crowd [--blocks 65536] [--json FILE]
    python -m bench.crowd --holds [--blocks 1048576] [--sessions 1000]    (1M blocks: 4 GiB of memory)
    python -m bench.crowd --attach [--sessions 1000]
    python -m bench.crowd --million [--blocks 1000000] [--pages small]    (4 GiB of memory, a few minutes)
    python -m bench.crowd --clients 64 [--seconds 10] [--pages small|made]

Puts beside many pins and the holds of the store's lock count processor time (puts.py). The others start a
daemon and go by the clock: a quiet machine is needed. Nothing is judged: the reach stands beside the figure.
"""

import argparse
import json
from pathlib import Path

from bench.crowd import clients, million, puts, sessions
from bench.pages import huge_pages_to_be_had


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=int, help="blocks of 4 KiB (default 65,536; with --million 1,000,000)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--holds", action="store_true", help="how long the lock is held, by operation")
    parser.add_argument("--attach", action="store_true", help="what so many sessions take, and an attach")
    parser.add_argument(
        "--sessions", type=int, default=1000, help="with --holds, --attach (default %(default)s)"
    )
    parser.add_argument(
        "--million", action="store_true", help="a million blocks beside 100,000; kill to READY"
    )
    parser.add_argument(
        "--pages",
        choices=("huge", "small", "made"),
        help="with --million, --clients: the memory's (default: huge where a tmpfs can be mounted); "
        "made: with --clients, small ones that the daemon has made huge",
    )
    parser.add_argument("--clients", type=int, default=0, help="so many processes that put at the same time")
    parser.add_argument("--seconds", type=float, default=10, help="with --clients (default %(default)s)")
    chosen = parser.parse_args()
    pages = chosen.pages or ("huge" if huge_pages_to_be_had() else "small")
    if chosen.attach:
        figures = sessions.measure(chosen.sessions)
    elif chosen.million:
        if pages == "made":
            parser.error("--pages made goes with --clients only")
        figures = million.measure(chosen.blocks or 1_000_000, pages)
    elif chosen.clients:
        figures = clients.measure(chosen.clients, chosen.seconds, pages)
    elif missing := puts.missing():
        parser.error(f"not built: {', '.join(missing)}; run `make native-tests`")
    elif chosen.holds:
        figures = puts.holds(chosen.blocks or 65536, chosen.sessions)
    else:
        figures = puts.puts(chosen.blocks or 65536)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
