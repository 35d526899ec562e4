"""A small model that guesses for a large one.

Owns the small model's cache, one a text, and how its guesses become a tree. Never sees the large model.
Invariant: how many children a node gets is decided before they are drawn, so that rejection sampling against
their shares is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import DynamicCache

from kvclient.checks import check_bounds
from kvclient.errors import InvalidArgument
from kvclient.hf.release import passing
from kvclient.hf.speculation.cache import cut, device_of, trees, unfit
from kvclient.hf.speculation.draft import Draft

BRANCHES = 8
SLACK = 256  # tokens that vocabularies of one family differ by, in padding


class DraftModel:
    """model: a causal model with the large one's tokens, in memory. branches: children of each node, at most;
    1 makes a chain. At each depth the likeliest nodes are followed, as far as the budget goes.
    """

    def __init__(self, model: torch.nn.Module, branches: int = 1) -> None:
        check_bounds("branches", branches, 1, BRANCHES)
        if reason := unfit(model, DynamicCache(config=model.config)):
            raise InvalidArgument(f"a {type(model).__name__} cannot draft: {reason}")
        if branches > 1 and not trees(model):
            raise InvalidArgument(f"a {type(model).__name__} with branches={branches}; it takes no tree")
        self._model, self._branches = model, branches

    def begin(self, vocabulary: int) -> _Text:
        """Raises InvalidArgument if its vocabulary is not the model's."""
        size = self._model.config.vocab_size
        if abs(size - vocabulary) > SLACK:
            raise InvalidArgument(f"the draft model has {size} tokens, the model {vocabulary}: not the same")
        return _Text(self._model, self._branches, min(size, vocabulary), vocabulary)


class _Text:
    def __init__(self, model: torch.nn.Module, branches: int, shared: int, vocabulary: int) -> None:
        self._model, self._branches = model, branches
        self._shared, self._vocabulary = shared, vocabulary
        self._cache = DynamicCache(config=model.config)
        self._held = 0  # tokens of the text whose keys and values are in it

    def draft(self, ids: Sequence[int], depth: int, nodes: int, sample: float | None) -> Draft:
        with torch.no_grad():
            tree = _Growth(self._branches, nodes, sample)
            tree.grow([0], self._certain(ids))
            rows = 0
            for _ in range(1, depth):
                front = tree.front()
                if not front or len(tree.tokens) >= nodes:
                    break
                rows += len(front)
                tree.grow(front, self._ahead(tree, front))
            for layer in self._cache.layers:
                cut(layer, rows)
        shares = {node: self._wide(q) for node, q in tree.shares.items()}
        return Draft(tuple(tree.tokens), tuple(tree.parents), shares)

    def _certain(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits [1, shared] behind what is certain."""
        same = min(self._held, len(ids) - 1)
        for layer in self._cache.layers:
            cut(layer, self._held - same)
        new = torch.tensor([list(ids[same:])], device=device_of(self._model))
        out = self._model(input_ids=new, use_cache=True, **passing(self._cache))
        self._held = len(ids)
        return out.logits[0, -1:, : self._shared]

    def _ahead(self, tree: _Growth, front: list[int]) -> torch.Tensor:
        """The logits behind those nodes, which the cache then holds."""
        past, device = self._held, device_of(self._model)
        inputs = {}
        if self._branches > 1:
            held = self._cache.get_seq_length() - past
            tree.columns.update((node, held + i) for i, node in enumerate(front))
            seen = torch.ones((len(front), past + held + len(front)), dtype=torch.bool)
            seen[:, past:] = False
            for row, node in enumerate(front):
                while node:
                    seen[row, past + tree.columns[node]] = True
                    node = tree.parents[node - 1]
            inputs["attention_mask"] = self._added(seen)[None, None].to(device)
            depth = past + tree.depth - 1
            inputs["position_ids"] = torch.full((1, len(front)), depth, device=device)
        ids = torch.tensor([[tree.tokens[node - 1] for node in front]], device=device)
        out = self._model(input_ids=ids, use_cache=True, **inputs, **passing(self._cache))
        return out.logits[0, :, : self._shared]

    def _added(self, seen: torch.Tensor) -> torch.Tensor:
        if self._model.config._attn_implementation != "eager":
            return seen
        least = torch.finfo(self._model.dtype).min
        return torch.zeros(seen.shape, dtype=self._model.dtype).masked_fill_(~seen, least)

    def _wide(self, q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(q, (0, self._vocabulary - len(q)))


class _Growth:
    """A tree as it grows, level by level. Greedy: the likeliest children; sampled: drawn, none twice."""

    def __init__(self, branches: int, nodes: int, sample: float | None) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.shares: dict[int, torch.Tensor] = {}
        self.columns: dict[int, int] = {}  # of nodes that the model has computed
        self.depth = 0
        self._branches, self._nodes, self._sample = branches, nodes, sample
        self._chances, self._last = [0.0], list[int]()  # log of the whole path; the newest level

    def front(self) -> list[int]:
        """Of the newest level those that get children."""
        room = max(1, (self._nodes - len(self.tokens)) // self._branches)
        likely = sorted(self._last, key=lambda node: -self._chances[node])
        return sorted(likely[: min(room, self._branches)])

    def grow(self, front: list[int], logits: torch.Tensor) -> None:
        self.depth += 1
        self._last = []
        scaled = logits.float() / (self._sample or 1.0)
        logs = scaled.log_softmax(-1)
        for node, log_shares in zip(front, logs, strict=True):
            count = min(self._branches, self._nodes - len(self.tokens), int((log_shares > -torch.inf).sum()))
            if count <= 0:
                return
            if self._sample is None:
                chosen = log_shares.topk(count).indices
            else:  # the largest of logs with Gumbel noise are drawn without replacement, in this order
                noise = -torch.empty_like(log_shares).exponential_().log()
                chosen = (log_shares + noise).topk(count).indices
                self.shares[node] = log_shares.exp().cpu()
            for token in chosen.tolist():
                self.tokens.append(token)
                self.parents.append(node)
                self._chances.append(self._chances[node] + float(log_shares[token]))
                self._last.append(len(self.tokens))
