"""What the tests of kvclient.hf share: an in-memory store, the example checkpoint, counts of fallbacks."""

import sys
from pathlib import Path

import pytest

import kvclient

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def proven(tmp_path_factory, pytestconfig):
    """What attach() proves of a model it proves once a run, for all processes of `pytest -n`."""
    run = tmp_path_factory.getbasetemp()
    proven = (run.parent if hasattr(pytestconfig, "workerinput") else run) / "proven"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCLIENT_VERDICTS_DIR", str(proven))
        yield


@pytest.fixture
def verdicts(tmp_path, monkeypatch):
    """A directory of the test's own; nothing is proven yet, there or in this process."""
    from kvclient.hf.proof import self_test

    monkeypatch.setattr(self_test, "_passed", {})
    monkeypatch.setenv("KVCLIENT_VERDICTS_DIR", str(tmp_path / "verdicts"))
    return tmp_path / "verdicts"


@pytest.fixture
def client():
    with kvclient.InMemoryClient(64 << 20) as client:
        yield client


@pytest.fixture
def left():
    """Why layers became dense, or calls went to torch, during the test."""
    from kvclient.hf import attention

    before = attention.fallbacks()

    def new() -> dict[str, int]:
        now = attention.fallbacks()
        return {reason: count for reason in now if (count := now[reason] - before.get(reason, 0))}

    return new


@pytest.fixture
def attach(model, client):
    """`attach(repair)`: the module's model, with the prompt of inside.py in the store."""
    import kvclient.hf  # most tests here have no model
    from tests.hf.inside import BLOCK, COMPUTED
    from tests.hf.zoo import generate

    attached = []

    def attach(repair, **options):
        kv = kvclient.hf.attach(model, client, block_tokens=BLOCK, repair=repair, self_test=False, **options)
        attached.append(kv)
        generate(model, COMPUTED)
        return kv

    yield attach
    for kv in attached:
        kv.detach()
    assert not any(module._forward_pre_hooks for module in model.modules())


def save_tiny(home: Path, **changed) -> Path:
    """A tiny random model with a tokenizer of bytes, as a user's would be. changed: of its configuration."""
    import transformers  # most tests here have no model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from tests.hf.zoo import build

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{byte: 3 + i for i, byte in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    fast.save_pretrained(home)
    build("llama", **changed).save_pretrained(home)
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model_dir() -> Path:
    """SmolLM2's checkpoint."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import model as example_model
    finally:
        sys.path.pop(0)
    return example_model.ensure()
