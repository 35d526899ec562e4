"""The methods that attach() puts on a model instance: generate(), with the store or, for a reason that is
counted, without, and the steps inside it that begin a prompt.

Owns that decision, for which it reads generate()'s arguments, what stood in the methods' place, the count of
calls that run, how a request hears of every new token, and what is said of a store that failed. Never looks
anything up: that is the Request's. Never changes what generate() answers. Bound to the instance, so that a
deep copy of the model is bound to the copy, which is not attached; and named as what they stand for, because
pickle stores a bound method by its name. Invariants: without an attachment the methods are what the class
has; a call runs either wholly with what was found out about the model as it is now, or wholly without the
store; and detach() ends when none is left that began before it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache

from kvclient.errors import DeadlineExceeded
from kvclient.hf.attachment import assisted
from kvclient.hf.call import FAILURES, Report, begun
from kvclient.hf.model.watch import foreign_mode
from kvclient.hf.proof.attached import Attached
from kvclient.hf.release import NAMES
from kvclient.hf.request.batch.row_by_row import RowByRow
from kvclient.hf.request.continuation import Continuation, Opened
from kvclient.hf.request.request import Request
from kvclient.hf.speculation import Speculation

PLACE = "_kvstored"  # where a model keeps its Attachment: in itself, so that both can be collected together
DETACH_S = 600.0  # that detach() waits for calls of other threads
POSITIONAL = ("inputs", "generation_config", "logits_processor", "stopping_criteria")  # of generate()

log = logging.getLogger("kvclient.hf")


class Running:
    """The calls of one attachment that have begun and not ended, by thread."""

    def __init__(self) -> None:
        self._changed, self._threads = threading.Condition(), Counter[int]()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """While the body runs, a call of this thread is under way."""
        thread = threading.get_ident()
        with self._changed:
            self._threads[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._threads[thread] -= 1
                if not self._threads[thread]:
                    del self._threads[thread]
                self._changed.notify_all()

    def wait(self, timeout_s: float = DETACH_S) -> None:
        """Until no other thread runs a call. Raises DeadlineExceeded."""
        thread = threading.get_ident()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._threads.keys() - {thread}, timeout_s):
                still = len(self._threads.keys() - {thread})
                raise DeadlineExceeded(f"{still} threads still run generate() after {timeout_s} s")


class TokenSeen(StoppingCriteria):
    """Stops nothing: transformers calls it with every new token."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._none: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:
        self._request.token(input_ids)
        if self._none is None or self._none.shape[0] != input_ids.shape[0]:
            self._none = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self._none


def generate(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What model.generate() is while a store is attached: by way of it where it can have a part in the call;
    the model's own once it is not.
    """
    kv, plain = _attached(model, "generate")
    if kv is None:
        return plain(*args, **kwargs)
    with kv._running.call():
        started, local = time.perf_counter(), kv._local
        without = functools.partial(_run_without, kv, plain, args, kwargs, started)
        wanted = local.settings.read or local.settings.write
        if (reason := _none_of_ours(model, args, kwargs) if wanted else "bypass") is not None:
            return without(Report(bypassed=reason))
        try:
            cache = next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)
            made = _request(kv, model, started, cache)
        except FAILURES as error:
            if kv._model_state.options.raises:
                raise
            failed = Report(bypassed="unavailable", bypass_detail=f"{type(error).__name__}: {error}")
            failed.store_error, failed.store_failed_s = failed.bypass_detail, time.perf_counter() - started
            return without(failed)
        if isinstance(made, Report):
            return without(made)
        args, kwargs = _with_criterion(args, kwargs, TokenSeen(made))
        outer, local.request, trial = local.request, made, local.trial
        try:
            return plain(*args, **kwargs)
        finally:
            local.request = outer
            try:
                made.finish()
            finally:
                _note(kv, made.report, trial)


def _prefill(
    model: torch.nn.Module, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any],
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    attachment, prefill = _attached(model, "_prefill")

    local = attachment._local if attachment is not None else None
    request = local.request if local is not None else None

    def run(ids: torch.Tensor = input_ids) -> Any:
        if local is not None and local.begun is not None:
            local.begins()
        return prefill(ids, generation_config, model_kwargs, *args, **kwargs)

    if request is None:
        return run()
    return request.prefill(model, run, input_ids, generation_config, model_kwargs)


def _get_candidate_generator(model: torch.nn.Module, **kwargs: Any) -> Any:
    """What a loop of assisted decoding begins with."""
    attachment, candidate_generator = _attached(model, "_get_candidate_generator")
    request = attachment._local.request if attachment is not None else None
    asked = [kwargs.get(name) for name in ("input_ids", "generation_config", "model_kwargs")]
    states = attachment is not None and attachment._model_state.served.states  # recorded, to be cut back
    made = candidate_generator(**kwargs)
    looks = getattr(made, "requires_model_outputs", False)  # at all that the first pass says (MTP)
    if request is not None and not states and not looks and all(argument is not None for argument in asked):
        assert attachment is not None
        _, prefill = _attached(model, "_prefill")
        assisted.compute_ahead(request, prefill, attachment._local.begins, model, *asked)
    if attachment is not None:
        attachment._local.begins()  # where nothing was computed ahead: no prefill is to come
    return made


HOOKS = {
    "generate": generate, "_prefill": _prefill, "_get_candidate_generator": _get_candidate_generator,
}  # fmt: skip


def _attached(model: torch.nn.Module, name: str) -> tuple[Attached | None, Any]:
    """Who takes the model's calls, and what the model has of this name without them."""
    attachment = model.__dict__.get(PLACE)
    before = None if attachment is None else attachment._before[name]
    return attachment, before if before is not None else functools.partial(getattr(type(model), name), model)


def install(attachment: Attached, model: torch.nn.Module) -> None:
    """Puts HOOKS on the model; the attachment remembers what stood there."""
    for name, ours in HOOKS.items():
        if getattr(model.__dict__.get(name), "__func__", None) is ours:
            del model.__dict__[name]  # of the model that this one was copied from
    attachment._before = {name: model.__dict__.get(name) for name in HOOKS}
    for name, ours in HOOKS.items():
        model.__dict__[name] = types.MethodType(ours, model)
    model.__dict__[PLACE] = attachment


def put_back(attachment: Attached, model: torch.nn.Module, name: str) -> None:
    """What install() took away; a method that the model was given since stays."""
    if getattr(model.__dict__.get(name), "__func__", None) is HOOKS[name]:
        del model.__dict__[name]
        if attachment._before[name] is not None:
            model.__dict__[name] = attachment._before[name]


def chunked_reads(model: torch.nn.Module) -> bool:
    """Whether this release prefills in chunks on top of a filled cache."""
    # Releases whose _prefill knows of later iterations slice what a filled cache already holds, chunks
    # included.
    return "is_first_iteration" in inspect.signature(type(model)._prefill).parameters


def _none_of_ours(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why the store has no part in a call with these arguments; None: it has."""
    arguments = dict(zip(POSITIONAL, args, strict=False)) | kwargs
    caches = [arguments[name] for name in NAMES if arguments.get(name) is not None]
    if any(type(cache) is not DynamicCache for cache in caches):
        return "user_cache"
    custom = arguments.get("custom_generate")
    if custom is not None and not isinstance(custom, Speculation):  # which calls _prefill, and cuts first
        return "custom_generate"
    config = arguments.get("generation_config") or model.generation_config
    implementation = arguments.get("cache_implementation", getattr(config, "cache_implementation", None))
    return "cache_implementation" if implementation not in (None, "dynamic") else None


def _with_criterion(
    args: tuple[Any, ...], kwargs: dict[str, Any], criterion: StoppingCriteria
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    place = POSITIONAL.index("stopping_criteria")
    users = args[place] if len(args) > place else kwargs.get("stopping_criteria")
    criteria = StoppingCriteriaList([*(users or []), criterion])
    if len(args) > place:
        return (*args[:place], criteria, *args[place + 1 :]), kwargs
    return args, {**kwargs, "stopping_criteria": criteria}


def opened(kv: Attached, model: torch.nn.Module, input_ids: torch.Tensor, config: Any) -> Opened | None:
    """A prompt [1, tokens] with its prefix in a cache, as this thread's calls are served now, for a pass that
    is its caller's, who calls closed() after it. None: generate() is to be asked, which says why.
    """
    made = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(kv._running.call())
        try:
            made = _request(kv, model, time.perf_counter(), None, Opened)
            if not isinstance(made, Opened):
                return None
            made.ends_with(stack.pop_all().close)
            usable = made.begin(model, input_ids, config)
        except FAILURES:  # generate() says what it goes on without
            usable = False
    if not usable:
        if made is not None:
            made.finish()
        return None
    return made


def closed(kv: Attached, made: Opened) -> None:
    """Its pass has ended, well or not: what was claimed and not computed() is given back."""
    try:
        made.finish()
    finally:
        _note(kv, made.report)


def _request(
    kv: Attached, model: torch.nn.Module, started: float, cache: Any, kind: type[Request] = Request
) -> Request | Report:
    """What serves a call that begins now, with a cache or without; or, as a report, why the store has no part
    in it."""
    local, state = kv._local, kv._model_state
    if not kv._rest.over:
        return Report(bypassed="unavailable", bypass_detail="the store failed a moment ago")
    if (mode := foreign_mode()) is not None:
        return Report(bypassed="torch_mode", bypass_detail=mode)
    if not (state.current(model) if local.usable is None else local.usable):
        return Report(bypassed="refused", bypass_detail=state.refusal)
    watch = state.watch  # before the served model: of a later one it would know the change
    settings, trial = local.settings, local.trial
    served = state.of(settings.codec, settings.salt)
    if (random := watch.random()) is not None:
        return Report(bypassed="training", bypass_detail=random)
    options = state.options if settings is local.default else settings.over(state.options)
    called = (kv.client, served, options)
    client, served, options = called if trial is None else trial.on(served)
    made = Continuation if cache is not None and begun(cache) else kind
    if made is Request and (served.non_prefix is not None or served.states is not None):
        made = RowByRow
    # Entries, and positions beside an indexer's keys, are counted from a row's first column, padding or not.
    padded = kv.padded and not served.rates and not served.positions[0]
    request = made(
        client, served, options, memory=kv._memory, pace=kv._pace, returned=kv._returned,
        read=settings.read, write=settings.write, padded=padded, started=started,
        unchanged=lambda: not (watch.random() or watch.changed()),
    )  # fmt: skip
    if trial is None and options.in_place is None:
        request.report.dense = state.adopted.left
    return request


def _run_without(
    kv: Attached, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], started: float,
    report: Report,
) -> Any:  # fmt: skip
    outer, kv._local.request = kv._local.request, None
    try:
        return plain(*args, **kwargs)
    finally:
        kv._local.request = outer
        report.total_s = time.perf_counter() - started
        _note(kv, report)


def _note(kv: Attached, report: Report, trial: Any = None) -> None:
    if trial is not None:
        trial.report = report
        return
    kv.last = kv._local.last = report
    kv._totals.add(report)
    if report.inside_bypassed == "uncalibrated" and "inside" not in kv._warned:
        kv._warned.add("inside")
        _say_uncalibrated(getattr(kv.repair, "max_kl", None))
    if report.store_error is None:
        return
    kv._rest.begin(report.store_failed_s)
    log.warning("generate() went on without the store: %s", report.store_error)
    if "store" not in kv._warned:
        kv._warned.add("store")
        warnings.warn(
            f"generate() goes on without the store: {report.store_error} (said once; `last.store_error` and "
            'stats have each; attach(on_error="raise") raises instead)',
            stacklevel=4,
        )


def _say_uncalibrated(max_kl: float | None) -> None:
    said = (
        f"nothing is reused inside prompts: what keeps max_kl={max_kl} on this model was not measured; "
        f"calibrate(max_kl={max_kl}) does that, once per model and machine"
    )
    log.warning("%s", said)
    warnings.warn(f"{said} (said once; `last.inside_bypassed` and stats have each)", stacklevel=5)
