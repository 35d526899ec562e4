"""Proves what bench.serving says of a run: medians, dashes where nothing was measured, reasons; and prompts.

Method: made-up rounds through the table, the plot and a file of another run, and a tokenizer of words; no
server is started.
"""

import pytest

from bench.serving.loads import Prompts
from bench.serving.pieces import add, earlier
from bench.serving.plot import plot
from bench.serving.table import table


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
PSS = {"pss_mib": 9.0, "pool_mib": 1.0}
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
