"""max_kl against the truth, on real text that nothing was tuned to.

The texts are bench.quality's reporting half, the cases lie behind those that docs/reuse.md reports.
"""

from statistics import mean

import pytest

from bench.quality.cases import KINDS, draw
from bench.quality.measure import Subject
from bench.quality.texts import HALVES, found, half_of
from tests.conftest import ROOT

FIRST = 1000  # the number of the first case
MAX_KL = 5e-3


@pytest.fixture(scope="module")
def texts():
    try:
        return found("reporting")
    except SystemExit as lacking:
        pytest.skip(str(lacking))


@pytest.fixture(scope="module")
def subject():
    import sys

    sys.path[:0] = [str(ROOT / "examples")]
    return Subject("float32", MAX_KL)


def test_a_hard_case_is_repaired_until_it_is_near_enough(subject, texts):
    case = draw("alone", FIRST, texts, subject.encode, short=True)
    rows = []
    for row in subject.rows(case):
        rows.append(row)
        break  # one question
    (row,) = rows
    assert row["found"] >= 250 and row["estimated"] <= MAX_KL
    assert row["kl"] <= 2 * MAX_KL


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_kept_and_hardly_a_prompt_is_twice_as_far(subject, texts, kind):
    rows = [
        row
        for number in range(FIRST, FIRST + 4)
        for row in subject.rows(draw(kind, number, texts, subject.encode, short=True))
    ]
    assert mean(row["kl"] for row in rows) <= MAX_KL
    assert sum(row["kl"] > 2 * MAX_KL for row in rows) <= 1


def test_the_halves_have_no_text_in_common(texts):
    names = {text.name for text in texts}
    assert len(names) == len(texts) and all(half_of(name) == "reporting" for name in names)
    assert names.isdisjoint(text.name for text in found("tuning"))
    assert set(HALVES) == {"tuning", "reporting"}


def test_a_case_is_the_same_whenever_it_is_drawn(texts):
    encode = lambda text: list(text.encode())  # noqa: E731
    case, again = (draw("swapped", 7, texts, encode) for _ in range(2))
    assert case == again != draw("swapped", 8, texts, encode)
    assert case.stored != case.ids and len(case.questions) == 3
