"""kvclient-serve route: the command line of the router.

Owns its flags. Never listens beyond loopback unasked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from kvclient.serve import listening, settings

EXAMPLES = """examples:
  kvclient-serve route http://127.0.0.1:8001 http://127.0.0.1:8002
  kvclient-serve route http://10.0.0.1:8000 http://10.0.0.2:8000 --imbalance 8
  kvclient-serve route http://127.0.0.1:8001 --prefill http://127.0.0.1:8002

Servers of several models may stand behind one router: `model` says which are asked.
"""


def parser() -> argparse.ArgumentParser:
    """What `kvclient-serve route` takes on its command line."""
    out = argparse.ArgumentParser(
        "kvclient-serve route", description="One address in front of several kvclient-serve.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    out.add_argument("servers", nargs="+", metavar="URL", help="http://host:port of a kvclient-serve")
    listening.add_flags(out)
    add = out.add_argument
    add(
        "--prefill",
        action="append",
        default=[],
        metavar="URL",
        help="a server that computes prompts for "
        "the others, which share its daemon or have it as a peer; may be given several times",
    )
    add(
        "--prefill-bytes",
        type=int,
        default=4096,
        help="text that must be missing where it is answered, to "
        "have it computed there (default: %(default)s)",
    )
    add(
        "--imbalance",
        type=int,
        default=4,
        help="requests that the server which holds a prefix may have "
        "more under way than another (default: %(default)s)",
    )
    add("--max-under-way", type=int, default=1024, help="of all; more get 429 (default: %(default)s)")
    add("--health-interval", type=float, default=1.0, help="seconds (default: %(default)s)")
    add("--health-timeout", type=float, default=5.0, help="seconds (default: %(default)s)")
    add(
        "--health-misses",
        type=int,
        default=3,
        help="of a silent server, which is lost then (default: %(default)s)",
    )
    add("--print-config", action="store_true", help="print what was understood as JSON, and end")
    return out


def main(argv: Sequence[str]) -> int:
    """Routes until a signal; the exit status. argv: behind `route`."""
    made = parser()
    chosen = settings.parse(made, "KVCLIENT_ROUTE_", argv)
    listening.check(made, chosen)
    for name, low in {"imbalance": 0, "max_under_way": 1, "health_misses": 1, "prefill_bytes": 1}.items():
        if getattr(chosen, name) < low:
            made.error(f"--{name.replace('_', '-')}={getattr(chosen, name)}; it must be {low} at least")
    for name in ("health_interval", "health_timeout"):
        if not 0 < getattr(chosen, name) <= 3600:
            made.error(
                f"--{name.replace('_', '-')}={getattr(chosen, name)}; it must be above 0, 3600 at most"
            )
    if chosen.print_config:
        print(
            json.dumps({k: v and str(v) if k == "config" else v for k, v in vars(chosen).items()}, indent=2)
        )
        return 0
    from kvclient.serve.route.app import Router
    from kvclient.serve.route.servers import Probing, Server

    try:
        servers = [*map(Server, chosen.servers), *(Server(url, prefills=True) for url in chosen.prefill)]
    except ValueError as error:
        made.error(str(error))
    door = listening.bound("kvclient-serve route", chosen.host, chosen.port)
    if door is None:
        return 2
    probing = Probing(chosen.health_interval, chosen.health_timeout, chosen.health_misses)
    app = Router(servers, chosen.imbalance, chosen.max_under_way, probing, chosen.prefill_bytes)
    with door:
        said = f"the router is ready at {listening.address(chosen.host, door)}"
        print(f"{said}, in front of {len(servers)} servers", flush=True)
        listening.serve(app, door)
    return 0
