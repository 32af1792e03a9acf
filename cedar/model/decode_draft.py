"""A draft's pass with every shape fixed: what a graph can hold, beside `cedar.model.decode`.

A anchors, G tokens a round, T = A * G rows, C latent channels, V vocabulary, R Markov rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cedar.formats.spec import FP8
from cedar.kernels.mhc import expand
from cedar.kernels.sampling import RowParams, draw_drafts
from cedar.model.decode import DecodeLayer, DecodeSlots, DecodeStep
from cedar.model.draft import Draft


class Drafted(NamedTuple):
    """One round: tokens [A, G] and their confidence logits [A, G], and what others can be drawn from.

    `base_AGV` are logits without the Markov part, `hidden_AGD` the collapsed streams (`cedar.model.draft.Proposal`),
    `prob_AGV` what the tokens were drawn from, if they were.
    """

    ids_AG: Tensor
    confidence_AG: Tensor
    base_AGV: Tensor
    hidden_AGD: Tensor
    prob_AGV: Tensor | None = None


class SlotDraft:
    """A draft over slots: its context lies in the rings of `DecodeSlots`, where its own block joins it for the round.

    The places of the block are those that the tokens to come will take: a ring has room for the window and a block.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft, target = draft, draft.target
        self._spec = FP8 if target.rounding.activations else None
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [DecodeLayer(block) for block in draft.mtp]

    def __call__(
        self,
        slots: DecodeSlots,
        slot_A: Tensor,
        position_A: Tensor,
        anchor_A: Tensor,
        params: Sequence[RowParams] = (),
    ) -> Drafted:
        """The round behind each anchor, the newest token of a slot, which the target has not run.

        Args:
            params: How the tokens of each place are drawn; the likeliest are taken by default.
        """
        draft, target = self.draft, self.draft.target
        config = draft.config.draft
        num_tokens = config.block_size
        ids_AG = anchor_A.new_full((anchor_A.shape[0], num_tokens), config.noise_token_id)
        ids_AG[:, 0] = anchor_A
        position_AG = position_A.unsqueeze(-1) + torch.arange(num_tokens, device=position_A.device)
        slot_T = slot_A.repeat_interleave(num_tokens)
        last_T = position_AG[:, -1].repeat_interleave(num_tokens)
        step = DecodeStep(slots, target.rope, slot_T, position_AG.flatten(), context=0)
        streams_TND, premix_TN = target.enter_streams(ids_AG.flatten())
        image_T = torch.zeros_like(slot_T, dtype=torch.bool)
        y = post_TN = mixing_TNN = None
        for layer in self._layers:
            attention = layer.block.attn
            number, sink_H = layer.block.plan.layer, attention.attn_sink
            streams = y, streams_TND, post_TN, mixing_TNN, premix_TN
            entered, query_TX = layer.enter(step, *streams, self._spec)
            query_THC = query_TX.unflatten(-1, (attention.num_heads, attention.head_dim))
            output_THC = step.attend_block(number, query_THC, last_T, num_tokens, sink_H)
            y, entered = layer.run_experts(layer.join_heads(output_THC, self._spec), entered, image_T, self._spec)
            streams_TND, premix_TN = entered.streams_TND, entered.premix_TN
            post_TN, mixing_TNN = entered.post_TN, entered.mixing_TNN
        assert y is not None and post_TN is not None and mixing_TNN is not None
        streams_TND = expand(y.whole(), streams_TND, post_TN, mixing_TNN)
        proposal = draft.finish(streams_TND, premix_TN, num_tokens, target.rounding)
        if not params:
            ids_AG, _, confidence_AG = draft.greedy(anchor_A, proposal, target.rounding)
            return Drafted(ids_AG, confidence_AG, proposal.base_AGV, proposal.hidden_AGD)
        probs: list[Tensor] = []

        def drawn(place: int, logits_AV: Tensor) -> Tensor:
            ids_A, prob_AV = draw_drafts(logits_AV, params[place])
            probs.append(prob_AV)
            # -1, where logits are not finite, is no token
            return ids_A.clamp(min=0)

        ids_AG, _, confidence_AG = draft.greedy(anchor_A, proposal, target.rounding, drawn)
        return Drafted(ids_AG, confidence_AG, proposal.base_AGV, proposal.hidden_AGD, torch.stack(probs, 1))
