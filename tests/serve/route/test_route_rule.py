"""Proves the router's rule: the holder of the longest beginning is asked, and no server drowns for it.

Method: the pure parts, with random loads and prompts (Hypothesis), against the rule said another way.
"""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvclient.serve.route.balance import LEAST_PIECES, Load, choose
from kvclient.serve.route.prefixes import PIECE_BYTES, Prefixes, pieces_of


def chat(*texts, **more):
    roles = ("system", "user", "assistant")
    return {"messages": [{"role": roles[i % 3], "content": t} for i, t in enumerate(texts)], **more}


def test_a_conversation_begins_with_the_pieces_of_its_earlier_turns():
    first = pieces_of(chat("s" * 700, "q" * 300), "")
    then = pieces_of(chat("s" * 700, "q" * 300, "a" * 300, model=None), "")
    assert len(first) == 1000 // PIECE_BYTES and then[: len(first)] == first and len(then) > len(first)
    assert pieces_of(chat("s" * 700, "Q" * 300), "")[:2] == first[:2]
    assert pieces_of({"prompt": ["x" * 600, "y"]}, "") == pieces_of({"prompt": "x" * 600}, "") != []
    assert len(pieces_of({"prompt": list(range(500))}, "")) > 2


def test_who_shares_no_kv_shares_no_piece():
    body = chat("s" * 700, "q" * 300)
    pieces = [pieces_of(body, who)[0] for who in ("", "Bearer a", "Bearer b")]
    pieces += [pieces_of({**body, **more}, "")[0] for more in ({"model": "m"}, {"cache": {"salt": "x"}})]
    assert len(set(pieces)) == len(pieces)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.sampled_from("ab")), max_size=40))
def test_what_was_noted_is_matched_without_gaps_and_in_bounds(noted):
    table, texts = Prefixes(most=12), [f"{i}" * 3000 for i in range(4)]
    kept: list[tuple[bytes, str]] = []
    for text, length, store in noted:
        pieces = pieces_of({"prompt": texts[text]}, "")[:length]
        table.note(pieces, store)
        kept += [(piece, store) for piece in pieces]
        assert len(table) <= 12
        assert table.matched(pieces)[store] == len(pieces)
    for text in texts:
        for store, count in table.matched(pieces_of({"prompt": text}, "")).items():
            assert all((piece, store) in kept for piece in pieces_of({"prompt": text}, "")[:count])
    table.forget("a")
    table.forget("b")
    assert len(table) == 0


def test_of_what_has_no_room_a_prompts_first_pieces_are_forgotten_last():
    table = Prefixes(most=6)
    first, then = (pieces_of({"prompt": text * 3000}, "")[:4] for text in "ab")
    table.note(first, "a")
    table.note(then, "a")
    assert (table.matched(first)["a"], table.matched(then)["a"]) == (2, 4)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=6),
    st.lists(st.integers(0, 10), min_size=6, max_size=6), st.integers(0, 6),
)  # fmt: skip
def test_the_holder_is_asked_unless_it_has_too_much_to_do(loads, held, imbalance):
    servers = [Load(str(i), str(i), *load) for i, load in enumerate(loads)]
    matched = Counter({str(i): held[i] for i in range(len(servers))})
    chosen = choose(servers, matched, imbalance)
    fewest = min(server.under_way for server in servers)
    assert chosen.under_way <= fewest + imbalance
    for other in servers:
        if other.under_way <= fewest + imbalance and matched[other.store] >= LEAST_PIECES:
            assert matched[chosen.store] >= matched[other.store]
    assert choose([], matched, imbalance) is None
