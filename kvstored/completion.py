"""Completion scripts, made from the argument parser itself, so that they never fall behind it."""

from __future__ import annotations

import argparse


def _words(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Per command its options and fixed arguments."""
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                options = [
                    text for one in command._actions for text in one.option_strings if text.startswith("--")
                ]
                fixed = [
                    str(choice)
                    for one in command._actions
                    if not one.option_strings
                    for choice in one.choices or ()
                ]
                found[name] = options + fixed
    return found


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    words = _words(parser)
    cases = "\n".join(f"    {name}) words='{' '.join(options)}' ;;" for name, options in words.items())
    commands = " ".join(words)
    if shell == "bash":
        return f"""_kvstored() {{
  local words current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  case "$previous" in
    --dir|--pool-dir) COMPREPLY=($(compgen -d -- "$current")); return ;;
    --config) COMPREPLY=($(compgen -f -- "$current")); return ;;
  esac
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words='{commands} --help --version' ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words='{commands} --help --version'; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -F _kvstored kvstored"""
    return f"""#compdef kvstored
_kvstored() {{
  local offered
  case "$words[2]" in
{cases.replace("words='", "offered='")}
    *) offered='{commands}' ;;
  esac
  if (( CURRENT == 2 )); then offered='{commands}'; fi
  case "$words[CURRENT-1]" in
    --dir|--pool-dir) _files -/; return ;;
    --config) _files; return ;;
  esac
  compadd -- ${{=offered}}
}}
_kvstored "$@" """
