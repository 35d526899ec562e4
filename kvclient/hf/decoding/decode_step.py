"""One token a row through a model, recorded once and replayed: on a GPU a CUDA graph, no Python between
kernels.

Owns static inputs and the recording. Invariant: the step computes what the model's own forward computes for
the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvclient.hf.attention.handle import stepping
from kvclient.hf.cache.static import Steps
from kvclient.hf.release import CACHE, passing

WARM_UPS = 2  # runs before a capture, in which libraries set themselves up


class Step:
    """One token a row through the model, with the same tensors every time."""

    def __init__(self, model: torch.nn.Module, cache: Any, steps: Steps, rows: int) -> None:
        self._model, self._cache, self._steps = model, cache, steps
        self._ids = torch.zeros((rows, 1), dtype=torch.int64, device=steps.column.device)
        self._places = torch.zeros_like(self._ids)
        self._replay: Callable[[], None] | None = None
        self._out: Any = None

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of the model is the step that was recorded."""
        ids = kwargs.get("input_ids")
        wanted = kwargs.get("output_attentions") or kwargs.get("output_hidden_states")
        return (
            not args
            and not wanted
            and ids is not None
            and ids.shape == self._ids.shape
            and kwargs.get(CACHE) is self._cache
            and not self._steps.over
            and self._steps.length < self._steps.capacity
            and not torch.is_grad_enabled()
        )

    def __call__(self, ids: torch.Tensor) -> Any:
        steps = self._steps
        self._ids.copy_(ids)
        steps.column.fill_(steps.length)
        torch.sub(steps.column, steps.pads, out=self._places)
        if self._replay is None:
            steps.start(steps.length)
            self._replay, self._out = recorder(self._ids.device)(self._run)
        self._replay()
        steps.length += 1
        return type(self._out)(logits=self._out.logits.clone(), **passing(self._cache))

    def _run(self) -> Any:
        """May run any number of times for one token: it writes the same to the same places."""
        with stepping():
            return type(self._model).forward(
                self._model, input_ids=self._ids, position_ids=self._places, use_cache=True,
                return_dict=True, **passing(self._cache),
            )  # fmt: skip


def recorder(device: torch.device) -> Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]:
    """What makes a replay, and the output it fills, of a function."""
    return record_cuda if device.type == "cuda" else record_nothing


def record_cuda(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Runs `run` until it is warm and captures it: what replays it, and its result, filled anew by each
    replay.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


def record_nothing(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Where there are no graphs: runs again, into the same output."""
    out = run()

    def replay() -> None:
        out.logits.copy_(run().logits)

    return replay, out
