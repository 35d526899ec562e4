"""Proves that whatever becomes of a request, a streamed model's slots come back and the next answer is right.

Method: a tiny packed llama whose layers are read from the disk, beside the same model in memory: batches with
padding on the left, pages and quantised blocks of a store, answers that are cancelled or whose listener
raises in the middle; and what the command is told wrongly, which it says before it loads a model.
"""

import re

import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf import Repair, awq
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig, __main__
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import tiny_llama, write_checkpoint
from tests.hf.inside import AUTO

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def letters(text, **_):
    """A token each."""
    return transformers.BatchEncoding({"input_ids": torch.ones(1, len(text), dtype=torch.int64)})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("awq")
    write_checkpoint(home, tiny_llama(4), 32)
    streamed = StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_stream"))
    yield streamed, StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_resident"))
    streams_of(streamed).close()


def padded():
    """Three rows of 4, 9 and 12 tokens."""
    ids, mask = torch.zeros((3, 12), dtype=torch.long), torch.zeros((3, 12), dtype=torch.long)
    for row, length in enumerate((4, 9, 12)):
        ids[row, -length:] = torch.arange(1, length + 1) * (row + 2)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def all_back(model):
    streams = streams_of(model)
    assert all(slot.users == 0 for slot in streams.scheduler.slots) and not any(streams._users.values())
    assert all(value.is_meta for value in model.model.layers.state_dict().values())


def test_rows_padded_on_the_left_say_what_they_say_in_memory(models):
    streamed, resident = models
    assert torch.equal(streamed.generate(**padded(), **OPTIONS), resident.generate(**padded(), **OPTIONS))
    all_back(streamed)


@pytest.mark.parametrize("how", [{"paged": True, "paged_tokens": 256}, {"codec": "int8"}, {"codec": "int4"}])
def test_pages_and_quantised_blocks_say_what_they_say_in_memory(models, how):
    """With a store each: the second answer starts from what the first one published."""
    ids, said = torch.arange(1, 100)[None] % 128, []
    for model in models:
        client = kvclient.InMemoryClient(64 << 20)
        with kvclient.hf.attach(model, client, block_tokens=32, self_test=False, **how) as attachment:
            said += [model.generate(ids, **OPTIONS) for _ in range(2)]
            assert attachment.last.reused_tokens == 96
    assert torch.equal(said[0], said[2]) and torch.equal(said[1], said[3])
    all_back(models[0])


@pytest.mark.parametrize("repair", [Repair("none"), Repair("cacheblend"), Repair("attention"), AUTO])
def test_what_is_reused_inside_of_a_prompt_is_repaired_as_in_memory(models, repair):
    """A repair asks a layer for K and V before it is computed: within the call that has its weights."""
    document, said = torch.arange(1, 101)[None] * 7 % 128, []
    prompts = [torch.cat([torch.arange(n)[None] % 128, document, document[:, :9]], dim=1) for n in (5, 40)]
    for model in models:
        client = kvclient.InMemoryClient(64 << 20)
        with kvclient.hf.attach(model, client, block_tokens=16, self_test=False, repair=repair) as attachment:
            said += [model.generate(ids, **OPTIONS) for ids in prompts]
            assert attachment.last.approximate_tokens >= 80 and not attachment.last.exact
    assert torch.equal(said[0], said[2]) and torch.equal(said[1], said[3])
    all_back(models[0])


@pytest.mark.parametrize("how", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", range(3))
def test_an_answer_that_is_cancelled_gives_everything_back(models, how, after):
    """Between two tokens, or inside of a layer: what Ctrl-C does."""
    streamed, resident = models
    prompt, calls = torch.arange(1, 12)[None], []

    def stops():
        calls.append(1)
        if len(calls) > after:
            raise how("cancelled")

    def listens(_ids, _scores, **_):
        stops()
        return torch.zeros(1, dtype=torch.bool)

    def before(_module, _args):
        stops()

    with pytest.raises(how, match="cancelled"):
        streamed.generate(prompt, stopping_criteria=[listens], **OPTIONS)
    all_back(streamed)
    handle = streamed.model.layers[2].mlp.register_forward_pre_hook(before)
    for _ in range(4):  # more often than there are slots
        calls.clear()
        with pytest.raises(how, match="cancelled"):
            streamed.generate(prompt, **OPTIONS)
    handle.remove()
    if how is RuntimeError:  # behind Ctrl-C torch calls no hook: the next pass gives back
        all_back(streamed)
    assert torch.equal(streamed.generate(prompt, **OPTIONS), resident.generate(prompt, **OPTIONS))
    all_back(streamed)


@pytest.mark.parametrize("which", [0, 1])
def test_a_prompts_last_row_meets_the_head_where_it_lies(models, which):
    """torch copies the whole matrix for rows with a stride: of 7B shapes 1 GiB, 3 s for each prompt."""
    model = models[which]
    with torch.inference_mode(), torch.profiler.profile(record_shapes=True) as profile:
        model(torch.arange(1, 12)[None], logits_to_keep=1)
    whole = model.config.vocab_size * model.config.hidden_size
    copied = [event for event in profile.events() if event.name in ("aten::copy_", "aten::bmm")]
    sizes = [torch.Size(shape).numel() for event in copied for shape in event.input_shapes]
    assert sizes and max(sizes) < whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_in_sixteen_bits_every_residency_has_the_same_bits(tmp_path, dtype, rows):
    """The head among them: whole, and in pieces, which few rows meet by a product of its own."""
    write_checkpoint(tmp_path, tiny_llama(2).to(dtype), 32)
    wanted, ids = awq.from_pretrained(tmp_path), torch.arange(1, 12)[None].repeat(2, 1)
    parts = {"full_resident": {}, "full_stream": {}, "auto": {"memory": 1 << 30}}
    for residency, more in parts.items():
        config = StreamingConfig(residency=residency, **more)
        model = StreamingCausalLM.from_pretrained(tmp_path, config)
        with torch.inference_mode():
            for kept in (0, rows):
                found, want = (
                    each(ids[: 1 + (rows > 8)], logits_to_keep=kept).logits for each in (model, wanted)
                )
                assert torch.equal(found, want), (residency, kept)
        assert torch.equal(model.generate(ids, **OPTIONS), wanted.generate(ids, **OPTIONS))
        streams_of(model).close()


@pytest.mark.parametrize(
    "told, said",
    [
        (["--memory", "inf"], "'inf' is no number of bytes"),
        (["--memory", "2GB"], "'2GB' is no number of bytes"),
        (["--memory", "1MiB"], "memory=1048576; .*268435456 to work with"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: at least 1"),
        (["--draft", "nosuch"], "--draft nosuch: neither"),
        (["--trace", "/nosuch/trace.json"], "--trace /nosuch/trace.json: /nosuch is no directory"),
        (["--trace", "/"], "--trace /: a directory"),
        (["--prompt", ""], "--prompt '' has no tokens; at least 1"),
    ],
)
def test_what_the_command_is_told_wrongly_is_said_before_it_loads(
    tmp_path, monkeypatch, capsys, told, said
):
    """An infinite memory, no tokens and a trace nowhere ended in tracebacks, or after everything else."""
    home = write_checkpoint(tmp_path, tiny_llama(1), 32)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: letters)
    before = sorted(path.name for path in home.iterdir())
    monkeypatch.setattr("sys.argv", ["it", str(home), *told])
    try:
        assert __main__.main() == 1
    except SystemExit as ended:  # argparse's
        assert ended.code == 2
    assert re.search(said, capsys.readouterr().err)
    assert sorted(path.name for path in home.iterdir()) == before


def test_a_prompt_beyond_the_commands_memory_is_said_before_it_is_computed(tmp_path, monkeypatch, capsys):
    home, ran = write_checkpoint(tmp_path, tiny_llama(1), 32), []

    def generate(_model, input_ids=None, max_new_tokens=None, **options):
        ran.append(options.get("prefill_chunk_size"))
        raise InvalidArgument("as far as this test goes")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: letters)
    monkeypatch.setattr(transformers.GenerationMixin, "generate", generate)
    for tokens in (300_000, 100_000, 2000, 20):
        monkeypatch.setattr("sys.argv", ["it", str(home), "--memory", "260MiB", "--prompt", "x" * tokens])
        assert __main__.main() == 1
        said = "memory=272629760; the longest prompt that fits has" if tokens > 100_000 else "as far as this"
        assert said in capsys.readouterr().err
    assert ran == [128, None, None]
    monkeypatch.setattr("sys.argv", ["it", str(home), "--prompt", "x"])
    monkeypatch.setattr(__main__.Admission, "longest", lambda *_, **__: 0)  # what was free is not any more
    assert __main__.main() == 1
    assert "note: one token may take" in capsys.readouterr().err and ran[3:] == [None]


def test_a_draft_models_weights_are_part_of_the_commands_memory(tmp_path, monkeypatch, capsys):
    """They came on top of it."""
    home, draft = write_checkpoint(tmp_path, tiny_llama(1), 32), tmp_path / "draft"
    small = tiny_llama(1)
    small.save_pretrained(draft)
    held, seen = sum(tensor.nbytes for tensor in [*small.parameters(), *small.buffers()]), []

    def loaded(_home, config, **_):
        seen.append(config.memory)
        raise InvalidArgument("as far as this test goes")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: letters)
    monkeypatch.setattr(StreamingCausalLM, "from_pretrained", loaded)
    for more, memory in (([], 300 << 20), (["--draft", str(draft)], 300 << 20), (["--draft", str(draft)], 9)):
        monkeypatch.setattr("sys.argv", ["it", str(home), "--memory", str(memory), *more])
        assert __main__.main() == 1
    assert seen == [300 << 20, (300 << 20) - held]
    assert f"holds {held} bytes, --memory is 9" in capsys.readouterr().err
    monkeypatch.setattr(__main__, "free_memory", lambda: 280 << 20)  # a limit of 300 MiB, and an interpreter
    monkeypatch.setattr("sys.argv", ["it", str(home), "--memory", "300MiB"])
    assert __main__.main() == 1 and seen[2:] == [280 << 20]
    assert f"of which {280 << 20} are free" in capsys.readouterr().err


def test_ctrl_c_ends_the_command_without_a_traceback(monkeypatch, capsys):
    def run(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "run", run)
    monkeypatch.setattr("sys.argv", ["it", "nowhere"])
    assert __main__.main() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_hub_id_and_a_model_of_another_kind(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["it", "some/model"])
    assert __main__.main() == 1
    assert "no hub is asked here: `hf download some/model" in capsys.readouterr().err
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(InvalidArgument, match="model_type='t5' is no causal language model"):
        StreamingCausalLM.from_pretrained(tmp_path)
