"""A model as the store sees it: under which identity, in which form, and what may be reused of it.

Owns one ServedModel per codec that a call has asked for. Never looks at the model: what is known of it comes
from kvclient.hf.attachment. Invariant: those of one ServedModels differ in nothing but the codec and what
follows from it, so what one codec stored another never finds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvclient.blocks.chunker import Chunker
from kvclient.blocks.codec import Kivi
from kvclient.blocks.identity import Dimensions, reuse_identity
from kvclient.errors import InvalidArgument, NotPermitted
from kvclient.hf.call import Report
from kvclient.hf.connector.block_format import BlockFormat
from kvclient.hf.connector.full_precision import FullPrecisionFormat, FullPrecisionFormats
from kvclient.hf.connector.layer_groups import StoredGroup
from kvclient.hf.connector.part import tail_tokens
from kvclient.hf.connector.snapshots import StoredStates
from kvclient.hf.model.structure import KVShape
from kvclient.hf.reuse.blend import NonPrefixReuse
from kvclient.hf.reuse.quality import calibration
from kvclient.hf.reuse.repair import Repair

if TYPE_CHECKING:
    from kvclient.hf.request.options import Options

AS_COMPUTED = "none"  # the codec of a call that wants none, where attach() was given one


@dataclass(frozen=True)
class ServedModel:
    """Valid until the model changes."""

    identity: bytes
    unsalted: bytes  # what calibration is kept under: the model's identity with this codec, whoever asks
    layout_id: int | None  # None: this client may only read
    form: BlockFormat  # how its K and V lie in blocks
    non_prefix: NonPrefixReuse | None = None  # None: only prefixes are reused
    known: Repair | None = None  # what its promise takes, where that is known without a calibration
    sinks: FullPrecisionFormats | None = None  # None: blocks hold what was computed
    groups: tuple[StoredGroup, ...] = ()  # layers that do not need all tokens, or are of another shape
    states: StoredStates | None = None
    layers: int = 0  # of the model's cache
    stepwise: bool = False  # behind a state the model takes one token at a time only
    most_tokens: int = 0  # of a call; 0: any
    positions: tuple[int, int] = (0, 0)  # kinds that are kept beside an indexer's keys, and in which layer
    rates: tuple[tuple[int, int], ...] = ()  # layers that compress tokens, and how many to an entry

    # Whether a prefix is of use only where other layers, or states, are found too.
    grouped: bool = field(init=False)
    # Whether what is left behind a text's last whole block can be stored and looked for, by a call that asks
    # for it; and whether that is done for every call.
    plain: bool = field(init=False)
    tails: bool = field(init=False)
    # What shorter blocks lie as, where that is not what whole ones do: behind quantised ones the last tokens
    # of a text are kept as computed, for they need not fill a codec's group (KIVI's residual).
    parts: FullPrecisionFormat | None = field(init=False)

    def __post_init__(self) -> None:
        grouped = bool(self.groups) or self.states is not None
        object.__setattr__(self, "grouped", grouped)
        coded = bool(self.groups) and self.form.codec is not None
        object.__setattr__(self, "plain", self.states is None and not coded)
        object.__setattr__(self, "tails", self.non_prefix is not None and not grouped)
        parts = None if self.sinks is None or self.tails else self.sinks.last
        object.__setattr__(self, "parts", parts)

    def tail_tokens(self, left: int, block_tokens: int) -> int:
        """How many of the tokens left behind whole blocks get a block of their own: with whole entries, where
        layers compress tokens."""
        step = (self.form if self.parts is None else self.parts.form).step
        return tail_tokens(left, math.lcm(step, *(rate for _, rate in self.rates)), block_tokens)

    def looks_for_tails(self, options: Options, device: torch.device) -> bool:
        """Of a call that asks for them. Not where it would cost reading in place: pages and GPUs cannot begin
        with a copy of a part, and of quantised blocks or windows a tail saves less than that."""
        held = options.in_place and (options.pool is not None or device.type != "cpu")
        dense = held and (self.groups or self.parts is not None)
        return self.tails or (self.plain and not dense)

    def beside(self, chunker: Chunker, ids: Sequence[int], partial: bool = False) -> list[Any]:
        """The chains of a text's blocks of groups and states, whichever of them are stored. partial: with
        the shorter one of the tokens left behind the last.
        """
        stored = [*self.groups, *([self.states] if self.states is not None else [])]
        chains = [chunker.chain(part.identity, list(ids), partial=partial) for part in stored]
        return [chain for chain in chains if len(chain)]

    def elsewhere(self, client: Any, tokens: int) -> ServedModel:
        """The same in another store, with blocks of so many tokens at most."""
        return dataclasses.replace(
            self,
            layout_id=client.register_layout(self.form.layout(tokens)),
            sinks=None if self.sinks is None else self.sinks.elsewhere(client),
            groups=tuple(group.elsewhere(client, tokens) for group in self.groups),
            states=None if self.states is None else self.states.elsewhere(client, tokens),
        )

    def calibrated(self, wanted: Repair | None) -> ServedModel:
        """With this repair, as it has to be with blocks of this codec. None: with the one that has passed
        with them; without one, for prefixes only."""
        if self.non_prefix is None:
            return self
        found = calibration.load(self.unsalted)
        repair = found.switched_on if wanted is None else found.cautious(wanted, self.known)
        non_prefix = None if repair is None else dataclasses.replace(self.non_prefix, repair=repair)
        return dataclasses.replace(self, non_prefix=non_prefix)

    def inside(self, report: Report) -> NonPrefixReuse | None:
        """How what stands inside a prompt is reused; None: not at all. The report says if that is for want of
        a calibration."""
        if self.non_prefix is not None and self.non_prefix.repair.uncalibrated:
            report.inside_bypassed = "uncalibrated"
            return None
        return self.non_prefix


def codec_of(codec: str | Kivi | None, chunker: Chunker) -> Kivi | None:
    """A codec by its name, if blocks that are cut so can be held in it. Raises InvalidArgument where groups
    would be cut.
    """
    codec = None if codec == AS_COMPUTED else codec
    if codec is not None and not isinstance(codec, Kivi):
        codec = Kivi.named(codec)
    if codec is not None and chunker.name != "fixed":
        cut = f"its groups of {codec.group} would be cut"
        raise InvalidArgument(f"chunker={chunker.name!r} with a codec: {cut}")
    return codec


class ServedModels:
    """The dimensions are those of the default codec, `form`'s."""

    def __init__(
        self, client: Any, kv: KVShape, form: BlockFormat, dimensions: Dimensions, block_tokens: int
    ) -> None:
        self._client, self._kv, self._form, self._block_tokens = client, kv, form, block_tokens
        self._dimensions = dimensions
        self._made: dict[Kivi | None, ServedModel] = {}

    def salted(self, salt: bytes) -> ServedModels:
        """The same under another salt."""
        dimensions = dataclasses.replace(self._dimensions, salt=salt)
        return ServedModels(self._client, self._kv, self._form, dimensions, self._block_tokens)

    @property
    def unsalted(self) -> bytes:
        """Of the default codec, as ServedModel has it."""
        return reuse_identity(dataclasses.replace(self._dimensions, salt=b""))

    def of(self, codec: Kivi | None, non_prefix: NonPrefixReuse | None) -> ServedModel:
        """Made at the first call that asks for it. There are no more than there are codecs."""
        made = self._made.get(codec)
        if made is None:
            made = self._made[codec] = self._make(codec)
        return dataclasses.replace(made, non_prefix=non_prefix)

    def _make(self, codec: Kivi | None) -> ServedModel:
        form = self._form.coded(codec)
        layout = form.layout(self._block_tokens)
        changed = {"codec": form.parameters, "layout": bytes(layout)}
        dimensions = dataclasses.replace(self._dimensions, **changed)
        try:
            layout_id = self._client.register_layout(layout)
        except NotPermitted:
            layout_id = None
        sinks = FullPrecisionFormats.of(self._client, form, dimensions, self._block_tokens)
        unsalted = reuse_identity(dataclasses.replace(dimensions, salt=b""))
        known = calibration.KNOWN.get(dimensions.weights_digest.hex()) if codec is None else None
        kv, of = self._kv, (self._client, dimensions, self._block_tokens)
        groups = tuple(
            StoredGroup.of(group, BlockFormat.group(group, kv.dtype, codec), *of) for group in kv.groups
        )
        states = StoredStates.of(kv.states, *of) if kv.states else None
        return ServedModel(
            reuse_identity(dimensions), unsalted, layout_id, form, known=known, sinks=sinks, groups=groups,
            states=states,
            layers=kv.layers, stepwise=kv.stepwise, most_tokens=kv.most_tokens,
            rates=kv.rates, positions=kv.positions,
        )  # fmt: skip
