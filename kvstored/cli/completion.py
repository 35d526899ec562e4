"""Completion scripts, made from the argument parser itself, so that they never fall behind it.

What an option's value is, its metavar says: DIR and FILE are paths; of {one,other} the words are offered.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

DIR, FILE = "DIR", "FILE"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    subparsers = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: command for action in subparsers for name, command in action.choices.items()}


def _offered(command: argparse.ArgumentParser) -> Iterator[str]:
    """Its options and fixed arguments."""
    for action in command._actions:
        yield from (text for text in action.option_strings if text.startswith("--"))
        if not action.option_strings:
            yield from map(str, action.choices or ())


def _valued(parser: argparse.ArgumentParser, kind: str) -> str:
    """The options whose value is of that metavar, as a pattern of case."""
    actions = (action for command in _commands(parser).values() for action in command._actions)
    named = {
        action.option_strings[-1] for action in actions if action.option_strings and action.metavar == kind
    }
    return "|".join(sorted(named))


def _words(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Per option with few values, written `{one,other}`, those values."""
    actions = (action for command in _commands(parser).values() for action in command._actions)
    return {
        action.option_strings[-1]: action.metavar.strip("{}").replace(",", " ")
        for action in actions
        if action.option_strings and isinstance(action.metavar, str) and action.metavar.startswith("{")
    }


def _takes_directories(parser: argparse.ArgumentParser) -> list[str]:
    """The commands whose arguments are directories."""
    return [
        name
        for name, command in _commands(parser).items()
        if any(action.metavar == DIR and not action.option_strings for action in command._actions)
    ]


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    offered = {name: " ".join(_offered(command)) for name, command in _commands(parser).items()}
    commands = " ".join(offered)
    directories, files, taking = _valued(parser, DIR), _valued(parser, FILE), _takes_directories(parser)
    cases = "\n".join(f"    {name}) words='{words}' ;;" for name, words in offered.items())
    if shell == "bash":
        values = "\n".join(
            f"""    {option}) COMPREPLY=($(compgen -W '{words}' -- "$current")); return ;;"""
            for option, words in _words(parser).items()
        )
        return f"""_kvstored() {{
  local words current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  case "$previous" in
    {directories}) COMPREPLY=($(compgen -d -- "$current")); return ;;
    {files}) COMPREPLY=($(compgen -f -- "$current")); return ;;
{values}
  esac
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words='{commands} --help --version' ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words='{commands} --help --version'; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  case "$COMP_CWORD/${{COMP_WORDS[1]}}/$current" in
    1/*|*/-*) ;;
    {"|".join(f"*/{name}/*" for name in taking)}) COMPREPLY+=($(compgen -d -- "$current")) ;;
  esac
}}
complete -F _kvstored kvstored"""
    values = "\n".join(
        f"    {option}) compadd -- {words}; return ;;" for option, words in _words(parser).items()
    )
    return f"""#compdef kvstored
_kvstored() {{
  local offered
  case "$words[2]" in
{cases.replace("words='", "offered='")}
    *) offered='{commands}' ;;
  esac
  if (( CURRENT == 2 )); then offered='{commands}'; fi
  case "$words[CURRENT-1]" in
    {directories}) _files -/; return ;;
    {files}) _files; return ;;
{values}
  esac
  compadd -- ${{=offered}}
  case "$CURRENT/$words[2]" in
    2/*) ;;
    {"|".join(f"*/{name}" for name in taking)}) _files -/ ;;
  esac
}}
_kvstored "$@" """
