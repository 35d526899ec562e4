"""Proves that drafts change how many passes an answer takes, and nothing else.

Method: the rules alone, with every outcome of chance enumerated on a tiny vocabulary; then a tiny llama,
plain, attached to a store and streamed, with drafts that are right, wrong, half right and trees, against
plain generate(): greedy and, where drafts are not drawn, sampled answers token by token, drawn ones by their
distribution; what the store holds afterwards; and whether it stops where it does not pay, on a false clock.
"""

from collections import Counter

import pytest
import torch
import transformers

import kvclient
import kvclient.hf
from kvclient.errors import InvalidArgument
from kvclient.hf.speculation import NOTHING, Draft, DraftModel, PromptLookup, Speculation, match, reject
from kvclient.hf.speculation.pace import CHECKED, REST, TRIAL, Pace
from kvclient.hf.streaming import StreamingCausalLM, StreamingConfig
from kvclient.hf.streaming.registry import streams_of
from tests.hf.awq_checkpoint import write_checkpoint

NEW = 24


def tiny(seed=3, vocab=64, layers=3, **more):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return tiny()


def prompts():
    repeats = torch.tensor([[5, 6, 7, 8, 9, 10] * 6])
    other = torch.randint(1, 64, (1, 41), generator=torch.Generator().manual_seed(1))
    return [repeats, other, other[:, :3]]


def plain(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **options})


class Told:
    """Drafts what it was told the answer is, changed by a pattern."""

    def __init__(self, answer, right=3, tree=False, vocabulary=64):
        self.answer, self.right, self.tree, self.vocabulary = answer, right, tree, vocabulary
        self.asked = 0

    def begin(self, vocabulary):
        assert vocabulary == self.vocabulary
        return self

    def draft(self, ids, depth, nodes, sample):
        self.asked += 1
        true = self.answer[len(ids) : len(ids) + depth]
        right = self.asked % (self.right + 1)  # how many of the first are
        tokens = [t if i < right else (t + 1) % self.vocabulary for i, t in enumerate(true)]
        if not self.tree:
            return Draft.chain(tokens)
        drafted, parents, node = [], [], 0
        for token in tokens:  # a wrong sibling before each
            drafted += [(token + 2) % self.vocabulary, token]
            parents += [node, node]
            node = len(drafted)
        return Draft(tuple(drafted[:nodes]), tuple(parents[:nodes]))


def drafters(model, answer):
    return {
        "lookup": None,
        "lookup tree": PromptLookup(run=3, least=1, branches=3),
        "itself": model,
        "another": DraftModel(tiny(4, layers=1)),
        "another's tree": DraftModel(tiny(4, layers=1), branches=3),
        "told": Told(answer),
        "told as a tree": Told(answer, tree=True),
        "never right": Told(answer, right=0),
    }


def test_greedy_answers_are_those_of_plain_decoding(model):
    for ids in prompts():
        want = plain(model, ids)
        for name, draft in drafters(model, want[0].tolist()).items():
            speculation = Speculation(draft)
            assert torch.equal(plain(model, ids, custom_generate=speculation), want), name
            last = speculation.last
            assert (last.tokens, last.off) == (NEW, None)
            if name in ("itself", "told", "told as a tree"):
                assert last.tokens_per_pass > 1.3 and last.accepted > 0, (name, last)
            if name == "itself":
                assert last.acceptance == 1


def test_the_whole_output_is_that_of_plain_decoding(model):
    """Scores, logits and the cache too, also where the text ends in the middle of what was accepted."""
    ids = prompts()[1]
    answer = plain(model, ids)[0].tolist()
    for end in (None, answer[len(ids[0]) + 7], answer[len(ids[0]) + 12]):
        options = {
            "return_dict_in_generate": True, "output_logits": True, "output_scores": True,
            "eos_token_id": end, "repetition_penalty": 1.1,
        }  # fmt: skip
        want = plain(model, ids, **options)
        got = plain(model, ids, custom_generate=Speculation(Told(want.sequences[0].tolist())), **options)
        assert torch.equal(got.sequences, want.sequences)
        assert len(got.logits) == len(want.logits)
        for found, wanted in zip(got.logits + got.scores, want.logits + want.scores, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for found, wanted in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            torch.testing.assert_close(found.keys, wanted.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.values, wanted.values, rtol=1e-4, atol=1e-4)


def test_what_is_not_drawn_by_the_draft_samples_the_same_tokens(model):
    """Plain decoding draws once for each token; so does match(): the same seed gives the same text."""
    for ids in prompts():
        for seed in range(3):
            options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95}
            torch.manual_seed(seed)
            want = plain(model, ids, **options)
            for draft in (None, PromptLookup(run=2, least=1, branches=4), Told(want[0].tolist())):
                torch.manual_seed(seed)
                assert torch.equal(plain(model, ids, custom_generate=Speculation(draft), **options), want)


def test_a_padded_row_and_a_batch(model):
    ids = torch.cat([torch.zeros((1, 5), dtype=torch.int64), prompts()[0]], 1)
    mask = (ids != 0).long()
    want = plain(model, ids, attention_mask=mask)
    for draft in (None, PromptLookup(run=2, least=1, branches=3), tiny(4, layers=1)):
        got = plain(model, ids, attention_mask=mask, custom_generate=Speculation(draft))
        assert torch.equal(got, want)
    two, speculation = prompts()[0].repeat(2, 1), Speculation()
    assert torch.equal(plain(model, two, custom_generate=speculation), plain(model, two))
    assert speculation.last.off == "rows"
    with pytest.raises(InvalidArgument, match="num_beams=2"):
        plain(model, two, num_beams=2, custom_generate=speculation)


def test_eager_attention_takes_trees():
    model = tiny(attn_implementation="eager")
    ids = prompts()[1]
    want = plain(model, ids)
    told = Told(want[0].tolist(), tree=True)
    assert torch.equal(plain(model, ids, custom_generate=Speculation(told)), want)


# ---------------------------------------------------------------- the rules alone


class Every:
    """Goes through every outcome of chance, each with its probability."""

    def __init__(self):
        self._path, self._at = [], 0

    def _take(self, chances):
        """Which of these outcomes it is this time."""
        if self._at == len(self._path):
            self._path.append([0, chances])
        self._at += 1
        self.weight *= chances[self._path[self._at - 1][0]]
        return self._path[self._at - 1][0]

    def happens(self, probability):
        return self._take([probability, 1 - probability]) == 0

    def draw(self, p):
        return self._take(p.tolist())

    def __iter__(self):
        while True:
            self._at, self.weight = 0, 1.0
            yield self
            while self._path and self._path[-1][0] + 1 == len(self._path[-1][1]):
                self._path.pop()
            if not self._path:
                return
            self._path[-1][0] += 1


def table(seed, vocabulary, depth):
    """Probabilities of the next token, for each text up to `depth`; some are 0."""
    numbers, found = torch.Generator().manual_seed(seed), {}

    def shares(text):
        if text not in found:
            weights = torch.rand(vocabulary, generator=numbers, dtype=torch.float64)
            weights[torch.rand(vocabulary, generator=numbers) < 0.2] = 0
            weights = weights if weights.sum() else torch.ones(vocabulary).double()
            found[text] = weights / weights.sum()
        return found[text]

    return shares


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_accepted_tokens_have_the_exact_distribution(branches, drawn):
    """Every draft that can be drawn, times everything that chance can do with it: the first two tokens' joint
    distribution is the model's own, to rounding.
    """
    vocabulary = 3 if branches > 1 else 4
    target, guess = table(1, vocabulary, 2), table(2, vocabulary, 2)
    found, whole = Counter(), 0.0
    for chance in Every():
        tokens, parents, shares, text = [], [], {}, {0: ()}
        for node in (0, 1):  # the first token, and what follows its first child
            if node and not tokens:
                continue
            left = guess(text[node]).clone()
            if drawn:
                shares[node] = left.clone()
            for count in range(branches):
                if not left.sum() > 0:
                    break
                token = chance.draw(left / left.sum()) if drawn else count
                left[token] = 0
                tokens.append(token)
                parents.append(node)
                text[len(tokens)] = (*text[node], token)
        draft = Draft(tuple(tokens), tuple(parents), shares)
        path = reject(draft, lambda node, before: target(tuple(before)), chance)
        said = list(path.tokens)
        while len(said) < 2:
            said.append(chance.draw(target(tuple(said))))
        found[tuple(said[:2])] += chance.weight
        whole += chance.weight
    assert whole == pytest.approx(1, abs=1e-9)
    for first in range(vocabulary):
        for second in range(vocabulary):
            want = float(target(())[first] * target((first,))[second])
            assert found[first, second] == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize(
    ("branches", "answers"),
    [(1, 300), *(pytest.param(branches, 1000, marks=pytest.mark.slow) for branches in (1, 2))],
)
def test_a_drawing_draft_model_keeps_the_distribution(branches, answers):
    """End to end, with a fixed seed: answers with drafts against the model's own probabilities. Above,
    without a model, exactly.
    """
    model, small = tiny(5, vocab=6, layers=1), tiny(6, vocab=6, layers=1)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        first = model(ids).logits[0, -1].softmax(-1)
        texts = torch.cat([ids.repeat(6, 1), torch.arange(6)[:, None]], 1)
        second = model(texts).logits[:, -1].softmax(-1)
        third = model(
            torch.cat([texts.repeat_interleave(6, 0), torch.arange(6).repeat(6)[:, None]], 1)
        ).logits[:, -1]
    want = (first[:, None] * second).flatten()[:, None] * third.softmax(-1)
    want = want.reshape(6, 6, 6).sum(0)  # of the second and third token, which drafts had a part in
    speculation = Speculation(DraftModel(small, branches=branches), depth=3, clock=lambda: 0.0)
    torch.manual_seed(11)
    counts, accepted = torch.zeros(6, 6), 0
    for _ in range(answers):
        out = model.generate(
            ids, max_new_tokens=4, do_sample=True, top_k=0, temperature=1.0, custom_generate=speculation
        )
        counts[out[0, 4], out[0, 5]] += 1
        accepted += speculation.last.accepted
    likely = want > 0.005  # the others are one cell
    told = torch.cat([counts[likely], counts[~likely].sum()[None]])
    meant = answers * torch.cat([want[likely], want[~likely].sum()[None]])
    chi = float(((told - meant) ** 2 / meant.clamp(min=1e-3)).sum())
    assert chi < 80 and accepted > 0.3 * answers, (branches, chi, accepted)  # of 36 cells: chance p < 0.0001


def test_a_draft_that_is_none_is_refused():
    with pytest.raises(InvalidArgument, match="parent 2 does not stand before"):
        Draft((1, 2), (0, 2))
    with pytest.raises(InvalidArgument, match="2 tokens with 1 parents"):
        Draft((1, 2), (0,))
    with pytest.raises(InvalidArgument, match="must be a model or have begin"):
        Speculation("lookup")
    with pytest.raises(InvalidArgument, match="1000 tokens, the model 64: not the same"):
        DraftModel(tiny(vocab=1000, layers=1)).begin(64)


def test_look_up_finds_the_latest_continuation_of_the_longest_run():
    text = PromptLookup(run=3, least=1, branches=2).begin(100)
    assert text.draft([1, 2, 3], 4, 8, None) is NOTHING
    found = text.draft([1, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], 3, 8, None)
    assert (found.tokens, found.parents) == ((5, 9, 1, 4, 1, 2), (0, 1, 2, 0, 4, 5))
    assert text.draft([1, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3, 7, 9], 2, 8, None).tokens == (1, 2)
    loop = PromptLookup().begin(100)
    assert loop.draft([7, 8, 7, 8], 5, 8, None).tokens == (7, 8, 7, 8, 7)


def test_match_asks_once_for_each_token_in_order():
    asked = []

    def choose(node, before):
        asked.append((node, tuple(before)))
        return [4, 6, 1][len(before)]

    path = match(Draft((3, 4, 5, 6), (0, 0, 2, 2)), choose)
    assert (path.nodes, path.tokens) == ((2, 4), (4, 6, 1))
    assert asked == [(0, ()), (2, (4,)), (4, (4, 6))]


# ---------------------------------------------------------------- the store, streams, and the pace


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["told", "told as a tree", "another's tree", "never right"])
def test_keys_and_values_of_rejected_tokens_never_reach_the_store(kind, in_place):
    """What the store holds of the whole text after drafts is what it holds after plain decoding."""
    model, ids, held = tiny(head_dim=32), prompts()[1], []
    want = plain(model, ids, max_new_tokens=60)
    for drafts in (False, True):
        with kvclient.InMemoryClient(32 << 20) as client:
            with kvclient.hf.attach(model, client, block_tokens=16, in_place=in_place) as kv:
                draft = drafters(model, want[0].tolist())[kind]
                options = {"custom_generate": Speculation(draft, clock=lambda: 0.0)} if drafts else {}
                got = plain(model, ids, max_new_tokens=60, **options)
                assert torch.equal(got, want) and kv.last.bypassed is None
                assert kv.last.published_blocks == 6
                again = plain(model, got, max_new_tokens=8)
                assert kv.last.reused_tokens == 96
                chain = kv.chunker.chain(kv.identity, want[0, :96].tolist())
                with client.get(chain) as blocks:
                    assert blocks.hits == 6
                    parts = [blocks[i].layer(n) for i in range(6) for n in range(3)]
                    held.append(torch.stack([torch.from_numpy(part.copy()) for part in parts]))
            assert torch.equal(again, plain(model, got, max_new_tokens=8))
    torch.testing.assert_close(held[1], held[0], rtol=1e-4, atol=1e-4)


def test_a_streamed_model_reads_its_layers_once_for_several_tokens(tmp_path):
    home = write_checkpoint(tmp_path, tiny(), 32)
    model = StreamingCausalLM.from_pretrained(home, StreamingConfig(residency="full_stream"))
    ids = prompts()[0]
    want = plain(model, ids)
    loads = streams_of(model).scheduler.loads
    speculation = Speculation(Told(want[0].tolist(), right=5), clock=lambda: 0.0)
    assert torch.equal(plain(model, ids, custom_generate=speculation), want)
    assert speculation.last.tokens_per_pass > 2
    assert streams_of(model).scheduler.loads - loads <= 3 * (speculation.last.passes + 2)
    streams_of(model).close()


def test_an_engine_says_what_drafts_brought(home, client):
    text = "one two three four " * 8
    with kvclient.hf.Engine.from_pretrained(home, client, self_test=False) as engine:
        want = engine.generate(text, 24)
        found = engine.generate(text, 24, speculation=Speculation())
    assert found.text == want.text and want.speculation is None
    assert found.speculation.tokens == 24 and found.report.reused_tokens > 0


def test_it_stops_where_it_does_not_pay():
    pace, plain_passes, asked = Pace(), 0, 0
    for _ in range(600):
        if pace.drafts():
            asked += 1
            pace.drafted(2.0, 1)  # never right, and twice as long
        else:
            plain_passes += 1
            pace.plain(1.0)
    assert asked <= 5 * TRIAL and plain_passes >= 600 - 5 * TRIAL
    pace = Pace()
    plain_passes = 0
    for _ in range(600):
        if pace.drafts():
            pace.drafted(1.5, 3)
        else:
            plain_passes += 1
            pace.plain(1.0)
    assert plain_passes <= 600 // CHECKED + 2
    assert pace.gain == pytest.approx(2)


def test_it_tries_again_after_a_rest():
    pace = Pace()
    pace.plain(1.0)
    for _ in range(TRIAL):
        assert pace.drafts()
        pace.drafted(3.0, 1)
    for _ in range(REST):
        assert pace.resting and not pace.drafts()
        pace.plain(1.0)
    assert pace.drafts()
