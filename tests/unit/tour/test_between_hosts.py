"""Goal: who follows docs/tour.md gets from client.get on one host to the writer on the other in eight files.

Method: the steps of that part of the page are read; together they name eight files, in the order of the way;
and what each function does is looked up: it names what takes over, up to the queue, the wire or the memory
that lies between two of them.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# What stands in a step's function, from which the next step is reached.
LEADS_ON = {
    "KVClient.get": "_get",
    "Client::await": "promote(wanted",
    "Store::promote": "promote_one",
    "Tier::fetch": "place",
    "Tier::run": "work_on",
    "Tier::work_on": "fetch_batch",
    "BlockReceiver::fetch": "ask(keys",
    "BlockReceiver::ask": "Kind::Fetch",
    "Server::answer": "sender.answer",
    "BlockSender::answer": "advance",
    "BlockSender::advance": "send_ready",
    "BlockSender::send_ready": "layers_now",
    "BlockWriter::mark_layer": "progress",
    "BlockReceiver::take_layer": "mark",
}


def way() -> list[tuple[str, str]]:
    """(file, function) of each step, in order."""
    page = (ROOT / "docs/tour.md").read_text()
    part = page.partition("## From a get on one host to the writer on another\n")[2].partition("\n## ")[0]
    steps = part[part.index("\n1. ") :]
    return re.findall(r"`([\w./]+\.(?:py|cc|h)):([\w:.]+)`", steps)


def body(file: str, function: str) -> str:
    source = (ROOT / file).read_text()
    name = re.escape(function.split(".")[-1])
    if file.endswith(".py"):
        found = re.search(rf"^    def {name}\(.*?(?=^    def |\Z)", source, re.MULTILINE | re.DOTALL)
    else:
        found = re.search(rf"^\S[^;\n]*\b{name}\(.*?^\}}", source, re.MULTILINE | re.DOTALL)
    assert found, f"{file} has no {function}"
    return found[0]


def test_the_way_is_eight_files():
    files = list(dict.fromkeys(file for file, _ in way()))
    assert files[0] == "kvclient/client/client.py"
    assert files[-1] == "native/core/client/block_writer.cc"
    assert len(files) == 8, files


def test_each_step_leads_to_the_next():
    named = [function for _, function in way()]
    assert set(named) == set(LEADS_ON), set(named) ^ set(LEADS_ON)
    lost = [function for file, function in way() if LEADS_ON[function] not in body(file, function)]
    assert not lost, f"nothing there leads on: {lost}"
