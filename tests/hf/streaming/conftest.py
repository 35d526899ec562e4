"""A tiny checkpoint on the disk, packed and plain."""

import pytest

from tests.hf.awq_checkpoint import tiny_llama, write_checkpoint


@pytest.fixture(scope="module", params=["awq", "plain"])
def checkpoint(request, tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp(request.param)
    if request.param == "awq":
        write_checkpoint(checkpoint, tiny_llama(), 32)
    else:
        tiny_llama().save_pretrained(checkpoint)
    return checkpoint
