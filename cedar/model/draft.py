"""DSpark: a few small blocks that propose the next tokens at once, and how sure they are of each.

A anchors (one a sequence that drafts), G tokens a round, T = A * G rows, W window rows, B draft blocks, D hidden,
X tapped channels, C latent channels, H heads, V vocabulary, R Markov rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cedar.config.layers import LayerKind, LayerPlan
from cedar.config.model import ModelConfig
from cedar.config.rounding import Rounding
from cedar.errors import ConfigError
from cedar.formats.spec import FP8
from cedar.kernels import attention as attention_ops
from cedar.kernels import dense
from cedar.kernels.mhc import collapse
from cedar.kernels.quantize import round_rows
from cedar.model.block import Block
from cedar.model.layers import Linear, RMSNorm, round_input, rounded_weight
from cedar.model.rope import Rope
from cedar.model.state import RouterStats, SharedKV
from cedar.model.transformer import Transformer


@dataclass(slots=True)
class Proposal:
    """One round before the tokens are chosen: what `Draft.choose` and the losses read.

    Attributes:
        hidden_AGD: Collapsed streams after the last block, before the final norm; row k is the k-th token to come.
        base_AGV: float32 logits without the Markov part.
        routers: One per block, for load balance.
    """

    hidden_AGD: Tensor
    base_AGV: Tensor
    routers: list[RouterStats]


class MarkovHead(nn.Module):
    """Adds to the logits what the token before says: a product of two thin tables, summed in float32.

    Source: engram-dspark-vision-chat.md 2.3; its precision is assumed, as in our oracle.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()
        rank = config.draft.markov_rank
        self.embed = nn.Embedding(config.vocab_size, rank, device="meta", dtype=dtype)
        self.embed.weight = nn.Parameter(torch.empty(config.vocab_size, rank, device=device, dtype=dtype))
        self.head = Linear(rank, config.vocab_size, "bf16", device=device, dtype=dtype)

    def embedding(self, ids: Tensor, rounding: Rounding) -> Tensor:
        """float32 [..., R] of the tokens before."""
        rows = nn.functional.embedding(ids, self.embed.weight)
        return (rounded_weight(rows, "bf16") if rounding.weights else rows).float()

    def weight(self, rounding: Rounding) -> Tensor:
        """float32 [V, R]: of an embedding, what is added to the base logits."""
        return self.head.effective_weight(rounding).float()

    def forward(self, embedding: Tensor, rounding: Rounding) -> Tensor:
        """float32 [..., V] to add to the base logits."""
        return dense.linear(embedding, self.weight(rounding))


class ConfidenceHead(nn.Module):
    """How likely a draft token survives verification, as a logit: one float32 product, no bias."""

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = Linear(config.hidden_size + config.draft.markov_rank, 1, "bf16", device=device, dtype=dtype)

    def forward(self, hidden: Tensor, embedding: Tensor, rounding: Rounding) -> Tensor:
        joined = torch.cat([hidden.float(), embedding], dim=-1)
        return dense.linear(joined, self.proj.effective_weight(rounding).float()).squeeze(-1)


class DraftBlock(Block):
    """A window-only layer of the backbone with experts of its own; the first and the last carry the draft's ends."""

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        rope: Rope,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype,
        quantized_device: torch.device | str | None,
    ) -> None:
        draft = config.draft
        moe = replace(
            config.moe,
            num_routed_experts=draft.num_routed_experts,
            num_experts_per_token=draft.num_experts_per_token,
        )
        plan = LayerPlan(
            layer=config.num_layers + number,
            kind=LayerKind.WINDOW,
            ratio=0,
            kv_source=None,
            index_source=None,
            uses_pool=False,
            decoder=True,
            engram=False,
        )
        super().__init__(
            replace(config, moe=moe), plan, rope, device=device, dtype=dtype, quantized_device=quantized_device
        )
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if number == 0:
            tapped = len(draft.target_layer_ids) * hidden
            self.main_proj = Linear(tapped, hidden, "fp8", device=quantized_device or device, dtype=dtype)
            self.main_norm = RMSNorm(hidden, eps, device=device, dtype=dtype)
        if number == draft.num_blocks - 1:
            self.norm = RMSNorm(hidden, eps, device=device, dtype=dtype)
            self.markov_head = MarkovHead(config, device=device, dtype=dtype)
            self.confidence_head = ConfidenceHead(config, device=device, dtype=dtype)


class Draft(nn.Module):
    """The draft module of a checkpoint (`mtp.*`), beside the frozen target whose embedding and head it uses.

    Nothing recurs: a sequence's state is the last window of context rows, one row a block and position the
    target's decoder has run (`context_rows`).

    Args:
        target: The model it drafts for.
        dtype: Dtype of its parameters, the target's by default.
        quantized_device: As `Transformer`'s.

    Raises:
        ConfigError: The config has no draft blocks.

    Source: engram-dspark-vision-chat.md 2.1 to 2.3.
    """

    def __init__(
        self,
        config: ModelConfig,
        target: Transformer,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        quantized_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not config.draft.num_blocks:
            raise ConfigError("num_nextn_predict_layers is 0, expected at least 1: this model has no draft")
        self.config = config
        # the target's parameters are not the draft's
        self._target = [target]
        dtype = target.dtype if dtype is None else dtype
        self.mtp: Sequence[DraftBlock] = nn.ModuleList(  # type: ignore[assignment]
            DraftBlock(config, number, target.rope, device=device, dtype=dtype, quantized_device=quantized_device)
            for number in range(config.draft.num_blocks)
        )

    @property
    def target(self) -> Transformer:
        return self._target[0]

    def attach(self) -> None:
        """From now on the target keeps this draft's context rows of all it runs."""
        self.target.context = self.context_rows

    def context_rows(self, taps_TX: Tensor, position_T: Tensor, rounding: Rounding) -> Tensor:
        """Window keys of positions that the target has run: [T, B * C], rotated, rounded as window rows are.

        Args:
            taps_TX: `Transformer`'s taps of these positions.

        Source: engram-dspark-vision-chat.md 2.2.
        """
        cos_TR, sin_TR = self.target.rope(position_T, compressed=False)
        rows = []
        for block, kv_TC in zip(self.mtp, self.context_keys(taps_TX, rounding), strict=True):
            kv_TC = dense.rotate(block.attn.kv_norm(kv_TC).unsqueeze(1), cos_TR, sin_TR).squeeze(1)
            rows.append(round_rows(kv_TC, FP8) if rounding.window_kv else kv_TC)
        return torch.cat(rows, dim=-1)

    def context_keys(self, taps_TX: Tensor, rounding: Rounding) -> list[Tensor]:
        """For each block [T, C]: its window keys of these rows before norm and rotation."""
        first = self.mtp[0]
        main_TD = first.main_norm(first.main_proj(round_input(taps_TX, rounding), rounding))
        main_TD = round_input(main_TD, rounding)
        return [block.attn.wkv(main_TD, rounding) for block in self.mtp]

    def forward(
        self,
        anchor_A: Tensor,
        position_A: Tensor,
        context_AWX: Tensor,
        visible_AW: Tensor,
        rounding: Rounding,
        dtype: torch.dtype | None = None,
    ) -> Proposal:
        """One parallel pass of the blocks behind each anchor, the newest token, which the target has not run.

        Args:
            anchor_A: Token ids, int64.
            position_A: Their positions.
            context_AWX: `context_rows` of the positions before the anchors, in any order.
            visible_AW: bool, which of them exist.
            dtype: Of activations, the target's by default.
        """
        config, target = self.config, self.target
        num_tokens = config.draft.block_size
        ids_AG = anchor_A.new_full((anchor_A.shape[0], num_tokens), config.draft.noise_token_id)
        ids_AG[:, 0] = anchor_A
        position_AG = position_A.unsqueeze(-1) + torch.arange(num_tokens, device=position_A.device)
        state = DraftStep(
            rounding=rounding,
            position_T=position_AG.flatten(),
            rotation_T=target.rope(position_AG.flatten(), compressed=False),
            first_layer=config.num_layers,
            context_BAWC=context_AWX.unflatten(-1, (len(self.mtp), -1)).permute(2, 0, 1, 3),
            visible_AW=visible_AW,
            num_tokens=num_tokens,
        )
        streams_TND, premix_TN = target.enter_streams(ids_AG.flatten(), dtype)
        routers = []
        for block in self.mtp:
            mixes, u_TD = block.enter(streams_TND, premix_TN)
            block.attn.write_window(u_TD, state)
            streams_TND, _ = block.attend(streams_TND, mixes, u_TD, state, SharedKV())
            streams_TND, premix_TN, stats = block.feed(streams_TND, mixes.premix_TN, None, state)
            routers.append(stats)
        return self.finish(streams_TND, premix_TN, num_tokens, rounding, routers)

    def finish(
        self,
        streams_TND: Tensor,
        premix_TN: Tensor,
        num_tokens: int,
        rounding: Rounding,
        routers: Sequence[RouterStats] = (),
    ) -> Proposal:
        """From the last block's streams to the base logits of `num_tokens` a sequence."""
        hidden_TD = collapse(streams_TND, premix_TN)
        base_TV = self.target.head(self.mtp[-1].norm(hidden_TD), rounding)
        shape = (-1, num_tokens)
        return Proposal(hidden_TD.unflatten(0, shape), base_TV.unflatten(0, shape), list(routers))

    def markov(self, previous: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
        """(embedding [..., R], logits to add [..., V]) of the tokens before, float32."""
        head = self.mtp[-1].markov_head
        embedding = head.embedding(previous, rounding)
        return embedding, head(embedding, rounding)

    def confidence(self, hidden: Tensor, embedding: Tensor, rounding: Rounding) -> Tensor:
        """Logits of surviving, given that all before did: float32 [...]."""
        return self.mtp[-1].confidence_head(hidden, embedding, rounding)

    @torch.inference_mode()
    def greedy(
        self,
        anchor_A: Tensor,
        proposal: Proposal,
        rounding: Rounding,
        choose: Callable[[int, Tensor], Tensor] = lambda _, logits_AV: logits_AV.argmax(-1),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens [A, G], logits [A, G, V], confidence logits [A, G]) of the likeliest tokens, left to right.

        Args:
            choose: (place, logits [A, V]) -> the tokens there, where it is not the likeliest that are wanted.
        """
        head = self.mtp[-1].markov_head
        # decoded once: place after place waits for the one before, so little is done between them
        weight_VR = head.weight(rounding)
        previous_A, tokens, logits, embeddings = anchor_A, [], [], []
        for k in range(proposal.base_AGV.shape[1]):
            embeddings.append(head.embedding(previous_A, rounding))
            logits.append(proposal.base_AGV[:, k] + dense.linear(embeddings[-1], weight_VR))
            previous_A = choose(k, logits[-1])
            tokens.append(previous_A)
        confidence_AG = self.confidence(proposal.hidden_AGD, torch.stack(embeddings, 1), rounding)
        return torch.stack(tokens, 1), torch.stack(logits, 1), confidence_AG


class DraftStep:
    """The rows of one round; fulfils `AttentionState` for window-only layers.

    All rows of a block see the same keys, the context and each other, so its G rows times H heads are one row
    of G * H heads.
    """

    def __init__(
        self,
        *,
        rounding: Rounding,
        position_T: Tensor,
        rotation_T: tuple[Tensor, Tensor],
        first_layer: int,
        context_BAWC: Tensor,
        visible_AW: Tensor,
        num_tokens: int,
    ) -> None:
        self.rounding = rounding
        self._position_T, self._rotation_T, self._first_layer = position_T, rotation_T, first_layer
        self._context_BAWC, self._num_tokens = context_BAWC, num_tokens
        self._visible_AJ = torch.cat([visible_AW, visible_AW.new_ones(visible_AW.shape[0], num_tokens)], dim=1)
        self._block_AGC = torch.empty(0)

    @property
    def positions_T(self) -> Tensor:
        return self._position_T

    def rotation(self, *, compressed: bool) -> tuple[Tensor, Tensor]:
        return self._rotation_T

    def write_window(self, layer: int, kv_TC: Tensor) -> None:
        kv_TC = round_rows(kv_TC, FP8) if self.rounding.window_kv else kv_TC
        self._block_AGC = kv_TC.unflatten(0, (-1, self._num_tokens))

    def complete_groups(self, layer: int, content_TC: Tensor, gate_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("a draft block writes no entries")

    def write_entries(self, layer: int, main_EC: Tensor, key_EI: Tensor) -> None:
        raise AssertionError("a draft block writes no entries")

    def select(
        self, layer: int, kv_source: int, query_THI: Tensor, weight_TH: Tensor, *, pool: Tensor | None, make_pool: bool
    ) -> SharedKV:
        raise AssertionError("a draft block selects no entries")

    def attend(self, layer: int, kv_source: int | None, query_THC: Tensor, shared: SharedKV, sink_H: Tensor) -> Tensor:
        key_AJC = torch.cat([self._context_BAWC[layer - self._first_layer], self._block_AGC], dim=1)
        num_heads = query_THC.shape[1]
        query_AQC = query_THC.unflatten(0, (-1, self._num_tokens)).flatten(1, 2)
        output_AQC = attention_ops.attention(
            query_AQC, key_AJC, self._visible_AJ, None, None, sink_H.repeat(self._num_tokens)
        )
        return output_AQC.unflatten(1, (self._num_tokens, num_heads)).flatten(0, 1)
