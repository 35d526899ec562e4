"""Proves that the command streams as it is told: which layers stay, how far ahead it reads, what it drafts
by, and a hub id that was fetched.

Method: tiny checkpoints, plain and packed, with tokens of one letter each; what the command loads is kept.
"""

import pytest
import torch
import transformers

from kvclient.errors import InvalidArgument
from kvclient.hf.awq.linear import AwqLinear
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, __main__, scheduler
from kvclient.hf.streaming.mover import Piece
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import tiny_llama, write_checkpoint

DEVICE = ("--device", "cuda")


class Letters:
    """A token a letter."""

    def __call__(self, text, return_tensors):
        ids = torch.tensor([[ord(letter) % 100 for letter in text]])
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids.tolist()))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`command(*flags)`: what it printed, and the model that it had."""
    home = write_checkpoint(tmp_path, tiny_llama(), 32)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Letters())
    made, usual = [], StreamingCausalLM.from_pretrained
    monkeypatch.setattr(
        StreamingCausalLM, "from_pretrained", lambda *a, **k: made.append(usual(*a, **k)) or made[-1]
    )

    def run(*flags, directory=home):
        monkeypatch.setattr("sys.argv", ["it", str(directory), "--prompt", "a prompt, a prompt, a", *flags])
        status = __main__.main()
        out = capsys.readouterr()
        assert status == 0, out.err
        return out.out, made[-1]

    return run


def test_which_layers_stay_and_how_far_it_reads_ahead(command):
    first, model = command("--residency", "partial_resident", "--keep-first-k", "2", "--keep-last-k", "0")
    assert [bool(parts) for parts in streams_of(model).plan.streamed] == [False] * 2 + [True] * 3
    flags = ("--residency", "full_stream", "--slots", "4", "--prefetch-layers-ahead", "2")
    second, model = command(*flags)
    table = streams_of(model).scheduler._table
    assert (len(table.slots), table._ahead) == (4, 2) and first == second


@pytest.mark.parametrize("packed", [False, True])
def test_drafts_by_a_model_of_either_kind_and_as_a_tree(command, tmp_path_factory, monkeypatch, packed):
    """A packed one could not be loaded."""
    small = tmp_path_factory.mktemp("small")
    if packed:
        write_checkpoint(small, tiny_llama(2), 32)
    else:
        tiny_llama(2).save_pretrained(small)
    seen, usual = [], __main__.small_model
    monkeypatch.setattr(__main__, "small_model", lambda home: seen.append(usual(home)) or seen[-1])
    plain, _ = command()
    for flags in ((), ("--branches", "2", "--nodes", "6")):
        assert command("--draft", str(small), *flags)[0] == plain
        assert command("--draft", "lookup", *flags)[0] == plain
    assert any(isinstance(module, AwqLinear) for module in seen[0].modules()) is packed


def test_beside_a_gpu_a_draft_takes_nothing_of_its_memory(tmp_path):
    """It lies in the host's: layers were streamed that had room."""
    tiny_llama(2).save_pretrained(tmp_path)
    flags = ("DIR", "--draft", str(tmp_path), "--memory", "64MiB")
    left = [__main__.drafts(__main__.parser().parse_args([*flags, *more]))[1] for more in ((), DEVICE)]
    assert 0 < left[0] < left[1] == 64 << 20


def test_a_hub_id_that_was_fetched_stands_for_its_files(command, tmp_path, monkeypatch):
    """It had to be a directory, whatever lay in the hub's cache."""
    cache = tmp_path / "hub"
    place = cache / "models--some--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    snapshot = place / "snapshots" / ("a" * 40)
    write_checkpoint(_made(snapshot), tiny_llama(), 32)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    plain, _ = command()
    assert command(directory="some/model")[0] == plain
    assert (snapshot / "kvstored-streaming.bin").exists()


class Clock:
    """Goes on by what a read says, in whatever thread."""

    now = 0.0

    def monotonic(self):
        return self.now


def test_what_is_expected_is_not_of_reads_into_memory_that_was_never_touched(monkeypatch):
    """The command expected a twentieth of the tokens that it had."""
    clock = Clock()
    monkeypatch.setattr(scheduler, "time", clock)

    class Disk:
        filled = 0

        def fill(self, _layer, pieces, _slot):
            self.filled += 1
            clock.now += 10.0 if self.filled <= 2 else 0.5  # two slots

        def close(self):
            pass

    pieces = {number: (Piece(0, 1000, None),) for number in range(4)}
    made = scheduler.Scheduler(Disk(), pieces, 2, 1)
    with made.holding(0), made.holding(1):
        pass
    assert made.rate() <= 200
    assert made.probed_rate() >= 1000
    with made.holding(0) as slot:  # the next pass begins as ever
        assert slot.ready
    made.close()
    few = scheduler.Scheduler(Disk(), dict(list(pieces.items())[:1]), 2, 1)
    with few.holding(0):
        assert few.probed_rate() == few.rate()  # nothing else is to be read
    few.close()


@pytest.mark.parametrize(
    "said, words",
    [
        ({"memory": "2GiB"}, r"memory='2GiB'; it must be an integer in 0\.\."),
        ({"memory": -1}, "memory=-1; "),
        ({"n_staging_slots": 1}, r"n_staging_slots=1; it must be an integer in 2\.\.64"),
        ({"n_staging_slots": 65}, "n_staging_slots=65; "),
        ({"n_staging_slots": None}, "n_staging_slots=None; "),
        ({"keep_first_k": 1.5}, "keep_first_k=1.5; "),
        ({"keep_last_k": True}, "keep_last_k=True; "),
        ({"prefetch_layers_ahead": -1}, "prefetch_layers_ahead=-1; "),
        ({"room_tokens": 0}, r"room_tokens=0; it must be an integer in 1\.\."),
        ({"device": None}, "device=None; it must be one of cpu, cuda"),
        ({"device": torch.device("cpu")}, "device=device"),
        ({"residency": "some"}, "residency='some'; it must be one of auto, full_resident, partial_"),
    ],
)
def test_a_configuration_that_is_none_is_refused_with_the_value_and_the_limit(said, words):
    """Text for a memory ended in a TypeError about < of str and int."""
    with pytest.raises(InvalidArgument, match=words):
        StreamingConfig(**said)


def _made(home):
    home.mkdir(parents=True)
    return home
