"""The next rows of several sequences in one step: linear layers see them all, attention sees each its own.

T rows of all sequences, D hidden, C latent channels, I index channels, H heads, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cedar.kernels import attention as attention_ops
from cedar.model.sequence import Kept, SequenceState, SequenceStep
from cedar.model.state import SharedKV

# sequences with at most so many rows attend together: the window keys of more are a view that must not be copied
_FEW_ROWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The next rows of one sequence in a step.

    Attributes:
        ids_T: Token ids, int64.
        prompt_tokens: Where the prompt ends that they belong to, counted from the sequence's start; None for
            tokens that were generated or drafted, whose rows run all layers and all give logits.
        silent: No logits are wanted: generated tokens that are known already run again.
        image_rows_TD: Embeddings for image tokens, zeros elsewhere.
    """

    state: SequenceState
    ids_T: Tensor
    prompt_tokens: int | None = None
    silent: bool = False
    image_rows_TD: Tensor | None = None


class BatchStep:
    """Steps of different sequences, one after the other; fulfils `AttentionState`."""

    def __init__(self, steps: Sequence[SequenceStep], shared: Sequence[SharedKV] | None = None) -> None:
        self.steps = steps
        self.rounding = steps[0].rounding
        self._sizes = [step.num_rows for step in steps]
        self._positions_T = torch.cat([step.positions_T for step in steps])
        self._rotations: dict[bool, tuple[Tensor, Tensor]] = {}
        # entries that each sequence completes, by KV source of pairs
        self._completed: dict[int, list[int]] = {}
        self._shared = [SharedKV()] * len(steps) if shared is None else list(shared)
        # rows that run every layer and write everything need no question a layer
        self._whole = all(step.is_whole for step in steps)

    @property
    def num_rows(self) -> int:
        return sum(self._sizes)

    def entry_rows(self) -> tuple[Kept, BatchStep | None]:
        """As `SequenceStep.entry_rows`, of all sequences."""
        return (None, self) if self._whole else self._only([step.entry_rows() for step in self.steps])

    def window_rows(self, layer: int, *, cut: bool) -> tuple[Kept, BatchStep | None]:
        """As `SequenceStep.window_rows`, of all sequences."""
        if self._whole:
            return None, self if cut else None
        return self._only([step.window_rows(layer, cut=cut) for step in self.steps])

    def layer_rows(self, layer: int) -> tuple[Kept, BatchStep | None]:
        """As `SequenceStep.layer_rows`, of all sequences."""
        return (None, self) if self._whole else self._only([step.layer_rows(layer) for step in self.steps])

    def _only(self, parts: list[tuple[slice | None, SequenceStep | None]]) -> tuple[Kept, BatchStep | None]:
        if all(part is step for (_, part), step in zip(parts, self.steps, strict=True)):
            return None, self
        steps, shared, rows, first = [], [], [], 0
        for (kept, part), size, own in zip(parts, self._sizes, self._shared, strict=True):
            if part is not None:
                steps.append(part)
                shared.append(own if kept is None else own.rows(kept))
                start = first if kept is None else first + kept.start
                rows.append(torch.arange(start, first + size, device=self._positions_T.device))
            first += size
        return (torch.cat(rows), BatchStep(steps, shared)) if steps else (slice(0, 0), None)

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

    def write_context(self, rows_TC: Tensor) -> None:
        for step, part_TC in zip(self.steps, rows_TC.split(self._sizes), strict=True):
            step.write_context(part_TC)

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
        queries = query_THC.split(self._sizes)
        if self.steps[0].in_place:
            rows = zip(self.steps, queries, self._shared, strict=True)
            return torch.cat([step.attend(layer, kv_source, query, own, sink_H) for step, query, own in rows])
        outputs: list[Tensor] = [query_THC] * len(queries)
        few = [number for number, size in enumerate(self._sizes) if size <= _FEW_ROWS]
        for group in ([few] if few else []) + [[n] for n, size in enumerate(self._sizes) if size > _FEW_ROWS]:
            keys = [self.steps[n].attended(layer, kv_source, self._shared[n]) for n in group]
            joined = keys[0] if len(group) == 1 else [_joined([key[column] for key in keys]) for column in range(4)]
            window_TWC, visible_TW, entry_TKC, present_TK = joined
            assert window_TWC is not None and visible_TW is not None
            query = queries[group[0]] if len(group) == 1 else torch.cat([queries[n] for n in group])
            output = attention_ops.attention(query, window_TWC, visible_TW, entry_TKC, present_TK, sink_H)
            if len(group) == len(queries):
                return output
            for n, part in zip(group, output.split([self._sizes[n] for n in group]), strict=True):
                outputs[n] = part
        return torch.cat(outputs)


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
