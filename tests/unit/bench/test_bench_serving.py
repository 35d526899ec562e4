"""Proves what bench.serving says of a run: medians, dashes where nothing was measured, reasons; and prompts.

Method: made-up rounds through the table, the plot and a file of another run, and a tokenizer of words;
installers that only say that they ran, and pip where all that is wanted is there. No server is started.
"""

import os
import subprocess

import numpy as np
import pytest

from bench.serving import installed
from bench.serving.gguf_file import dequantised
from bench.serving.loads import Prompts
from bench.serving.pieces import add, earlier
from bench.serving.plot import plot
from bench.serving.table import table
from tests.conftest import ROOT


def test_the_table_has_medians_dashes_and_reasons():
    long = {"cold": {"ttft_s": 4.0, "cpu_s": 3.0}, "warm": {"ttft_s": 0.2, "itl_s": 0.08}}
    rounds = [
        {"contender": "ours", "round": n, "a": {**long, "warm_over_cold": 0.04 + n / 100}, "start_s": 5.0}
        for n in range(3)
    ]
    rounds.append({"contender": "vllm", "round": 0, "not_there": "vLLM is not installed: make engines"})
    told = table({"rounds": rounds, "own": {"split": {"cpu_ratio": 1.04321}}})
    assert "| a warm / cold | 0.050 | – |" in told and "| start s | 5.0 | – |" in told
    assert "b tokens/s" not in told, "a load that nobody ran"
    assert "vllm, round 0: vLLM is not installed" in told and "split: {'cpu_ratio': 1.043}" in told


@pytest.mark.parametrize("tokens", [1, 32, 1024])
def test_prompts_have_their_length_and_each_seed_its_own(tokens):
    prompts = Prompts(lambda text: len(text.split()))
    first, again, other = (prompts.of(tokens, seed) for seed in (1, 1, 2))
    assert first == again and len(first.split()) == tokens
    assert tokens == 1 or first != other


LONG = {"cold": {"ttft_s": 4.0}, "warm": {"ttft_s": 0.2}}
PSS = {"pss_mib": 9.0, "pss_at_rest_mib": 8.0, "pool_mib": 1.0}
TINY = {str(n): {"ttft_p50_s": 0.1 * n} for n in (1, 8, 32)}


def test_pieces_of_a_run_are_put_together_and_none_is_lost():
    rounds = []
    for row in (
        {"contender": "ours", "start_s": 5.0, "a": LONG, **PSS},
        {"contender": "vllm", "not_there": "not installed"},
        {"contender": "ours", "start_s": 7.0, "b": {"ttft_p99_s": 6.0}, **PSS, "pss_mib": 12.0},
        {"contender": "ours", "start_s": 6.0, "a": LONG, **PSS},
        {"contender": "vllm", "start_s": 90.0, "a": LONG, **PSS},
    ):
        add(rounds, row)
    assert [(row["contender"], row["round"]) for row in rounds] == [
        ("ours", 0), ("vllm", 0), ("ours", 1), ("vllm", 1)
    ]  # fmt: skip
    assert rounds[0]["b"] and (rounds[0]["start_s"], rounds[0]["pss_mib"]) == (5.0, 12.0)
    before = {"model": "m", "rounds": rounds, "own": {"disk": {}}, "machine": {"model": "old"}}
    now = {"model": "m", "rounds": [], "own": {}, "machine": {"model": "new"}}
    assert earlier(before, now) == {**before, "machine": now["machine"]}
    with pytest.raises(SystemExit, match="of m, this run of other"):
        earlier(before, {**now, "model": "other"})


def test_the_plot_is_drawn_whatever_is_there(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    rounds = [{"contender": "ours", "a": LONG, "d": TINY}, {"contender": "hf", "b": {"ttft_p99_s": 50.0}},
              {"contender": "vllm", "not_there": "not installed"}]  # fmt: skip
    told = plot({"rounds": rounds, "model": "m", "machine": {"model": "a CPU"}}, tmp_path / "x.png")
    assert told.endswith("x.png") and (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_a_gguf_file_in_fp32_has_the_same_weights_and_words(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the example model's file: make model installs gguf")
    packed = gguf.quantize(
        np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64), gguf.GGMLQuantizationType.Q4_1
    )
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(["a", "é", "ü"])
    writer.add_token_types([1, 1, 3])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", np.arange(4, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    dequantised(tmp_path / "small.gguf", tmp_path / "wide.gguf")
    both = [gguf.GGUFReader(tmp_path / name) for name in ("small.gguf", "wide.gguf")]
    words = [{name: field.contents() for name, field in file.fields.items()} for file in both]
    changed = {name for name in words[0] | words[1] if words[0].get(name) != words[1].get(name)}
    assert changed == {"general.file_type"}
    assert words[1]["tokenizer.ggml.tokens"] == ["a", "é", "ü"]
    small, wide = ({tensor.name: tensor for tensor in file.tensors} for file in both)
    for name, tensor in wide.items():
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        wanted = gguf.dequantize(small[name].data, small[name].tensor_type)
        assert np.array_equal(tensor.data, wanted) and list(tensor.shape) == list(small[name].shape)


def test_vllm_is_installed_when_it_is_first_asked_for_and_once(monkeypatch, tmp_path):
    program, ran = tmp_path / "engines", tmp_path / "ran"
    program.write_text(f'#!/bin/sh\necho "$@ $PYTHON" >> {ran}\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(installed, "ENGINES", tmp_path)
    monkeypatch.setattr(installed, "ENGINES_PROGRAM", program)
    with pytest.raises(installed.NotThere, match=r"vLLM cannot be installed: .* ended with 3"):
        installed.vllm()
    made = f"mkdir {tmp_path}/vllm && touch {tmp_path}/vllm/.complete"
    program.write_text(f'#!/bin/sh\necho "$@" >> {ran}\n{made}\n')
    assert installed.vllm() == installed.vllm() == tmp_path / "vllm"
    first, second = ran.read_text().splitlines()
    assert second == "vllm" and first.startswith("vllm ") and os.access(first.split()[1], os.X_OK)


def test_the_program_of_engines_installs_vllm_alone_where_that_is_asked(tmp_path):
    home = tmp_path / "kvstored" / "engines"
    (home / "vllm").mkdir(parents=True)
    (home / "vllm" / ".complete").touch()
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHON": "/bin/false"}
    subprocess.run([ROOT / ".ci" / "engines", "vllm"], check=True, env=env)
    assert os.listdir(home) == ["vllm"]


def test_hf_serve_gets_what_it_wants_beside_this_environment(monkeypatch, tmp_path):
    """The packages of here are seen, and none is installed again."""
    for name in ("accelerate", "openai", "uvicorn", "fastapi", "rich", "torch"):
        pytest.importorskip(name, reason="make model: what `transformers[serving]` wants")
    monkeypatch.setattr(installed, "BESIDE", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    python, program = installed.hf()
    asked = "from transformers.utils.import_utils import is_serve_available as there; assert there()"
    subprocess.run([python, "-c", asked], check=True)
    assert os.access(program, os.X_OK) and python.startswith(str(tmp_path))
    assert installed.hf() == [python, program]
