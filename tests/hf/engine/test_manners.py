"""Goal: what a user meets first says the right thing: no daemon, another library's names, a batch's rows, hit
rates, a model that cannot be served, a text in paragraphs.

Method: a tiny random model with a tokenizer of bytes, saved as a user's would be, and the in-memory store.
"""

import inspect

import pytest
import transformers

import kvclient
import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.engine import engine as engines
from kvclient.hf.engine import renamed

TEXT = "\n\n".join(f"Paragraph {n} says that it is short, and no more than that, {7 * n}." for n in range(6))


@pytest.fixture(scope="module")
def loaded(home):
    model = transformers.AutoModelForCausalLM.from_pretrained(home).eval()
    return model, transformers.AutoTokenizer.from_pretrained(home)


def engine_of(loaded, client, **options):
    return kvclient.hf.Engine(*loaded, client, block_tokens=16, self_test=False, **options)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", renamed.OPTIONS)
def test_an_option_of_kvboost_says_its_name_here_before_anything_is_loaded(name, monkeypatch):
    monkeypatch.setattr(engines, "load", None)
    with pytest.raises(InvalidArgument, match=f"{name}=: here it is "):
        kvclient.hf.Engine.from_pretrained("no/such/model", **{name: 1})
    with pytest.raises(InvalidArgument, match=f"{name}=: here it is "):
        kvclient.hf.Engine(None, None, None, **{name: 1})
    for call in (kvclient.hf.Engine.generate, kvclient.hf.Engine.generate_batch, kvclient.hf.Engine.warm):
        with pytest.raises(InvalidArgument, match=f"{name}=: here it is "):
            call(None, "Hello", **{name: 1})
        with pytest.raises(TypeError, match="no option blocktokens="):
            call(None, "Hello", blocktokens=1)
    with pytest.raises(TypeError, match="no option blocktokens="):
        kvclient.hf.Engine.from_pretrained("no/such/model", blocktokens=1)


def test_fields_and_methods_say_theirs(loaded, client):
    with engine_of(loaded, client) as engine:
        result = engine.generate("Hello", 2)
        for answer, names in ((result, renamed.RESULTS), (engine.warm("Hello"), renamed.WARMED)):
            for name, here in names.items():
                with pytest.raises(AttributeError, match=f"{name}.*here it is"):
                    getattr(answer, name)
                assert hasattr(answer, here.split(",")[0].split(".")[0])
        for name, here in renamed.METHODS.items():
            with pytest.raises(AttributeError, match=f"{name}.*here it is"):
                getattr(engine, name)
            last = here.removesuffix("()").split(".")[-1]
            owners = (engine, engine.kv, kvclient.hf, kvclient.hf.Result)
            assert any(hasattr(owner, last) for owner in owners), here
        with pytest.raises(AttributeError, match=r"Engine has no 'nothing'$"):
            engine.nothing  # noqa: B018
    takers = [kvclient.hf.attach, kvclient.hf.Engine.__init__, kvclient.hf.Engine.generate]
    takers += [kvclient.hf.Engine.warm, kvclient.hf.Engine.from_pretrained]
    known = {name for taker in takers for name in inspect.signature(taker).parameters}
    for here in renamed.OPTIONS.values():
        names = [word.strip("(),`'").split("=")[0].split("(")[-1] for word in here.split() if "=" in word]
        fields = {*known, *kvclient.hf.Repair.__dataclass_fields__}
        assert all(name in fields for name in names), here


# ---------------------------------------------------------------- the store


def test_no_daemon_is_said(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORED_DIR", str(tmp_path))
    with pytest.warns(UserWarning, match=r"no kvstored daemon answers in .*kvstored serve.*memory") as said:
        engine = kvclient.hf.Engine(*loaded, block_tokens=16, self_test=False)
    assert said[0].filename == __file__
    with engine:
        assert engine.generate("Hello", 2).tokens
        with pytest.raises(InvalidArgument, match="kvstored flush"):
            engine.reset()
    assert not engine.kv.client.attached
    with pytest.raises(InvalidArgument, match="memory_bytes= without"):
        kvclient.hf.Engine(*loaded, memory_bytes=1 << 20)


def test_a_daemon_is_found_and_nothing_is_said(loaded, daemon, monkeypatch, recwarn):
    server = daemon(memory="64MiB")
    monkeypatch.setenv("KVSTORED_DIR", str(server.dir))
    with kvclient.hf.Engine(*loaded, block_tokens=16, self_test=False) as engine:
        engine.generate(TEXT, 1)
        assert engine.generate(TEXT, 1).report.reused_tokens > 300
    assert not [warning for warning in recwarn if "daemon" in str(warning.message)]


# ---------------------------------------------------------------- figures


def test_a_row_of_a_batch_has_a_report_of_its_own(loaded, client):
    with engine_of(loaded, client) as engine:
        engine.generate(TEXT, 1)
        long, short = engine.generate_batch([TEXT + " One.", TEXT[:150]], 2)
        count = len(engine.encode(TEXT + " One."))
        assert (long.report.prompt_tokens, short.report.prompt_tokens) == (count, 150)
        assert long.report.reused_tokens + short.report.reused_tokens == engine.kv.last.reused_tokens
        assert long.report.reused_by_tier["shm"] == long.report.reused_tokens
        assert [row.prompt_tokens for row in engine.kv.last.rows] == [count, 150]
        assert long.reuse_ratio == long.report.reused_tokens / count
        assert engine.kv.last.prompt_tokens == count + 150


def test_hit_rates(loaded, client):
    with engine_of(loaded, client) as engine:
        assert (engine.stats()["hit_rate"], engine.stats()["token_hit_rate"]) == (0, 0)
        engine.generate(TEXT, 1)
        result = engine.generate(TEXT, 1)
        found = engine.stats()
        assert found["hit_rate"] == 0.5
        assert found["token_hit_rate"] == result.report.reused_tokens / (2 * result.prompt_tokens)


# ---------------------------------------------------------------- refusals, paragraphs


def test_an_assertion_of_the_models_own_is_a_refusal(client):
    sizes = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_encoder_layers": 2, "num_decoder_layers": 2}
    heads = {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}
    config = transformers.ProphetNetConfig(
        vocab_size=320, hidden_size=48, **sizes, **heads, is_decoder=True, add_cross_attention=False
    )
    model = transformers.ProphetNetForCausalLM(config).eval()
    with pytest.raises(kvclient.hf.Refused, match="ProphetNetForCausalLM"):
        kvclient.hf.attach(model, client)
    assert "generate" not in model.__dict__


@pytest.mark.parametrize("chunker", ["fixed", "sentence", "paragraph", "document"])
def test_a_text_that_was_warmed_is_found_whole_as_a_prefix(loaded, client, chunker):
    with engine_of(loaded, client, chunker=chunker) as engine:
        count = engine.warm(TEXT).tokens
        found = engine.generate(TEXT + " And now?", 1).report.reused_tokens
        assert found > count - 40, "nothing but the end behind the last whole block is computed"
