"""Proves whom a file of API keys lets in: the keys that stand in it, and nobody by a comment, an empty line
or the way an editor ends its lines.

Method: files as people write them, through the command line of the server; headers as they come, bytes; one
server process that is asked with a key that is not ASCII, in every spelling of the scheme.
"""

import http.client
import json
import shlex
import urllib.parse

import pytest

from kvclient.serve.__main__ import curl, main, options
from kvclient.serve.keys import Keys

KEY = "Schlüssel-鍵 mit Leerzeichen".encode()
FILE = b"\xef\xbb\xbf# keys of teams\r\n\r\nalice-key  \r\n  %b\r\n\t\r\n#old-key\r\nraw-\xff-bytes\n" % KEY


def keys_of(tmp_path, content, *flags):
    file = tmp_path / "keys"
    file.write_bytes(content)
    return options(["m", "--api-key-file", str(file), *flags]).keys


def test_a_file_has_a_key_a_line_and_nothing_else(tmp_path):
    assert keys_of(tmp_path, FILE, "--api-key", "flag") == [b"flag", b"alice-key", KEY, b"raw-\xff-bytes"]


@pytest.mark.parametrize("content", [b"", b"\n", b"# nobody yet\r\n", b"\xef\xbb\xbf\n \t\n"])
def test_a_file_without_keys_does_not_let_everybody_in(tmp_path, capsys, content):
    with pytest.raises(SystemExit) as ended:
        keys_of(tmp_path, content)
    assert ended.value.code == 2 and "no key" in capsys.readouterr().err


def test_an_empty_key_is_none(capsys):
    with pytest.raises(SystemExit) as ended:
        options(["m", "--api-key", " "])
    assert ended.value.code == 2 and "empty" in capsys.readouterr().err


@pytest.mark.parametrize("shown", [b"bearer ", b"Bearer ", b"BEARER   ", b"bEaReR ", b""])
def test_the_scheme_is_in_any_case(shown):
    keys = Keys([KEY, b"bob"])
    assert keys.salt_of(shown + KEY) == keys.salt_of(None, KEY) != keys.salt_of(shown + b"bob")
    for wrong in (KEY[:-1], KEY + b"x", b"", b"#", "Schlüssel".encode("latin-1")):
        assert keys.salt_of(shown + wrong) is None
    assert keys.salt_of(b"Basic " + KEY) is None and keys.salt_of(None) is None


def test_a_key_of_any_characters_is_let_in_and_its_comment_is_not(server, tmp_path, capsys):
    file = tmp_path / "keys"
    file.write_bytes(FILE)
    running = server("--store", "32MiB", "--api-key-file", str(file))
    where = urllib.parse.urlsplit(running.url)
    for name, value, status in (
        (b"Authorization", b"bearer " + KEY, 200), (b"authorization", b"BEARER alice-key", 200),
        (b"X-Api-Key", KEY, 200), (b"x-api-key", b"raw-\xff-bytes", 200),
        (b"Authorization", b"Bearer #", 401), (b"Authorization", b"Bearer teams", 401),
        (b"Authorization", b"Bearer #old-key", 401),
        (b"Authorization", b"Bearer ", 401), (b"X-Nothing", b"x", 401),
    ):  # fmt: skip
        way = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
        way.request("GET", "/v1/models", headers={name: value})
        assert way.getresponse().status == status, (name, value)
        way.close()
    assert main(["m", "--api-key-file", str(file), "--print-config"]) == 0
    told = capsys.readouterr().out
    assert json.loads(told)["api_keys"] == 3 and "alice" not in told


def test_the_line_to_try_a_server_with_has_a_place_for_the_key_that_it_wants():
    """Without one it was a 401, told by the server itself."""
    lines = [shlex.split(curl("http://127.0.0.1:1", "m", keys)) for keys in (True, False)]
    assert ["Authorization: Bearer KEY" in words for words in lines] == [True, False]
    assert all(json.loads(words[-1])["model"] == "m" for words in lines)
