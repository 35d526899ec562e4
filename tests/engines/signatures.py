"""What a base class promises, as text: to be compared with what an adapter was written for."""

import ast
import dataclasses
import inspect
import json
import textwrap
from pathlib import Path


def signatures(kind: type) -> dict[str, str]:
    """Public methods by name, `abstract` before those that must be there; of a data class its fields too, in
    the place of `__init__`."""
    found, special = {}, "__init__"
    if dataclasses.is_dataclass(kind):
        found, special = {field.name: str(field.type) for field in dataclasses.fields(kind)}, ""
    elif names := getattr(kind, "__struct_fields__", None):  # msgspec's
        found, special = dict.fromkeys(names, "field"), ""
    for name, member in inspect.getmembers(kind):
        if (name.startswith("_") and name != special) or not callable(member) or name in found:
            continue
        mark = "abstract " if getattr(member, "__isabstractmethod__", False) else ""
        found[name] = mark + _parameters(member)
    return found


def called(kind: type, names: list[str]) -> dict[str, str]:
    """Of a class that an adapter uses from outside: those of the methods, and of the attributes that
    `__init__` sets, which are there."""
    found = {name: _parameters(getattr(kind, name)) for name in names if hasattr(kind, name)}
    set_there = _attributes(kind.__init__)
    return {**{name: "attribute" for name in names if name in set_there}, **found}


def _attributes(method: object) -> set[str]:
    """Those of its first argument that it sets; one that it only reads is none."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    me = function.args.args[0].arg
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name) and node.value.id == me
    }  # fmt: skip


def _parameters(member: object) -> str:
    return ", ".join(
        str(p).split(":")[0].split(" =")[0].split("=")[0]
        for p in inspect.signature(member).parameters.values()
    )


def differences(now: dict, recorded: dict) -> list[str]:
    """One line for each method or field that is another, or new, or gone."""
    return [
        f"{kind}.{name}: recorded {recorded.get(kind, {}).get(name)!r}, now {now.get(kind, {}).get(name)!r}"
        for kind in sorted({*recorded, *now})
        for name in sorted({*recorded.get(kind, {}), *now.get(kind, {})})
        if recorded.get(kind, {}).get(name) != now.get(kind, {}).get(name)
    ]


def recorded(engine: str) -> dict:
    return json.loads(Path(__file__).with_name(f"{engine}_signatures.json").read_text())


def printed(text: str) -> dict:
    """What tests/engines/record.py said."""
    (line,) = [line for line in text.splitlines() if line.startswith("SIGNATURES ")]
    return json.loads(line.removeprefix("SIGNATURES "))
