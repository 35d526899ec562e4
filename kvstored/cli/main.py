"""The command line: arguments, help and exit codes (errors.Exit).

What each command does is in commands.py; gRPC is imported only when one runs, so help and completion are
quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvstored import __version__, log
from kvstored.cli.answers import complain, told
from kvstored.cli.arguments import Parser, WrongArguments, bounded, key, prefix, wants_json
from kvstored.cli.examples import EXAMPLES
from kvstored.config import fields
from kvstored.config.config import Config
from kvstored.config.sources import running_dir
from kvstored.errors import ConfigError, Exit, StartupError

DIR_HELP = (
    "the daemon's runtime directory; default: $KVSTORED_DIR, else where one runs of /run/kvstored and "
    "$XDG_RUNTIME_DIR/kvstored, else as for serve"
)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="kvstored",
        description="One cache of KV blocks for all inference processes of a host.",
        epilog=EXAMPLES[""],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"kvstored {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_operator_commands(commands)
    _add_commands_without_daemon(commands)
    return top


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        usage="%(prog)s [--FIELD VALUE ...] [--config FILE] [--fresh] [--discard] [--print-config]"
        if name == "serve"
        else None,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=EXAMPLES[name],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_serve(commands: Any) -> None:
    serve = _command(commands, "serve", "run the daemon in the foreground")
    serve.add_argument("--config", metavar="FILE", help="configuration file (TOML); also KVSTORED_CONFIG")
    serve.add_argument(
        "--print-config",
        action="store_true",
        help="print the configuration in effect with each value's source, and end",
    )
    serve.add_argument("--json", action="store_true", help="with --print-config: as JSON")
    serve.add_argument(
        "--fresh", action="store_true", help="start empty: discard the blocks of an earlier daemon"
    )
    serve.add_argument(
        "--discard",
        action="store_true",
        help="at the end remove the blocks instead of leaving them for the next daemon",
    )
    group = serve.add_argument_group("configuration")
    for about in dataclasses.fields(Config):
        meta = about.metadata
        bounds = (
            f"; {meta['show'](meta['low'])} to {meta['show'](meta['high'])}"
            if meta["low"] is not None
            else ""
        )
        default = f"; default {meta['show'](about.default)}" if about.default not in ("", (), None) else ""
        choices = f"; one of {', '.join(meta['choices'])}" if meta["choices"] else ""
        alone = {"nargs": "?", "const": "yes"} if isinstance(about.default, bool) else {}
        if about.name == "peer":
            alone = {"action": "append"}
        group.add_argument(
            "--" + about.name.replace("_", "-"),
            dest=about.name,
            metavar=_metavar(about),
            help=(meta["doc"] + bounds + choices + default).replace("%", "%%"),
            **alone,
        )


def _metavar(about: dataclasses.Field[Any]) -> str:
    """What a field's value is, for people and for completion.py."""
    if choices := about.metadata["choices"]:
        return "{" + ",".join(choices) + "}"
    if about.metadata["parse"] in (fields.path, fields.directories):
        return "FILE" if about.name.startswith("tls_") or about.name.endswith("_file") else "DIR"
    return (about.metadata["unit"] or "value").upper()


def _add_operator_commands(commands: Any) -> None:
    def add(name: str, text: str, namespace: bool = False) -> argparse.ArgumentParser:
        command = _command(commands, name, text)
        command.add_argument("--dir", metavar="DIR", help=DIR_HELP)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument(
            "--timeout-s",
            type=bounded(0.1, 3600, float),
            default=10.0,
            metavar="SECONDS",
            help="deadline; default 10",
        )
        if namespace:
            command.add_argument("--namespace", default="default", metavar="NAME", help="default: default")
        return command

    add("ping", "ask the daemon whether it serves, and how long that took")
    status = add("status", "show what the daemon holds and how it is used")
    status.add_argument("--sessions", action="store_true", help="also list the attached processes")
    ls = add("ls", "list blocks", namespace=True)
    ls.add_argument("--prefix", type=prefix, default=b"", metavar="HEX", help="only keys that begin so")
    ls.add_argument(
        "--limit",
        type=bounded(1, 1 << 24),
        default=100,
        metavar="N",
        help="at most so many, and a line on standard error if there are more; default 100",
    )
    ls.add_argument("--key", type=key, metavar="KEY", help="only this block")
    ls.add_argument("--quiet", action="store_true", help="keys only, one a line")
    describe = add("describe", "show all that is known of one block", namespace=True)
    describe.add_argument("key", type=key, metavar="KEY", help="64 hexadecimal digits")
    rm = add("rm", "delete blocks", namespace=True)
    rm.add_argument("keys", type=key, nargs="+", metavar="KEY", help="64 hexadecimal digits")
    flush = add("flush", "delete all sealed blocks of a namespace", namespace=True)
    flush.add_argument("--yes", action="store_true", help="do not ask")
    revoke = add("revoke", "ask a process for the blocks that it holds", namespace=True)
    revoke.add_argument(
        "session",
        type=bounded(1, (1 << 32) - 1),
        metavar="SESSION",
        help="number, as status --sessions says it",
    )
    drain = add("drain", "refuse new blocks and wait until those being written are done")
    drain.add_argument("--off", action="store_true", help="accept new blocks again")
    drain.add_argument(
        "--wait-s",
        type=bounded(0, 300, float),
        default=30.0,
        metavar="SECONDS",
        help="how long to wait; default 30",
    )
    add("scrub", "check the bytes of every sealed block and the index itself", namespace=True)
    top = add("top", "show status, refreshed")
    top.add_argument(
        "--interval-s", type=bounded(0.1, 3600, float), default=2.0, metavar="SECONDS", help="default 2"
    )
    top.add_argument("--once", action="store_true", help="one look, no screen control")
    add("layouts", "list the layouts of a namespace, and how many blocks have each", namespace=True)
    add("peers", "show the other hosts' daemons and how they are")
    push = add("push", "have another host's daemon come for blocks", namespace=True)
    push.add_argument("--to", required=True, metavar="NODE", help="its name, as peers shows it")
    push.add_argument("keys", type=key, nargs="+", metavar="KEY", help="64 hexadecimal digits")
    add("config", "show the running daemon's configuration")
    add("reload", "make the daemon read its configuration file again")
    stop = add("stop", "end the daemon; its blocks stay for the next one")
    stop.add_argument(
        "--discard", action="store_true", help="free the memory too; also where no daemon runs any more"
    )


def _add_commands_without_daemon(commands: Any) -> None:
    pools = _command(commands, "pools", "list the pools in shared memory, and whose they are")
    pools.add_argument("prefixes", nargs="*", metavar="POOL", help="only these, by the names listed")
    pools.add_argument("--remove", action="store_true", help="remove those that nobody owns")
    pools.add_argument("--pool-dir", metavar="DIR", default="", help="look here too, as serve --pool-dir")
    pools.add_argument("--json", action="store_true", help="print JSON")
    fsck = _command(commands, "fsck", "check the blocks on disk, without a daemon")
    fsck.add_argument("directories", nargs="+", metavar="DIR", help="as given to serve --disk")
    fsck.add_argument("--repair", action="store_true", help="remove what is wrong")
    fsck.add_argument(
        "--keep-corrupt", action="store_true", help="with --repair: move it to DIR/aside instead"
    )
    fsck.add_argument("--no-layers", action="store_true", help="names and headers only: quick")
    fsck.add_argument("--json", action="store_true", help="print JSON")
    completion = _command(commands, "completion", "print a completion script")
    completion.add_argument("shell", choices=("bash", "zsh"))


def main(arguments: Sequence[str] | None = None) -> int:
    _fill_closed_streams()
    started_ns = _process_started_ns()
    parsed = _parsed(sys.argv[1:] if arguments is None else arguments)
    try:
        _check_utf8(parsed)
        code = _run(parsed, started_ns)
        print(end="", flush=True)  # an error of the output is told here, not at the interpreter's end
        return code
    except ConfigError as error:
        return complain(str(error), Exit.USAGE, parsed)
    except StartupError as error:
        return complain(str(error), Exit.CANNOT_START, parsed)
    except BrokenPipeError:  # the reader of our output has left, for example head
        _drop_output()
        return Exit.DONE
    except (OSError, UnicodeEncodeError) as error:  # our output's disk is full, or cannot show a path
        if parsed.command == "serve" and not parsed.print_config:
            raise  # a bug, and the supervisor starts it again
        _drop_output()
        return complain(str(error), Exit.USAGE, parsed)
    except KeyboardInterrupt:
        return 130


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    try:
        return parser().parse_args(arguments)
    except WrongArguments as wrong:
        told(str(wrong), Exit.USAGE, wants_json(arguments))
        if not wants_json(arguments):
            print(wrong.usage, file=sys.stderr)
        raise SystemExit(Exit.USAGE) from None


def _fill_closed_streams() -> None:
    """A closed descriptor below 3 would be the next file's: a library's standard error, the pool's."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free: this one


def _check_utf8(arguments: argparse.Namespace) -> None:
    """Python takes arguments of any bytes; gRPC, the native part and our own text want UTF-8."""
    for value in vars(arguments).values():
        for word in value if isinstance(value, list) else (value,):
            try:
                word.encode() if isinstance(word, str) else None
            except UnicodeEncodeError:
                raise ConfigError(f"{word!r} is no UTF-8, which every path and name must be") from None


def _run(arguments: argparse.Namespace, started_ns: int) -> int:
    if arguments.command == "serve":
        return _serve(arguments, started_ns)
    if arguments.command == "completion":
        from kvstored.cli.completion import script

        print(script(parser(), arguments.shell))
        return Exit.DONE
    if arguments.command == "pools":
        from kvstored.cli import pools

        return pools.run(arguments)
    if arguments.command == "fsck":
        from kvstored.cli import fsck

        return fsck.run(arguments)
    from kvstored.cli import commands

    return commands.run(arguments, fields.path(arguments.dir or "") or running_dir(os.environ))


def _drop_output() -> None:
    """What could not be written is not tried again at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _serve(arguments: argparse.Namespace, started_ns: int) -> int:
    from kvstored.config.sources import load

    flags = {
        about.name: value
        for about in dataclasses.fields(Config)
        if (value := getattr(arguments, about.name)) is not None
    }
    sourced = load(flags, os.environ, arguments.config)
    for name in sourced.unread:
        log.warning("environment_unread", name=name)
    if arguments.print_config:
        from kvstored.cli.render import config_text

        print(config_text(sourced.entries(), as_json=arguments.json))
        return Exit.DONE
    if sys.flags.optimize:
        raise StartupError(
            "python -O removes the assertions that guard the store's invariants: start without it"
        )
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from kvstored.process.limits import need_descriptors

    need_descriptors(sourced.config)
    try:
        from kvstored.server import serve
    except ImportError as error:  # not built, or built for something else
        raise StartupError(
            f"a part of the daemon is missing: {error}"
            + ("" if "make build" in str(error) else ": `make build`, or install again")
        ) from error

    serve(sourced, fresh=arguments.fresh, discard=arguments.discard, started_ns=started_ns)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Exit.DONE)  # everything is closed; what the interpreter would take down yet is gRPC's servers


def _process_started_ns() -> int:
    """When this process began, for the honest time to readiness; the interpreter's own start counts."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf(
            "SC_CLK_TCK"
        )
        return time.time_ns() - age_ns
    except (OSError, ValueError, IndexError):
        return time.time_ns()
