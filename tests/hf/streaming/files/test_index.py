"""Proves that whatever the index or the journal of a rearranged checkpoint say, it is theirs or it is made
anew: no other error, and no tensor out of another place.

Method: the index of a tiny checkpoint with each of its values in turn replaced by what is no number, or one
that fits nothing; with one letter of it changed, under its checksum; journals that are empty, cut or lie.
"""

import json

import pytest
import torch

from kvclient.errors import InvalidArgument
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.files.index import Arrangement, read_index, sources
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import tiny_llama, write_checkpoint

ODD = ("1e999", "-1", "[]", "{}", "null", '"x"', "1" * 40, "1.5", "[" * 60 + "]" * 60)
CONFIG = StreamingConfig(residency="full_stream")
TABLES = ("model.embed_tokens.weight",)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    found = tmp_path_factory.mktemp("packed")
    write_checkpoint(found, tiny_llama(), 32)
    streams_of(StreamingCausalLM.from_pretrained(found, CONFIG)).close()
    return found


def places(value, at=()):
    """Where each value of a JSON object stands."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*at, key))


def replaced(whole, at, text):
    """The JSON with a value in that place which no json.dumps() writes."""
    if not at:
        return text
    copy = json.loads(json.dumps(whole))
    into = copy
    for key in at[:-1]:
        into = into[key]
    into[at[-1]] = "here it stands"
    return json.dumps(copy).replace('"here it stands"', text)


def test_a_value_of_any_kind_in_any_place_is_no_error(home):
    """It raised OverflowError for 1e999, IndexError for a table without pieces."""
    path, files = home / "kvstored-streaming.json", sources(home)
    good = path.read_text()
    whole = json.loads(good)
    del whole["crc"]
    seen, first = 0, read_index(home, files, TABLES)
    assert isinstance(first, Arrangement)
    try:
        for at in places(whole):
            numbers = [key for key in at if isinstance(key, int)]
            if any(number > 1 for number in numbers[:1] + numbers[2:3]) or sum(numbers) > 6:
                continue  # as the first of their kind
            for text in ODD:
                path.write_text(replaced(whole, at, text))
                found = read_index(home, files, TABLES)
                assert found is None or isinstance(found, Arrangement)
                seen += found is None
    finally:
        path.write_text(good)
    assert seen > 500
    path.write_text("[" * 100_000)
    assert read_index(home, files, TABLES) is None
    path.write_text(good)


@pytest.mark.parametrize("change", [('"offset"', "0"), ("128", "192"), ("4096", "8192"), ("gate", "gato")])
def test_an_index_that_was_changed_is_made_anew(tmp_path, change):
    home = tmp_path
    write_checkpoint(home, tiny_llama(), 32)
    path, ids = home / "kvstored-streaming.json", torch.arange(1, 9)[None]

    def said():
        model = StreamingCausalLM.from_pretrained(home, CONFIG)
        with torch.inference_mode():
            found = model(ids).logits
        streams_of(model).close()
        return found

    wanted, good = said(), path.read_text()
    path.write_text(good.replace(*change, 1) if change[0] in good else good[:-2] + "7}")
    assert path.read_text() != good
    assert torch.equal(said(), wanted) and path.read_text() == good


@pytest.mark.parametrize(
    "journal", [b"", b"\n", b"[" * 100_000, b"\xff", b'{"version": 1e999}', b"the head's line, cut"]
)
def test_a_journal_that_says_nothing_is_begun_anew(tmp_path, journal):
    """Who was killed before its first line was there left an empty one: IndexError at each later start."""
    write_checkpoint(tmp_path, tiny_llama(), 32)
    (tmp_path / "kvstored-streaming.journal").write_bytes(journal)
    (tmp_path / "kvstored-streaming.bin.part").write_bytes(b"\0" * 9000)
    streams_of(StreamingCausalLM.from_pretrained(tmp_path, CONFIG)).close()
    assert not (tmp_path / "kvstored-streaming.journal").exists()


def test_lines_that_lie_are_not_believed(tmp_path):
    """Of a journal with the right first line."""
    write_checkpoint(tmp_path, tiny_llama(), 32)
    told = []

    def stop(done, _whole):
        told.append((tmp_path / "kvstored-streaming.journal").read_text().splitlines()[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StreamingCausalLM.from_pretrained(tmp_path, CONFIG, progress=stop)
    for line in ('["layer", [0, 1e999, 3], []]', '["layer", [0, -1, 3], []]', f"[1, [0, {10**30}, 3], []]"):
        (tmp_path / "kvstored-streaming.journal").write_text(f"{told[0]}\n{line}\n")
        with pytest.raises(KeyboardInterrupt):
            StreamingCausalLM.from_pretrained(tmp_path, CONFIG, progress=stop)
    streams_of(StreamingCausalLM.from_pretrained(tmp_path, CONFIG)).close()


def test_an_index_of_files_that_is_none_and_a_layer_that_is_none_are_named(tmp_path):
    write_checkpoint(tmp_path, tiny_llama(), 32)
    from safetensors.torch import load_file, save_file

    whole = load_file(tmp_path / "model.safetensors")
    more = {
        name.replace("gate_proj", "other_proj"): tensor.clone()
        for name, tensor in whole.items()
        if ".layers.1.mlp.gate_proj." in name
    }
    save_file(whole | more, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"quantises mlp\.other_proj, which the model has not"):
        StreamingCausalLM.from_pretrained(tmp_path, CONFIG)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(InvalidArgument, match="no weight_map that can be read"):
        StreamingCausalLM.from_pretrained(tmp_path, CONFIG)
