"""Goal: whoever was told that a block is stored is told once that it went, however many are watched."""

from kvclient.integrations.watched import LOOKED_FOR, Watched


def test_each_is_found_gone_once_and_no_question_is_long():
    keys = [number.to_bytes(32, "big") for number in range(3 * LOOKED_FOR + 5)]
    there, asked = set(keys), []
    watched = Watched()
    for key in keys:
        watched.add(key, key[-2:])

    def look(some):
        asked.append(len(some))
        return [key in there for key in some]

    assert watched.gone(look) == []
    lost = {keys[1], keys[LOOKED_FOR + 7], keys[-1]}
    there -= lost
    said = [name for _ in range(5) for name in watched.gone(look)]
    assert sorted(said) == sorted(key[-2:] for key in lost)
    assert max(asked) == LOOKED_FOR
    there.clear()
    said = [name for _ in range(5) for name in watched.gone(look)]
    assert len(said) == len(keys) - len(lost)
    assert watched.gone(look) == [] and len(asked) <= 11, "nothing is asked when nothing is watched"


def test_one_too_many_is_said_to_be_gone():
    watched = Watched(most=2)
    for name in ("a", "b", "a", "c"):  # "b" was looked for longest ago
        watched.add(name.encode(), name)
    assert watched.gone(lambda keys: [True] * len(keys)) == ["b"]
    assert watched.gone(lambda keys: [False] * len(keys)) == ["a", "c"]
