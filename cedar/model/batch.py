"""The next rows of several sequences in one step: linear layers see them all, attention sees each its own.

T rows of all sequences, C latent channels, I index channels, H heads, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cedar.kernels import attention as attention_ops
from cedar.model.sequence import SequenceStep
from cedar.model.state import SharedKV


class BatchStep:
    """Steps of different sequences, one after the other; fulfils `AttentionState`.

    All their rows run every layer, so the steps are those of decoding.
    """

    def __init__(self, steps: Sequence[SequenceStep]) -> None:
        self.steps = steps
        self.rounding = steps[0].rounding
        self._sizes = [step.stop - step.start for step in steps]
        self._positions_T = torch.cat([step.positions_T for step in steps])
        self._rotations: dict[bool, tuple[Tensor, Tensor]] = {}
        # entries that each sequence completes, by KV source of pairs
        self._completed: dict[int, list[int]] = {}
        self._shared = [SharedKV()] * len(steps)

    @property
    def positions_T(self) -> Tensor:
        return self._positions_T

    def rotation(self, *, compressed: bool) -> tuple[Tensor, Tensor]:
        if compressed not in self._rotations:
            self._rotations[compressed] = self.steps[0].state.rope(self._positions_T, compressed=compressed)
        return self._rotations[compressed]

    def write_window(self, layer: int, kv_TC: Tensor) -> None:
        for step, part_TC in zip(self.steps, kv_TC.split(self._sizes), strict=True):
            step.write_window(layer, part_TC)

    def complete_groups(self, layer: int, content_TC: Tensor, gate_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = [
            step.complete_groups(layer, content, gate)
            for step, content, gate in zip(
                self.steps, content_TC.split(self._sizes), gate_TC.split(self._sizes), strict=True
            )
        ]
        self._completed[layer] = [part[0].shape[0] for part in parts]
        content_ERC, gate_ERC, first_E = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return content_ERC, gate_ERC, first_E

    def write_entries(self, layer: int, main_EC: Tensor, key_EI: Tensor) -> None:
        sizes = self._completed.get(layer, self._sizes)
        for step, main, key in zip(self.steps, main_EC.split(sizes), key_EI.split(sizes), strict=True):
            step.write_entries(layer, main, key)

    def select(
        self, layer: int, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        # pools differ in width from sequence to sequence, so they stay here
        self._shared = [
            step.select(layer, kv_source, query, weight, pool=shared.pool, make_pool=make_pool)
            for step, query, weight, shared in zip(
                self.steps, query_THI.split(self._sizes), weight_TH.split(self._sizes), self._shared, strict=True
            )
        ]
        return SharedKV()

    def attend(self, layer: int, kv_source: int | None, query_THC: Tensor, shared: SharedKV, sink_H: Tensor) -> Tensor:
        keys = [step.attended(layer, kv_source, own) for step, own in zip(self.steps, self._shared, strict=True)]
        window_TWC, visible_TW = torch.cat([key[0] for key in keys]), torch.cat([key[1] for key in keys])
        entries = [key[2] for key in keys if key[2] is not None]
        present = [key[3] for key in keys if key[3] is not None]
        entry_TKC = torch.cat(entries) if entries else None
        present_TK = torch.cat(present) if present else None
        return attention_ops.attention(query_THC, window_TWC, visible_TW, entry_TKC, present_TK, sink_H)
