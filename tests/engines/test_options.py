"""Proves that an option of an engine's integration is of its default's kind, or the start ends with its name,
the value and the limit.

Method: the function that all integrations read their options by, and every integration's own list of them.
"""

import contextlib
import json
import math
import os
import re
from pathlib import Path

import pytest

from kvclient.errors import InvalidArgument, NotPermitted, Unavailable
from kvclient.integrations.options import MAX_COUNT, MAX_SECONDS, connected, with_defaults
from tests.conftest import ROOT

DEFAULTS = {"wait_s": 2.0, "max_held": 16, "enable_kv_events": False, "dir": None, "model_path": ""}


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        *(("wait_s", value, f"{MAX_SECONDS:g}") for value in (math.nan, math.inf, -math.inf, -0.5, 1e6)),
        *(("wait_s", value, "number") for value in ("nan", "inf", "soon", None, True, [1])),
        *(("max_held", value, f"{MAX_COUNT:g}") for value in (math.nan, math.inf, -1, 1 << 40, 2.5, "many")),
        *(("enable_kv_events", value, "true or false") for value in ("false", 0, None)),
        *(("dir", value, "text") for value in (5, False, ["/run/kvstored"])),
    ],
)
def test_a_value_of_another_kind_or_without_bounds_is_named(name, value, limit):
    with pytest.raises(InvalidArgument, match=rf"here: {name}=.*{re.escape(limit)}") as raised:
        with_defaults({name: value}, DEFAULTS, "here")
    assert repr(value) in str(raised.value)


def test_what_is_right_is_taken():
    chosen = {"wait_s": "2.5", "max_held": 4.0, "model_path": {"m": "p"}, "of_the_engine": math.nan}
    taken = with_defaults(chosen, DEFAULTS, "here", ["of_the_engine"])
    assert (taken["wait_s"], taken["max_held"], taken["model_path"]) == (2.5, 4, {"m": "p"})
    assert with_defaults({"dir": Path("/run")}, DEFAULTS, "here")["dir"] == "/run"
    assert "of_the_engine" not in taken and with_defaults({"wait_s": 0}, DEFAULTS, "here")["wait_s"] == 0
    with pytest.raises(InvalidArgument, match="wiat_s"):
        with_defaults({"wiat_s": 1}, DEFAULTS, "here")


def test_a_directory_where_no_daemon_can_be_ends_the_start(tmp_path):
    """One that is not there yet may come."""
    (tmp_path / "file").touch()
    chosen = {"namespace": "default", "timeout_s": 0.5}
    for wrong in (tmp_path / "file", tmp_path / "file" / "kvstored"):
        with pytest.raises(Unavailable, match=f"{tmp_path}/file is no directory") as raised:
            connected({"dir": str(wrong), **chosen})
        assert isinstance(raised.value, OSError)
    with connected({"dir": str(tmp_path / "later" / "kvstored"), **chosen}) as client:
        assert client.degraded


def test_a_directory_that_this_user_may_not_see_is_said_by_connect(tmp_path):
    """In a child that is somebody else, for root sees everything."""
    (closed := tmp_path / "closed").mkdir(mode=0)
    if (child := os.fork()) == 0:
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            with contextlib.suppress(NotPermitted):
                connected({"dir": str(closed / "kvstored"), "namespace": "default", "timeout_s": 0.5})
                os._exit(1)
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_json_nan_is_one():
    """What vLLM's and TensorRT-LLM's JSON may hold, though no JSON should."""
    with pytest.raises(InvalidArgument, match="nan"):
        with_defaults(json.loads('{"wait_s": NaN}'), DEFAULTS, "here")


def test_every_integration_reads_its_options_so():
    sources = {path: path.read_text() for path in (ROOT / "kvclient/integrations").rglob("*.py")}
    lists = {path for path, text in sources.items() if re.search(r"^OPTIONS = ", text, re.M)}
    assert lists and all("with_defaults(" in sources[path] for path in lists)
