"""Proves what bench.serving says of a run: medians, dashes where nothing was measured, reasons; and prompts.

Method: made-up rounds through the table, and a tokenizer of words; no server is started.
"""

import pytest

from bench.serving.loads import Prompts
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
