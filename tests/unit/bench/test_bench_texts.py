"""The texts that bench.reuse_inside.swapped measures with: what a machine lacks is named."""

from types import SimpleNamespace

import pytest

from bench.reuse_inside import swapped as reuse_swapped


def test_texts_that_this_machine_lacks_are_named(tmp_path, monkeypatch):
    subject = SimpleNamespace(encode=list)
    monkeypatch.setattr(reuse_swapped, "LICENCES", tmp_path)
    with pytest.raises(SystemExit, match=f"GFDL-1.3, GPL-3, LGPL-3, MPL-1.1 in {tmp_path}"):
        next(reuse_swapped.others(subject))
    wanted = {name for pair in reuse_swapped.PAIRS for name in pair[::2]}
    assert wanted <= set(reuse_swapped.texts_of(subject))
