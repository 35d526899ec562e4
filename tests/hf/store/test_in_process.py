"""Goal: client="memory" makes an Engine complete without a daemon: a budget that holds, a directory whose
blocks come back, in another process too, figures, a reset; what is damaged on disk is a miss.

Method: the tiny model with a tokenizer of bytes, a budget for a few of its blocks, files written over.
"""

import os
import sys
import time
from pathlib import Path

import pytest
import transformers

import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.engine import in_process
from kvclient.hf.engine.in_process import InProcessClient
from tests.warm_python import run as run_warm

ROOT = Path(__file__).resolve().parents[3]
TEXTS = [f"{word} " * 24 for word in ("first", "second", "third", "fourth", "fifth", "sixth")]
MEMORY_BYTES = 256 << 10  # for some three of them


@pytest.fixture(scope="module")
def loaded(home):
    model = transformers.AutoModelForCausalLM.from_pretrained(home).eval()
    return model, transformers.AutoTokenizer.from_pretrained(home)


def engine_of(loaded, **options):
    options = {"memory_bytes": MEMORY_BYTES, **options}
    return kvclient.hf.Engine(*loaded, client="memory", block_tokens=16, self_test=False, **options)


def reused(engine, text):
    return engine.generate(text, 1).report.reused_tokens


def test_its_budget_holds_and_what_was_used_last_stays(loaded):
    with engine_of(loaded) as engine:
        for text in TEXTS:
            engine.generate(text, 1)
        figures = engine.stats()["store"]
        assert figures["capacity_bytes"] == MEMORY_BYTES >= figures["used_bytes"]
        assert figures["evictions"] and not figures["disk_files"]
        assert reused(engine, TEXTS[-1]) > 100 and reused(engine, TEXTS[0]) == 0


def test_what_leaves_memory_comes_back_from_the_directory(loaded, tmp_path):
    with engine_of(loaded, disk_dir=tmp_path / "kv") as engine:
        wanted = [engine.generate(text, 8).tokens for text in TEXTS]
        for text, tokens in zip(TEXTS, wanted, strict=True):
            found = engine.generate(text, 8)
            assert found.report.reused_tokens > 100 and found.tokens == tokens
        figures = engine.stats()["store"]
        assert figures["disk_loaded"] and figures["disk_written"] and figures["disk_files"]
        assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    with engine_of(loaded, disk_dir=tmp_path / "kv") as engine:
        assert all(reused(engine, text) > 100 for text in TEXTS), "in an engine made anew"
        assert engine.reset() > 10
        assert not list((tmp_path / "kv").glob("*")) and engine.stats()["store"]["blocks"] == 0
        assert reused(engine, TEXTS[0]) == 0


def test_another_process_finds_them(home, loaded, tmp_path):
    program = """
import sys, transformers, kvclient.hf
with kvclient.hf.Engine.from_pretrained(
    sys.argv[1], client="memory", memory_bytes=1 << 20, disk_dir=sys.argv[2], block_tokens=16
) as engine:
    print(engine.generate(sys.argv[3], 1).report.reused_tokens)
"""
    command = [sys.executable, "-c", program, str(home), str(tmp_path), TEXTS[0]]
    told = [int(run_warm(command, cwd=ROOT, check=True, timeout=300).stdout) for _ in range(2)]
    assert told[0] == 0 and told[1] > 100


DAMAGE = {
    "a bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "its end": lambda data: data[:-100],
    "its head": lambda data: b"{}\n" + data.split(b"\n", 1)[1],
    "all": lambda data: b"",
    "a length that is not its layout's": lambda data: data.replace(b'"tokens": 16', b'"tokens": 15'),
    "a layout that is none": lambda data: data.replace(b'"layout": "', b'"layout": "ff'),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_a_miss_and_goes(loaded, tmp_path, what):
    with engine_of(loaded, disk_dir=tmp_path) as engine:
        tokens = engine.generate(TEXTS[0], 8).tokens
    files = list(tmp_path.glob("*.kv"))
    assert files
    for path in files:
        path.write_bytes(DAMAGE[what](path.read_bytes()))
    with engine_of(loaded, disk_dir=tmp_path) as engine:
        found = engine.generate(TEXTS[0], 8)
        assert (found.report.reused_tokens, found.tokens) == (0, tokens)
        assert reused(engine, TEXTS[0]) > 100


def test_what_is_no_block_of_that_name_is_no_block(loaded, tmp_path):
    """A block under another's name is a miss; other files are left alone, but for what was left half written.
    """
    with engine_of(loaded, disk_dir=tmp_path) as engine:
        said = [engine.generate(text, 1).tokens for text in TEXTS[:2]]
    files = sorted(tmp_path.glob("*.kv"))
    bodies = [file.read_bytes() for file in files]
    for file, body in zip(files, bodies[1:] + bodies[:1], strict=True):
        file.write_bytes(body)
    alone = [tmp_path / f"{'z' * 64}.kv", tmp_path / f"{'a' * 64}.kv", tmp_path / "notes.tmp"]
    alone[0].touch()
    alone[1].mkdir()
    left, new = tmp_path / f"{'b' * 64}.7.tmp", tmp_path / f"{'c' * 64}.7.tmp"
    for path in (left, new, alone[2]):
        path.touch()
    for path in (left, alone[2]):
        os.utime(path, (1, 1))
    with engine_of(loaded, disk_dir=tmp_path) as engine:
        found = [engine.generate(text, 1) for text in TEXTS[:2]]
    assert [each.tokens for each in found] == said
    assert not any(each.report.reused_tokens for each in found)
    assert not left.exists() and all(path.exists() for path in (*alone, new))


def test_the_budget_of_the_disk_holds(loaded, tmp_path, monkeypatch):
    with engine_of(loaded, disk_dir=tmp_path, disk_bytes=1 << 20) as engine:
        monkeypatch.setattr(engine.kv.client.store, "_disk_bytes", 200_000)
        for text in TEXTS:
            engine.generate(text, 1)
    assert 0 < sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= 200_000


def test_a_directory_that_cannot_be_written_is_said_and_gone_on_without(loaded, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    with engine_of(loaded, disk_dir=tmp_path) as engine:
        monkeypatch.setattr(in_process.os, "replace", fail)
        with pytest.warns(UserWarning, match="No space left"):
            for text in TEXTS:
                assert engine.generate(text, 1).tokens
        assert not list(tmp_path.glob("*.tmp"))
        monkeypatch.undo()


def test_its_arguments(tmp_path):
    for wrong in ({"memory_bytes": 1}, {"disk_bytes": 1, "disk_dir": tmp_path}):
        with pytest.raises(InvalidArgument):
            InProcessClient(**wrong)


def test_a_directory_keeps_types_and_checkpoints_apart_and_every_bit(home, tmp_path):
    """Of three models of equal shape: a type is not made another, and nobody finds another's KV."""
    models = {}
    for name, dtype, seed in (("fp32", "float32", 0), ("bf16", "bfloat16", 0), ("other", "float32", 1)):
        model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=dtype).eval()
        if seed:
            model.model.layers[0].self_attn.k_proj.weight.data *= 1.01
        models[name] = (model, transformers.AutoTokenizer.from_pretrained(home))
    kept = {}
    for name, loaded in models.items():
        with engine_of(loaded, disk_dir=tmp_path, memory_bytes=1 << 20) as engine:
            assert reused(engine, TEXTS[0]) == 0, f"{name} found what another computed"
            kept[name] = bits(engine)
    assert len({sum(map(len, blocks.values())) for blocks in kept.values()}) == 2, "bf16 takes half"
    for name, loaded in models.items():
        with engine_of(loaded, disk_dir=tmp_path, memory_bytes=1 << 20) as engine:
            assert reused(engine, TEXTS[0]) > 100
            assert bits(engine) == kept[name]


def bits(engine):
    """Every block that is in memory."""
    client = engine.kv.client
    keys = list(client.store._records)
    with client.get(keys) as blocks:
        return {bytes(key): bytes(block.view) for key, block in zip(keys, blocks, strict=True)}


def test_a_memory_with_room_for_no_block_finds_nothing_and_ends(loaded, tmp_path):
    """As a directory that was filled under a larger budget is opened."""
    with engine_of(loaded, disk_dir=tmp_path) as engine:
        wanted = engine.generate(TEXTS[0], 8).tokens
    with engine_of(loaded, disk_dir=tmp_path, memory_bytes=4096) as engine:
        for _ in range(2):
            found = engine.generate(TEXTS[0], 8)
            assert (found.report.reused_tokens, found.tokens) == (0, wanted)


def test_in_a_directory_that_others_may_read_its_files_are_the_users_alone(loaded, tmp_path):
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        with engine_of(loaded, disk_dir=tmp_path) as engine:
            engine.generate(TEXTS[0], 1)
    finally:
        os.umask(before)
    files = list(tmp_path.glob("*.kv"))
    assert files and {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert not any(TEXTS[0][:12].encode() in path.read_bytes() for path in files)


def test_a_block_whose_time_is_over_does_not_come_back_from_the_directory(loaded, tmp_path, monkeypatch):
    now, ticks, later_s = time.time, time.monotonic, 0.0
    monkeypatch.setattr(time, "time", lambda: now() + later_s)
    monkeypatch.setattr(time, "monotonic", lambda: ticks() + later_s)
    with engine_of(loaded, disk_dir=tmp_path, ttl_s=1000) as engine:
        for text in TEXTS:
            engine.generate(text, 1)
        assert reused(engine, TEXTS[0]) > 100, "read back from the directory"
        later_s = 600.0
    with engine_of(loaded, disk_dir=tmp_path) as engine:
        assert reused(engine, TEXTS[0]) > 100
        later_s = 1100.0
        assert all(reused(engine, text) == 0 for text in TEXTS), "600 seconds and 500 more"
