"""What `make cuda-release` made: registers, spills, machine code and size, for docs/gpu.md. No GPU is needed.

    python -m bench.gpu.build build/cuda-release     # writes docs/gpu_build.json
    python -m bench.gpu --document                   # and that into docs/gpu.md

Owns the reading of what ptxas said and of what cuobjdump (beside nvdisasm, in PATH) prints. Never builds.
Invariant: every number is of the library and the output of that one build.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs/gpu_build.json"
FUNCTION = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<target>\S+)'"
    r"|(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"|Used (?P<registers>\d+) registers"
)
LOCAL, TENSOR = re.compile(r"\b(LDL|STL)\b"), re.compile(r"\bHMMA\b")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path, help="the build's folder: build.txt and kernels/_cuda.so in it")
    options = parser.parse_args()
    library = options.build / "kernels/_cuda.so"
    targets = ptxas((options.build / "build.txt").read_text())
    for target, code in machine_code(library).items():
        targets[target] |= code
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(library.stat().st_mtime))
    record = {
        "when": when,
        "sources": _said(
            "git", "-C", str(ROOT), "log", "-1", "--format=%h", f"--before={when}", "--", "native/cuda"
        ).strip(),
        "nvcc": re.findall(r"release (\S+),", _said("nvcc", "--version"))[0],
        "bytes": library.stat().st_size,
        "targets": dict(sorted(targets.items())),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(words(record))


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def ptxas(text: str) -> dict[str, dict[str, int]]:
    """By target: functions, the most registers of one, and bytes of stack and of spills, over all."""
    found: dict[str, dict[str, int]] = {}
    target: dict[str, int] = {}
    for match in FUNCTION.finditer(text):
        if match["target"]:
            target = found.setdefault(
                match["target"], {"functions": 0, "registers": 0, "stack_bytes": 0, "spill_bytes": 0}
            )
            target["functions"] += 1
        elif match["registers"]:
            target["registers"] = max(target["registers"], int(match["registers"]))
        else:
            target["stack_bytes"] += int(match["stack"])
            target["spill_bytes"] += int(match["stores"]) + int(match["loads"])
    return found


def machine_code(library: Path) -> dict[str, dict[str, int]]:
    """By target: how many touch local memory, how many are the tensor cores'. {} without cuobjdump."""
    if shutil.which("cuobjdump") is None:
        return {}
    found: dict[str, dict[str, int]] = {}
    target: dict[str, int] = {}
    with subprocess.Popen(["cuobjdump", "-sass", library], stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        for line in tool.stdout:
            if line.startswith("arch = "):
                target = found.setdefault(line.split()[2], {"local_instructions": 0, "hmma_instructions": 0})
            elif LOCAL.search(line):
                target["local_instructions"] += 1
            elif TENSOR.search(line):
                target["hmma_instructions"] += 1
    if tool.returncode:
        raise SystemExit(f"cuobjdump ended with {tool.returncode}")
    return found


def words(record: dict[str, Any]) -> str:
    """The section of docs/gpu.md."""
    lines = [
        f"`make cuda-release`, {record['when']}, nvcc {record['nvcc']}, sources of commit "
        f"{record['sources']}, no GPU.",
        f"It gives a library of {record['bytes'] / 1e6:.1f} MB, PTX for 9.0 included.",
        "By ptxas and cuobjdump (`python -m bench.gpu.build build/cuda-release`):",
        "",
        "| target | functions, most registers | stack, spills (bytes) | LDL and STL | HMMA |",
        "|---|---|---|---|---|",
    ]
    for target, figures in record["targets"].items():
        code = [str(figures.get(name, "*not read*")) for name in ("local_instructions", "hmma_instructions")]
        lines.append(
            f"| {target} | {figures['functions']}, {figures['registers']} | {figures['stack_bytes']}, "
            f"{figures['spill_bytes']} | {' | '.join(code)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
