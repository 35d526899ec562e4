"""What an attachment knows about its model: structure, reuse identity, and how blocks hold its KV.

Owns that knowledge and finds it out anew when the model, or the namespace's salt, has changed. Never runs the
model. Invariant: an examination counts whole or not at all; a model that is refused stays refused, with the
reason, until it changes again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections import OrderedDict
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvclient.blocks.codec import Kivi
from kvclient.blocks.identity import salted, without_denied
from kvclient.errors import InvalidArgument
from kvclient.hf.attachment.kernel_install import Adopted
from kvclient.hf.attention.handle import forget_pending
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.model.identity import plain, read_dimensions
from kvclient.hf.model.states import goes_on
from kvclient.hf.model.structure import DTYPE_NAMES, KVShape, Refused, check_structure
from kvclient.hf.model.watch import Watch
from kvclient.hf.request.request import Options
from kvclient.hf.request.served_model import ServedModel, ServedModels
from kvclient.hf.reuse.blend import NonPrefixReuse
from kvclient.hf.reuse.eligibility import examine_non_prefix
from kvclient.hf.reuse.quality import calibration
from kvclient.hf.reuse.quality.calibration import Findings
from kvclient.hf.reuse.repair import Repair

MOST_SALTS = 1024  # of calls, kept ready
MOST_KINDS = 16  # of the model, as adapters that are switched make them
CALIBRATED = "calibrated"  # approximate reuse is off until it was measured on this model


class ModelState:
    """wanted: the repair that attach() was told, or CALIBRATED. options: as it was told, with where blocks
    are read as this model allows it.
    """

    def __init__(
        self, model: torch.nn.Module, client: Any, options: Options, salt: bytes,
        weights_digest: bytes | None, wanted: Repair | str | None, codec: Kivi | None, adopted: Adopted,
    ) -> None:  # fmt: skip
        self.options, self.adopted, self.codec = options, adopted, codec
        self._client, self._salt, self._weights_digest = client, salt, weights_digest
        self._wanted, self._lock = wanted, threading.Lock()
        self.refusal: str | None = None
        self._salted: tuple[ServedModels | None, OrderedDict[bytes, ServedModels]] = (None, OrderedDict())
        self._kinds: OrderedDict[str, None] = OrderedDict()  # what was accepted, but for its weights
        self.examine(model, Watch(model))

    def examine(self, model: torch.nn.Module, watch: Watch) -> None:
        """Tries one anew of which more than the weights has changed. Raises Refused, and knows what it knew
        before."""
        kv = check_structure(model)
        if self._declined(model, kv):
            watch = Watch(model)  # of the attention that it has again, with which it runs before settle()
            check_structure(model)
        watch.settle()
        kind = self._kind_of(model, watch)
        if self._kinds and kind not in self._kinds:
            self._try(model, kv)
        in_place = self.adopted.in_place(model)
        pool = self.adopted.pool(kv, model.device) if in_place else None
        form, namespace_salt = BlockFormat.main(kv, self.codec), self._client.salt or b""
        most = self.options.chunker.most
        dimensions = read_dimensions(
            model, watch.attributes, bytes(form.layout(most)), (kv.layers, kv.heads), DTYPE_NAMES[kv.dtype],
            salted(namespace_salt, self._salt), self._weights_digest, form.parameters,
        )  # fmt: skip
        served_models = ServedModels(self._client, kv, form, dimensions, most)
        repair = self._asked
        if self._wanted == CALIBRATED:
            repair = calibration.load(served_models.unsalted).switched_on
        non_prefix = examine_non_prefix(model, kv, repair) if repair is not None else None
        served = served_models.of(self.codec, non_prefix).calibrated(repair)
        # All at once and last: whatever was raised until here, the next call examines again.
        self.options = dataclasses.replace(self.options, in_place=in_place, pool=pool)
        self.kv, self._namespace_salt = kv, namespace_salt
        self.served_models, self.served = served_models, served
        self.watch, self.refusal = watch, None
        self._kinds[kind] = None
        if len(self._kinds) > MOST_KINDS:
            self._kinds.popitem(last=False)

    @property
    def _asked(self) -> Repair | None:
        """The repair that attach() was told."""
        return self._wanted if isinstance(self._wanted, Repair) else None

    def _declined(self, model: torch.nn.Module, kv: KVShape) -> bool:
        """Whether the model lost the kernels because of what it caches. Raises InvalidArgument for options
        that it cannot have."""
        if kv.states and self.options.chunker.name != "fixed":
            cut = f"chunker={self.options.chunker.name!r}"
            raise InvalidArgument(f"{cut} with recurrent layers, whose states take blocks of one size")
        if kv.stride > 1 and (self.options.chunker.name != "fixed" or self.options.chunker.most % kv.stride):
            cut = f"chunker={self.options.chunker.name!r} with blocks of {self.options.chunker.most} tokens"
            raise InvalidArgument(f"{cut}: of this model they have to be multiples of {kv.stride} tokens")
        if kv.states:
            why = "has recurrent layers, served beside a dense cache only"
            return self.adopted.decline(model, "states", why)
        why = "caches what its attention does not attend to as it is"
        return (kv.latent or kv.beside) and self.adopted.decline(model, "latent", why)

    def renew(self, model: torch.nn.Module) -> None:
        """Examines a changed model. A refusal is remembered until it changes again, and raised."""
        with self._lock:
            self._renew(model)

    def _renew(self, model: torch.nn.Module) -> None:
        self._weights_digest = None  # one that was given stands for the weights of then
        watch = Watch(model)
        try:
            self.examine(model, watch)
        except InvalidArgument as refused:
            self.watch, self.refusal = watch, str(refused)
            raise

    def _try(self, model: torch.nn.Module, kv: KVShape) -> None:
        """Raises Refused where what the model keeps of tokens hangs on those behind them, by now."""
        if kv.rates or kv.states:  # it keeps entries of several tokens; or check_structure() has tried
            return
        found = ALL_ATTENTION_FUNCTIONS.get(chosen := str(model.config._attn_implementation))
        ours = getattr(getattr(found, "func", None), "__module__", "").startswith("kvclient.")
        if chosen.startswith("kvclient_") and not ours:
            return  # exchanged beside our masks, with which it is wrong: the call ends with that error
        name = f"{type(model).__name__} was changed, and"
        forget_pending()
        try:
            right = goes_on(model)
        except (MemoryError, torch.OutOfMemoryError):
            raise  # says nothing about the model
        except Exception as error:  # whatever the model's own code raises
            raise Refused(f"{name} does not run as it is now: {error!r:.200}") from error
        if not right:
            raise Refused(f"{name} its KV depends on what follows it now")

    @staticmethod
    def _kind_of(model: torch.nn.Module, watch: Watch) -> str:
        config = plain(without_denied(model.config.to_dict()))
        attention = model.config._attn_implementation
        said = repr([config, attention, watch.attributes.code(), watch.attributes.numbers()])
        return hashlib.sha256(said.encode()).hexdigest()

    def current(self, model: torch.nn.Module) -> bool:
        """Looks whether the model was changed. False: into one that is refused."""
        with self._lock:
            if self.watch.changed():
                try:
                    self._renew(model)
                except InvalidArgument:
                    pass  # the refusal says why
                except (MemoryError, torch.OutOfMemoryError):
                    return False  # this call goes without; the next one examines again
        return self.refusal is None

    def of(self, codec: Kivi | None, salt: bytes = b"") -> ServedModel:
        """The model as the store sees it with this codec, for calls under this salt."""
        with self._lock:
            self._follow_salt()
            if codec == self.codec and not salt:
                return self.served
            served_models = self._salted_subjects(salt) if salt else self.served_models
            found = served_models.of(codec, self.served.non_prefix)
            return found if codec == self.codec else found.calibrated(self._asked)

    def _salted_subjects(self, salt: bytes) -> ServedModels:
        """Those of the salts asked for last; they go with the served models they were made of."""
        of, made = self._salted
        if of is not self.served_models:
            self._salted = of, made = self.served_models, OrderedDict()
        if salt not in made:
            made[salt] = self.served_models.salted(salted(salted(self._namespace_salt, self._salt), salt))
            if len(made) > MOST_SALTS:
                made.popitem(last=False)
        made.move_to_end(salt)
        return made[salt]

    def _follow_salt(self) -> None:
        """A daemon attached to since then may have said the namespace's salt first, or another one."""
        if (now := self._client.salt) is None or now == self._namespace_salt:
            return
        models = self.served_models.salted(salted(now, self._salt))
        served = models.of(self.codec, self.served.non_prefix)  # asks the store, which may fail
        self._namespace_salt, self.served_models, self.served = now, models, served

    @property
    def told_promise(self) -> float | None:
        """Nats: what attach() was told to promise, or a calibration since; None: nothing."""
        asked = self._asked
        return asked.promised if asked is not None and asked.promises else None

    @property
    def rules(self) -> Repair:
        """What a promise is kept by: as attach() was told, if that was "auto"."""
        asked = self._asked
        return asked if asked is not None and asked.method == "auto" else Repair()

    def calibrated(
        self, measured: NonPrefixReuse, found: Findings, passed: bool, max_kl: float | None
    ) -> None:
        """Takes what is found of the model by now. measured: how it reuses inside prompts at all. passed:
        whether the last calibration did, and so is what is wanted from now on; max_kl: what it promised. Who
        was told to promise something goes on promising, whatever others find."""
        with self._lock:
            asked = self._asked
            if passed and asked is not None and asked.promises and max_kl is not None:
                self._wanted = asked = dataclasses.replace(asked, max_kl=max_kl)
            elif passed:
                self._wanted = CALIBRATED  # changed weights have another identity: off until they have passed
                asked = None
            if asked is None and self._wanted != CALIBRATED:
                return  # nothing but prefixes was asked for
            repair = found.switched_on if asked is None else found.cautious(asked, self.served.known)
            non_prefix = None if repair is None else dataclasses.replace(measured, repair=repair)
            self.served = dataclasses.replace(self.served, non_prefix=non_prefix)
