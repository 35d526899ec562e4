"""The protocol's files are its manual: every service, call, message, field and value says what it means.

Method: the text itself; a comment directly above, or for a message's line one above the message.
"""

import re
from pathlib import Path

import pytest

PROTOS = sorted((Path(__file__).resolve().parents[3] / "proto").rglob("*.proto"))
CALL = re.compile(r"\s*rpc \w+\(")
SERVICE = re.compile(r"(service|enum) |  enum (?!Status\b)")
MEMBER = re.compile(r"\s+(repeated |optional |map<[^>]+> )?[\w.]*( ?)\w+ = \d+;")
# A request or response is explained by its call, a status by its message; others stand for something.
MESSAGE = re.compile(r"message (?!\w+(Request|Response)\b)")
TIME_OR_SIZE = re.compile(
    r"(uint32|uint64|int64) \w*(time|length|timeout|ttl|memory|rss|size|offset|interval|wait)\w* ="
)


def uncommented(text):
    above = ""
    for line in text.splitlines():
        wanted = any(pattern.match(line) for pattern in (CALL, SERVICE, MEMBER, MESSAGE))
        if wanted and not above.strip().startswith("//"):
            yield line.strip()
        above = line


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_everything_says_what_it_means(path):
    assert list(uncommented(path.read_text())) == []


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_units_come_last(path):
    for line in path.read_text().splitlines():
        if TIME_OR_SIZE.search(line):
            assert re.search(r"_(ms|s|bytes) = \d+;", line), line


def test_the_check_finds_what_is_missing():
    assert list(uncommented("message A {\n  string x = 1;\n}")) == ["message A {", "string x = 1;"]
    assert list(uncommented("// It is.\nmessage A {\n  // x is.\n  repeated B x = 1;\n}")) == []
    assert list(uncommented("message ARequest {\n  map<string, uint64> x = 1;\n}")) == [
        "map<string, uint64> x = 1;"
    ]
    assert list(uncommented("service A {\n  rpc B(C) returns (D);\n")) == [
        "service A {",
        "rpc B(C) returns (D);",
    ]


def test_there_is_something_to_check():
    assert {path.name for path in PROTOS} == {"admin.proto", "block.proto", "store.proto", "transfer.proto"}
