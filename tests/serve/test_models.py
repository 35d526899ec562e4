"""Proves what may stand as MODEL besides a directory: a .gguf file, and a hub id found in the hub's own cache
on this disk, packed AWQ checkpoints too.

Method: a tiny GGUF file written by hand; the layout of huggingface_hub's cache made by hand, with the hub
switched off; answers against the same model's from its directory.
"""

import queue
import shutil
import subprocess

import pytest
import torch
import transformers

from kvclient.hf.engine.loading import chosen_device
from kvclient.serve.__main__ import first_token, options, served
from kvclient.serve.engine.job import Done, Job
from kvclient.serve.engine.sampling import Sampler, Sampling
from kvclient.serve.engine.text import Text
from tests.hf.awq_checkpoint import write_checkpoint
from tests.hf.models.test_gguf import model, path
from tests.hf.models.test_windows import olmoe
from tests.hf.zoo import build, generate

__all__ = ["model", "path"]

TEXT = "Nine geese go north. " * 9
REVISION = "0123456789abcdef0123456789abcdef01234567"


def test_a_gguf_file_is_served_by_its_path(model, path):
    settings = options([str(path), "--store", "16MiB", "--dtype", "float32", "--block-tokens", "16"])
    with served(settings) as asking:
        assert asking.model_name == "tiny.gguf" and asking.loop.ready.is_set() is False
        first_token(asking, TEXT)
        assert asking.loop.ready.is_set()
        before = asking.loop.stats()["prompt_tokens_computed_total"]
        first_token(asking, TEXT)
        assert asking.loop.stats()["prompt_tokens_computed_total"] - before <= 16
        ids, said = asking.tokens(TEXT), queue.Queue()
        job = Job(ids, 8, Sampler(Sampling(temperature=0), ids), Text(asking.tokenizer), said.put)
        asking.loop.submit(job)
        while not isinstance(said.get(timeout=60), Done):
            pass
    wanted = generate(model, torch.tensor([ids]), 8)[0][0, len(ids) :].tolist()
    assert job.tokens == wanted


@pytest.mark.slow
def test_a_gguf_file_is_served_by_a_process_that_imports_as_a_users_does(server, path):
    """Not one that was forked behind its imports: a server leaves out parts of torch (spared.py)."""
    running = server("--store", "16MiB", model=path, python=subprocess.Popen)
    body = {"prompt": TEXT, "max_tokens": 4, "temperature": 0}
    first, second = (running.post("/v1/completions", body)[2] for _ in range(2))
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_requests_are_no_longer_than_a_window_that_is_in_no_mask(home, tmp_path):
    olmoe(300).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(home).save_pretrained(tmp_path)
    with served(options([str(tmp_path), "--store", "16MiB", "--dtype", "float32"])) as asking:
        assert asking.max_tokens == 300


def test_a_torch_built_for_gpus_computes_on_the_cpu_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert chosen_device("auto") == "cpu"


@pytest.fixture
def hub(tmp_path):
    """`hub(name, directory)`: that checkpoint as the cache has it after a download. Returns the cache."""
    cache = tmp_path / "hub"

    def put(name, directory):
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(REVISION)
        (folder / "blobs").mkdir()
        (folder / "snapshots" / REVISION).mkdir(parents=True)
        for number, file in enumerate(sorted(directory.iterdir())):
            shutil.copy(file, folder / "blobs" / str(number))
            (folder / "snapshots" / REVISION / file.name).symlink_to(f"../../blobs/{number}")
        return cache

    return put


@pytest.mark.slow
def test_a_hub_id_is_found_in_the_hubs_cache_without_the_hub(server, home, hub, tmp_path):
    (tmp_path / "awq").mkdir()
    source = write_checkpoint(tmp_path / "awq", build("llama"), 16)
    transformers.AutoTokenizer.from_pretrained(home).save_pretrained(source)
    for name, directory in (("someone/tiny", home), ("someone/packed", source)):
        where = {"HF_HUB_CACHE": str(hub(name, directory)), "HF_HUB_OFFLINE": "1"}
        by_name = server("--store", "64MiB", model=name, env=where, python=subprocess.Popen)
        by_path = server("--store", "64MiB", model=directory)
        assert by_name.chat(TEXT)["choices"] == by_path.chat(TEXT)["choices"]
        for running in (by_name, by_path):
            running.end()
