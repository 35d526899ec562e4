"""How a command answers: what it found on standard output, why it could not on standard error.

Owns the two shapes, text and JSON. Invariant: with --json an error is one JSON object on standard error, and
standard output holds the answer or nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from kvstored.cli import render
from kvstored.errors import Exit


def complain(text: str, code: Exit, arguments: argparse.Namespace | None = None) -> Exit:
    """Says why not. Returns the exit code."""
    told(text, code, getattr(arguments, "json", False))
    return code


def told(text: str, code: Exit, as_json: bool) -> None:
    shown = render.printable(text)
    if as_json:
        shown = json.dumps({"error": {"text": text, "exit": code.value, "kind": code.name.lower()}})
    print(shown if as_json else f"kvstored: {shown}", file=sys.stderr)


def show(arguments: argparse.Namespace, value: Any, text: str) -> None:
    print(render.as_json(value) if arguments.json else render.printable(text))
