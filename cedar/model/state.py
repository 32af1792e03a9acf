"""What attention remembers, as layers see it.

Two holders fulfil the protocol: `packs.PackState` (whole sequences, differentiable) and
`sequence.SequenceStep` (one sequence's real cache bytes). Layers cannot tell them apart.

T rows, H heads, C latent channels, I index channels, R rotated pairs, E entries, K selected entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from cedar.config.rounding import Rounding

# where the decoder runs during prefill (serving.md 1.2)
DecoderReplay = Literal["bounded", "exact20", "exact", "off"]
# `random` is a control: every index source takes random visible entries, inside no pool
SelectionRule = Literal["learned", "random"]


class SharedKV(NamedTuple):
    """What one layer leaves for the next, overwritten by each index source in layer order.

    Its parts belong to the state that made them; layers only pass them on.
    """

    selection: Tensor | None = None
    pool: Tensor | None = None

    def rows(self, kept: slice | Tensor) -> SharedKV:
        """The same for some of the rows, where rows are the leading axis (`SequenceStep`)."""
        return SharedKV(*(part if part is None else part[kept] for part in self))


class AttentionState(Protocol):
    """Where keys live and how rows reach them."""

    rounding: Rounding

    @property
    def positions_T(self) -> Tensor:
        """Position of each current row in its sequence, int64."""

    def rotation(self, *, compressed: bool) -> tuple[Tensor, Tensor]:
        """(cos, sin) at `positions_T`."""

    def write_window(self, layer: int, kv_TC: Tensor) -> None:
        """Keep the current rows' window keys; rounding is the state's work."""

    def complete_groups(self, layer: int, content_TC: Tensor, gate_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs completed by the current rows: (content [E, 2, C], gate [E, 2, C], first position [E])."""

    def write_entries(self, layer: int, main_EC: Tensor, key_EI: Tensor) -> None:
        """Keep new entries of a KV source, in order; rounding is the state's work."""

    def select(
        self, layer: int, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        """The entries each row attends to from this index source on, inside `pool` if one is given."""

    def attend(self, layer: int, kv_source: int | None, query_THC: Tensor, shared: SharedKV, sink_H: Tensor) -> Tensor:
        """Attention of the current rows over their window and selection: [T, H, C]."""


@dataclass(slots=True)
class IndexGroup:
    """One index source and the mass that its layers' attention gave the entries: the indexer loss reads it.

    Attributes:
        layer: The index source.
        scores_TK: float32 scores of the student, -inf outside the support.
        mass_TK: float32, detached: probabilities of the joint softmax summed over heads and served layers.
    """

    layer: int
    scores_TK: Tensor
    mass_TK: Tensor


@dataclass(slots=True)
class RouterStats:
    """One layer's routing: scores without bias [T, E] and the chosen ids [T, K]."""

    layer: int
    scores_TE: Tensor
    ids_TK: Tensor
