"""What operators install, as its tests read it: manifests, and the words the programs are started with."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="deploy: pip install pyyaml")

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
CONTAINERS, KUBERNETES = DEPLOY / "containers", DEPLOY / "kubernetes"
KUBERNETES_VERSION = "1.33"


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def workloads():
    return [documents(KUBERNETES / name)[0] for name in ("daemon.yaml", "server.yaml")]


def entry(name):
    """The words of a Containerfile's ENTRYPOINT."""
    return yaml.safe_load(
        re.search(r"^ENTRYPOINT (.*)$", (CONTAINERS / f"{name}.Containerfile").read_text(), re.M)[1]
    )


def taken(words):
    """Whether the program would start with these words; argparse ends the process where not."""
    if words[0] == "kvstored":
        from kvstored.cli.main import parser
    else:
        from kvclient.serve.__main__ import parser
    return parser().parse_args(words[1:])
