"""Train a draft beside a frozen target: its own text, its own hidden states, then calibration and a measured model.

`fit_step` is the whole of one step. N sequences, L tokens, A anchors, G tokens a block, W window rows, B draft blocks,
X tapped channels, D hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cedar.chat.tokenizer import Tokenizer
from cedar.checkpoint.files import open_checkpoint
from cedar.checkpoint.read import load_weights, read_checkpoint
from cedar.checkpoint.resume import TrainState, load_newest, save_state
from cedar.checkpoint.write import COMPANIONS, write_checkpoint
from cedar.config.model import ModelConfig
from cedar.config.presets import with_draft
from cedar.config.rounding import Rounding
from cedar.config.train import OptimConfig, ScheduleConfig
from cedar.errors import ConfigError, FormatError
from cedar.model.draft import Draft
from cedar.model.init import initialise
from cedar.model.transformer import Transformer
from cedar.train import balance
from cedar.train.data import load_corpora
from cedar.train.draft_text import KINDS, Prompts, Text, anchors_of, load_text, summary, write_text
from cedar.train.loop import Clock
from cedar.train.losses import expert_loads
from cedar.train.optim.groups import Optimizers
from cedar.train.schedule import rate_at

# tokens of one pass of the frozen target
_PASS_TOKENS = {"cpu": 4096, "cuda": 65536}
# anchors of one pass of an evaluation
_EVAL_ANCHORS = {"cpu": 256, "cuda": 4096}
_ECE_BINS = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftTrainConfig:
    """One run.

    Attributes:
        blocks: Draft blocks; `block_size` tokens a round.
        lengths: Of the sequences that the target writes; `sequences` of each.
        rows: Sequences of a step; `anchors` of each.
        decay: Position k weighs `exp(-(k - 1) / decay)`.
        ce_weight, l1_weight, confidence_weight: Of the three losses.
        rounded_from: Part of the run after which the draft's own weights and activations are rounded as served.
        experts, experts_per_token, markov_rank: The draft's own sizes.
        graphs: On a GPU, capture a step's passes once and replay them.

    Source: engram-dspark-vision-chat.md 2.6 (losses, decay); the rest is our choice.
    """

    seed: int = 1
    blocks: int = 2
    block_size: int = 5
    experts: int = 4
    experts_per_token: int = 2
    markov_rank: int = 64
    lengths: tuple[int, ...] = (128, 320)
    sequences: int = 4096
    steps: int = 20000
    rows: int = 128
    anchors: int = 64
    learning_rate: float = 2e-3
    decay: float = 4.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    rounded_from: float = 0.5
    log_every: int = 100
    save_every: int = 1000
    graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("blocks", "block_size", "sequences", "steps", "rows", "anchors", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        if not self.lengths or min(self.lengths) < 48:
            raise ConfigError(f"lengths are {list(self.lengths)}, expected one or more of at least 48 tokens")


@dataclass(frozen=True, slots=True)
class Features:
    """What the frozen target says of its own text: all that training reads of it.

    Attributes:
        taps_NLX: Mean streams at the draft's target layers.
        hidden_NLD: What the head reads.
        anchor_NL: bool, where a block may start.
    """

    text: Text
    taps_NLX: Tensor
    hidden_NLD: Tensor
    anchor_NL: Tensor


@dataclass(slots=True)
class Blocks:
    """Blocks behind A anchors, teacher-forced.

    Attributes:
        valid_AG: bool, where a label exists: never past the end of what the target wrote in one go.
        target_AGV: float32 logits of the target.
    """

    row_A: Tensor
    position_A: Tensor
    label_AG: Tensor
    previous_AG: Tensor
    valid_AG: Tensor
    context_AWX: Tensor
    visible_AW: Tensor
    target_AGV: Tensor


def draft_config(config: ModelConfig, run: DraftTrainConfig) -> ModelConfig:
    """The target's config with draft blocks. Raises ConfigError."""
    return with_draft(
        config,
        num_blocks=run.blocks,
        block_size=run.block_size,
        num_routed_experts=run.experts,
        num_experts_per_token=run.experts_per_token,
        markov_rank=run.markov_rank,
    )


def weights_hash(model: Transformer) -> str:
    """SHA-256 over every parameter and table of the target: equal before and after training."""
    running = hashlib.sha256()
    tensors: dict[str, Tensor] = dict(model.state_dict())
    for name, module in model.named_modules():
        for kind in ("codes", "scales"):
            held = getattr(module, kind, None)
            if isinstance(held, Tensor):
                tensors[f"{name}.{kind}"] = held
    for name in sorted(tensors):
        running.update(name.encode())
        running.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return running.hexdigest()


@torch.no_grad()
def extract(model: Transformer, config: ModelConfig, text: Text) -> Features:
    """Run the target over its text once: taps and hidden states, in its own dtype, on its device."""
    num_sequences, length = text.ids_NL.shape
    step = max(1, _PASS_TOKENS[model.device.type] // length)
    taps, hidden = [], []
    for start in range(0, num_sequences, step):
        rows = slice(start, start + step)
        output = model(
            text.ids_NL[rows].to(model.device),
            window_floor_BS=text.floor_NL[rows].to(model.device),
            tap=True,
        )
        assert output.taps_BSX is not None
        taps.append(output.taps_BSX)
        hidden.append(output.hidden_BSD)
    moved = Text(**{name: getattr(text, name).to(model.device) for name in text.__dataclass_fields__})
    return Features(moved, torch.cat(taps), torch.cat(hidden), anchors_of(moved))


def blocks_at(draft: Draft, features: Features, row_N: Tensor, position_NA: Tensor, rounding: Rounding) -> Blocks:
    """The blocks behind places of some sequences; differentiable through the context rows.

    Args:
        row_N: Sequences.
        position_NA: Anchors of each.
    """
    text, device = features.text, row_N.device
    num_rows, length = row_N.shape[0], text.ids_NL.shape[1]
    window, num_tokens = draft.config.attention.sliding_window, draft.config.draft.block_size
    positions_L = torch.arange(length, device=device)
    context_TX = draft.context_rows(features.taps_NLX[row_N].flatten(0, 1), positions_L.repeat(num_rows), rounding)
    local_A = torch.arange(num_rows, device=device).repeat_interleave(position_NA.shape[1])
    row_A, position_A = row_N[local_A], position_NA.flatten()
    before_AW = position_A.unsqueeze(-1) + torch.arange(-window, 0, device=device)
    visible_AW = before_AW >= text.floor_NL[row_A, position_A].unsqueeze(-1)
    flat_AW = local_A.unsqueeze(-1) * length + before_AW.clamp(min=0)
    context_AWX = F.embedding(flat_AW, context_TX)
    ahead_AG = position_A.unsqueeze(-1) + torch.arange(1, num_tokens + 1, device=device)
    inside_AG = ahead_AG < length
    ahead_AG = ahead_AG.clamp(max=length - 1)
    at_A1 = row_A.unsqueeze(-1)
    valid_AG = (text.made_NL[at_A1, ahead_AG] & inside_AG).int().cumprod(-1).bool()
    valid_AG = valid_AG & features.anchor_NL[row_A, position_A].unsqueeze(-1)
    hidden_AGD = features.hidden_NLD[at_A1, ahead_AG - 1]
    with torch.no_grad():
        target_AGV = draft.target.head(hidden_AGD, Rounding())
    return Blocks(
        row_A=row_A,
        position_A=position_A,
        label_AG=text.ids_NL[at_A1, ahead_AG],
        previous_AG=text.ids_NL[at_A1, ahead_AG - 1],
        valid_AG=valid_AG,
        context_AWX=context_AWX,
        visible_AW=visible_AW,
        target_AGV=target_AGV,
    )


@dataclass(slots=True)
class Forced:
    """What the draft says of teacher-forced blocks: float32 logits [A, G, V], confidence logits [A, G]."""

    logits_AGV: Tensor
    confidence_AG: Tensor
    loads_BE: Tensor


def run_blocks(draft: Draft, features: Features, blocks: Blocks, rounding: Rounding) -> Forced:
    anchor_A = features.text.ids_NL[blocks.row_A, blocks.position_A]
    proposal = draft(
        anchor_A,
        blocks.position_A,
        blocks.context_AWX,
        blocks.visible_AW,
        rounding,
        features.taps_NLX.dtype,
    )
    embedding_AGR, bias_AGV = draft.markov(blocks.previous_AG, rounding)
    confidence_AG = draft.confidence(proposal.hidden_AGD, embedding_AGR, rounding)
    real_T = torch.zeros(proposal.routers[0].ids_TK.shape[0], dtype=torch.int64, device=anchor_A.device)
    return Forced(proposal.base_AGV + bias_AGV, confidence_AG, expert_loads(proposal.routers, real_T))


def losses(forced: Forced, blocks: Blocks, *, decay: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(cross-entropy, L1 distance, confidence, acceptance), each a weighted mean over valid places.

    The confidence learns the probability that a draw from the draft survives, `1 - L1 / 2`; the target of that loss
    carries no gradient. Acceptance is its mean at the first place, for the log.

    Source: engram-dspark-vision-chat.md 2.6.
    """
    num_tokens = blocks.label_AG.shape[1]
    place_G = torch.arange(num_tokens, device=blocks.label_AG.device)
    weight_AG = torch.exp(-place_G / decay) * blocks.valid_AG
    total = weight_AG.sum() + 1e-6
    log_q_AGV = forced.logits_AGV.log_softmax(-1)
    ce_AG = -log_q_AGV.gather(-1, blocks.label_AG.unsqueeze(-1)).squeeze(-1)
    distance_AG = (log_q_AGV.exp() - blocks.target_AGV.softmax(-1)).abs().sum(-1)
    kept_AG = (1 - 0.5 * distance_AG.detach()).clamp(0, 1)
    confidence_AG = F.binary_cross_entropy_with_logits(forced.confidence_AG, kept_AG, reduction="none")
    first_A = blocks.valid_AG[:, 0]
    acceptance = (kept_AG[:, 0] * first_A).sum() / first_A.sum().clamp(min=1)
    ce, l1, confidence = ((weight_AG * values).sum() / total for values in (ce_AG, distance_AG, confidence_AG))
    return ce, l1, confidence, acceptance


@dataclass
class Trainer:
    """The draft, its optimisers, and where the run stands."""

    run: DraftTrainConfig
    draft: Draft
    features: Sequence[Features]
    folder: Path
    clock: Clock
    meta: dict[str, Any]
    report: Callable[[str], None] = print
    step: int = 0
    total_steps: int = 0
    rounded: bool = False

    def __post_init__(self) -> None:
        config = OptimConfig(learning_rate=self.run.learning_rate, weight_decay=0.0)
        self.optimizers = Optimizers(self.draft.named_parameters(), self.draft.config, config)
        self.biases = [block.ffn.gate.bias for block in self.draft.mtp]
        self.schedule = ScheduleConfig(warmup_steps=1, warmup_share=0.04, decay_from=0.3, decay_to=1.0, final_rate=0.02)
        self.total_steps = self.total_steps or self.run.steps
        if self.run.graphs and self.draft.target.device.type == "cuda":
            self.optimizers.capture_steps()
        self._captured: dict[tuple[int, bool], tuple[Any, Tensor, Tensor, Tensor, Tensor]] = {}
        self._pool: Any = None
        self.rows = [(~part.text.held_out_N).nonzero().flatten() for part in self.features]
        self.shares = torch.tensor([float(part.text.made_NL.sum()) for part in self.features])

    def fit_step(self) -> Tensor:
        """One update; the batch depends on the seed and the step alone. Returns the log's five numbers."""
        run, draft = self.run, self.draft
        device = draft.target.device
        generator = torch.Generator().manual_seed(run.seed * 1_000_003 + self.step)
        which = int(torch.multinomial(self.shares, 1, generator=generator))
        features, usable_N = self.features[which], self.rows[which]
        row_N = usable_N[torch.randint(len(usable_N), (run.rows,), generator=generator).to(device)]
        # a sequence with fewer places than anchors gives some that are not valid
        score_NL = torch.rand(run.rows, features.anchor_NL.shape[1], generator=generator).to(device)
        score_NL = score_NL.masked_fill(~features.anchor_NL[row_N], -1)
        position_NA = score_NL.topk(min(run.anchors, score_NL.shape[1]), dim=-1).indices
        # once on it stays on, though the number of steps to come is a guess
        self.rounded = self.rounded or self.step >= run.rounded_from * self.total_steps
        values_5, load_BE = self._pass(which, row_N, position_NA, self.rounded)
        self.optimizers.step(run.learning_rate * rate_at(self.step, self.total_steps, self.schedule))
        if self._captured:
            torch._foreach_zero_([p.grad for p in draft.parameters() if p.grad is not None])
        else:
            draft.zero_grad(set_to_none=True)
        balance.update(self.biases, load_BE, 0.001)
        self.step += 1
        return values_5

    def _pass(self, which: int, row_N: Tensor, position_NA: Tensor, rounded: bool) -> tuple[Tensor, Tensor]:
        """Gradients of one batch: (loss, ce, l1, confidence, acceptance), and the load of each expert."""
        if not (self.run.graphs and row_N.device.type == "cuda"):
            return self._forward_backward(which, row_N, position_NA, rounded)
        key = (which, rounded)
        if key not in self._captured:
            self._captured[key] = self._capture(which, row_N, position_NA, rounded)
        graph, own_row_N, own_position_NA, values_5, load_BE = self._captured[key]
        own_row_N.copy_(row_N)
        own_position_NA.copy_(position_NA)
        graph.replay()
        # the next replay writes into the same buffers
        return values_5.clone(), load_BE.clone()

    def _forward_backward(self, which: int, row_N: Tensor, position_NA: Tensor, rounded: bool) -> tuple[Tensor, Tensor]:
        run, features = self.run, self.features[which]
        rounding = Rounding(weights=True) if rounded else Rounding.none()
        blocks = blocks_at(self.draft, features, row_N, position_NA, rounding)
        forced = run_blocks(self.draft, features, blocks, rounding)
        ce, l1, confidence, acceptance = losses(forced, blocks, decay=run.decay)
        loss = run.ce_weight * ce + run.l1_weight * l1 + run.confidence_weight * confidence
        loss.backward()
        return torch.stack([loss, ce, l1, confidence, acceptance]).detach(), forced.loads_BE

    def _capture(
        self, which: int, row_N: Tensor, position_NA: Tensor, rounded: bool
    ) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
        """A graph of one pass over buffers of its own; leaves the gradients at zero."""
        row_N, position_NA = row_N.clone(), position_NA.clone()
        parameters = list(self.draft.parameters())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # they compile kernels and make the libraries' buffers
            for _ in range(2):
                self._forward_backward(which, row_N, position_NA, rounded)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            values_5, load_BE = self._forward_backward(which, row_N, position_NA, rounded)
        self._pool = graph.pool()
        torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])
        return graph, row_N, position_NA, values_5, load_BE

    def fit(self) -> None:
        """To the end of the run or of the time, saving on the way."""
        saved = self.step
        # with a budget of time the number of steps is a guess
        while (self.step < self.total_steps or self.clock.minutes is not None) and not self.clock.is_over():
            start = time.monotonic()
            captured, was_warm = len(self._captured), self.optimizers.is_warm
            values_5 = self.fit_step()
            logs = self.step % self.run.log_every == 0
            numbers = values_5.tolist() if logs or self.step % 20 == 0 else []
            # a step that captures says nothing of the speed to come
            if was_warm and len(self._captured) == captured:
                self.clock.recent_s.append(time.monotonic() - start)
            self.total_steps = self.clock.total_steps(self.step, self.total_steps)
            if numbers and not math.isfinite(numbers[0]):
                raise ConfigError(f"the loss is {numbers[0]} at step {self.step}: lower the learning rate")
            if logs:
                self._log(numbers)
            if self.step % self.run.save_every == 0:
                self.save()
                saved = self.step
        if saved != self.step:
            self.save()

    def _log(self, numbers: list[float]) -> None:
        loss, ce, l1, confidence, acceptance = numbers
        seconds = statistics.fmean(self.clock.recent_s) if self.clock.recent_s else math.inf
        self.report(
            f"step {self.step}/{self.total_steps}  loss {loss:.3f}  ce {ce:.3f}  l1 {l1:.3f}  "
            f"confidence {confidence:.3f}  first accepted {acceptance:.3f}  {1 / seconds:.1f} steps/s"
        )
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            values = {"step": self.step, "loss": loss, "ce": ce, "l1": l1, "confidence": confidence}
            log.write(
                json.dumps({**values, "acceptance": acceptance, "seconds": round(self.clock.elapsed_s, 1)}) + "\n"
            )

    def save(self) -> None:
        """Write a checkpoint. Raises CapacityError if the disk refuses."""
        state = TrainState(
            step=self.step,
            model=self.draft.state_dict(),
            optimizer=self.optimizers.state(),
            random={},
            meta={
                **self.meta,
                "updates": self.optimizers.updates,
                "total_steps": self.total_steps,
                "rounded": self.rounded,
                "elapsed_s": self.clock.elapsed_s,
            },
        )
        save_state(self.folder / "checkpoints", state)

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint; False if there is none. Raises FormatError if it is another run's."""
        state, problems = load_newest(self.folder / "checkpoints")
        for problem in problems:
            self.report(f"passed over a damaged checkpoint: {problem}")
        if state is None:
            return False
        for name, value in self.meta.items():
            if state.meta[name] != value:
                raise FormatError(
                    f"{self.folder} holds a run with another {name} ({state.meta[name]!r}, now {value!r}); "
                    "use its own options, or another folder"
                )
        self.draft.load_state_dict(dict(state.model))
        self.optimizers.load(dict(state.optimizer), state.meta["updates"])
        self.step, self.clock.before_s = state.step, state.meta["elapsed_s"]
        self.rounded = state.meta["rounded"]
        if self.clock.minutes is not None:
            self.total_steps = state.meta["total_steps"]
        return True


# what came out


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Every place of held-out text: what the confidence said, and what became of the token.

    Attributes:
        logit_MG: Confidence logits.
        kept_MG: Probability that a draw at temperature 1 survives.
        agreed_MG: float, whether the draft's likeliest token is the target's.
        valid_MG: bool.
        kind_M, temperature_M: Of the sequence; row_M and position_M say where.
    """

    logit_MG: Tensor
    kept_MG: Tensor
    agreed_MG: Tensor
    valid_MG: Tensor
    kind_M: Tensor
    temperature_M: Tensor
    row_M: Tensor
    position_M: Tensor


@torch.no_grad()
def outcomes(draft: Draft, features: Sequence[Features], rounding: Rounding, *, sequences: int) -> Outcomes:
    """Teacher-forced blocks at every place of held-out text, at most `sequences` of each length."""
    parts: dict[str, list[Tensor]] = {name: [] for name in Outcomes.__dataclass_fields__}
    before = 0
    for part in features:
        text, length = part.text, part.text.ids_NL.shape[1]
        rows = text.held_out_N.nonzero().flatten()[:sequences]
        step = max(1, _EVAL_ANCHORS[draft.target.device.type] // length)
        position_L = torch.arange(length, device=rows.device)
        for chosen in rows.split(step):
            blocks = blocks_at(draft, part, chosen, position_L.expand(len(chosen), -1), rounding)
            forced = run_blocks(draft, part, blocks, rounding)
            distance = (forced.logits_AGV.softmax(-1) - blocks.target_AGV.softmax(-1)).abs().sum(-1)
            agreed = (forced.logits_AGV.argmax(-1) == blocks.target_AGV.argmax(-1)).float()
            values = (
                forced.confidence_AG,
                (1 - 0.5 * distance).clamp(0, 1),
                agreed,
                blocks.valid_AG,
                text.kind_N[blocks.row_A],
                text.temperature_N[blocks.row_A],
                blocks.row_A + before,
                blocks.position_A,
            )
            for name, value in zip(parts, values, strict=True):
                parts[name].append(value.cpu())
        before += text.ids_NL.shape[0]
    return Outcomes(*(torch.cat(values) for values in parts.values()))


def calibration_error(confidence_M: Tensor, kept_M: Tensor) -> float:
    """Expected calibration error: mean distance between what was said and what happened, over bins of what was said."""
    if confidence_M.numel() == 0:
        return 0.0
    bin_M = (confidence_M * _ECE_BINS).long().clamp(max=_ECE_BINS - 1)
    said = torch.zeros(_ECE_BINS).index_add(0, bin_M, confidence_M)
    happened = torch.zeros(_ECE_BINS).index_add(0, bin_M, kept_M)
    return float((said - happened).abs().sum() / confidence_M.numel())


def calibrate(logit_MG: Tensor, kept_MG: Tensor, valid_MG: Tensor) -> list[float]:
    """A temperature for each place, left to right: each makes the product so far as true as it can.

    Source: engram-dspark-vision-chat.md 2.5 (sequential temperature scaling).
    """
    said_M, happened_M = torch.ones(len(logit_MG)), torch.ones(len(logit_MG))
    temperatures: list[float] = []
    grid = torch.logspace(-1.3, 1, 93).tolist()
    for k in range(logit_MG.shape[1]):
        happened_M = happened_M * kept_MG[:, k]
        valid_M = valid_MG[:, k]
        errors = [
            calibration_error((said_M * torch.sigmoid(logit_MG[:, k] / t))[valid_M], happened_M[valid_M]) for t in grid
        ]
        best = grid[min(range(len(grid)), key=errors.__getitem__)] if bool(valid_M.any()) else 1.0
        temperatures.append(round(best, 4))
        said_M = said_M * torch.sigmoid(logit_MG[:, k] / best)
    return temperatures


def errors_of(logit_MG: Tensor, kept_MG: Tensor, valid_MG: Tensor, temperatures: Sequence[float]) -> list[float]:
    """Calibration error of the running product at each place."""
    said_MG = torch.sigmoid(logit_MG / torch.tensor(temperatures)).cumprod(-1)
    happened_MG = kept_MG.cumprod(-1)
    return [
        round(calibration_error(said_MG[valid, k], happened_MG[valid, k]), 4)
        for k, valid in enumerate(valid_MG.unbind(-1))
    ]


def greedy_rounds(found: Outcomes, chosen_M: Tensor) -> tuple[int, int]:
    """(tokens, rounds) of greedy decoding with all drafts verified, over greedy sequences.

    A round at a place yields the drafts that agree up to the first that does not, and the target's own token.
    """
    tokens = rounds = 0
    accepted_M = (found.agreed_MG * found.valid_MG).cumprod(-1).sum(-1).long()
    last: tuple[int, int] | None = None
    for row, position, accepted, full, valid in zip(
        found.row_M[chosen_M].tolist(),
        found.position_M[chosen_M].tolist(),
        accepted_M[chosen_M].tolist(),
        found.valid_MG[chosen_M].all(-1).tolist(),
        found.valid_MG[chosen_M, 0].tolist(),
        strict=True,
    ):
        # where the text ends inside the block, nobody knows how many would have been accepted
        if not valid or not full or (last is not None and last[0] == row and position < last[1]):
            continue
        tokens += accepted + 1
        rounds += 1
        last = (row, position + accepted + 1)
    return tokens, rounds


def measure(draft: Draft, features: Sequence[Features], *, sequences: int) -> dict[str, Any]:
    """Acceptance by kind of text, temperatures and calibration errors, all on held-out text, with served roundings."""
    found = outcomes(draft, features, Rounding(), sequences=sequences)
    greedy_M = (found.temperature_M == 0) & found.valid_MG[:, 0]
    acceptance: dict[str, dict[str, float]] = {}
    expected_M = 1 + (found.kept_MG * found.valid_MG).cumprod(-1).sum(-1)
    whole_M = found.valid_MG.all(-1)
    for number, kind in enumerate(KINDS):
        of_kind_M = found.kind_M == number
        tokens, rounds = greedy_rounds(found, greedy_M & of_kind_M)
        drawn_M = of_kind_M & (found.temperature_M == 1) & whole_M
        values = {}
        if rounds:
            values["greedy"] = round(tokens / rounds, 3)
        if bool(drawn_M.any()):
            values["temperature_1"] = round(float(expected_M[drawn_M].mean()), 3)
        acceptance[kind] = values
    result: dict[str, Any] = {"acceptance": acceptance, "places": int(whole_M.sum())}
    half_M = found.row_M % (2 * 16) < 16
    for name, kept_MG, chosen_M in (
        ("sampled", found.kept_MG, found.temperature_M == 1),
        ("greedy", found.agreed_MG, found.temperature_M == 0),
    ):
        fit_M, test_M = chosen_M & half_M, chosen_M & ~half_M
        if not bool(found.valid_MG[fit_M].any()) or not bool(found.valid_MG[test_M].any()):
            fit_M = test_M = chosen_M

        def part(rows_M: Tensor, kept_MG: Tensor = kept_MG) -> tuple[Tensor, Tensor, Tensor]:
            return found.logit_MG[rows_M], kept_MG[rows_M], found.valid_MG[rows_M]

        temperatures = calibrate(*part(fit_M))
        result[name] = {
            "temperatures": temperatures,
            "calibration_error": errors_of(*part(test_M), temperatures),
            "uncalibrated_error": errors_of(*part(test_M), [1.0] * len(temperatures)),
        }
    return result


# the command


def _texts(
    model: Transformer, folder: Path, data: Path, run: DraftTrainConfig, own_hash: str, report: Callable[[str], None]
) -> list[Text]:
    """The target's text of each length, written now or by an earlier command."""
    tokenizer = Tokenizer.load(data)
    tokenizer.check(model.config)
    corpora = load_corpora(data, tokenizer, "train")
    held_out = load_corpora(data, tokenizer, "validation") or corpora
    prompts, held = Prompts(tokenizer, corpora), Prompts(tokenizer, held_out)
    texts = []
    for length in run.lengths:
        about = {
            "model": own_hash,
            "tokenizer": tokenizer.fingerprint,
            "seed": str(run.seed),
            "count": str(run.sequences),
            "format": "1",
        }
        file = folder / f"text-{length}.safetensors"
        if file.is_file():
            texts.append(load_text(file, about))
            report(f"{file.name}: written before")
            continue
        texts.append(write_text(model, prompts, held, length=length, count=run.sequences, seed=run.seed, report=report))
        texts[-1].save(file, about)
    return texts


def write_texts(
    model_folder: str | Path,
    data: str | Path,
    out: str | Path,
    run: DraftTrainConfig,
    *,
    device: str | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, int]:
    """Only the first part of `train_draft`: let the target write its text into `out`."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    model = _open(model_folder, device)
    return summary(_texts(model, out, Path(data), run, weights_hash(model), report))


def _open(folder: str | Path, device: str | None) -> Transformer:
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    return read_checkpoint(folder, dtype=dtype, device=where).requires_grad_(False)


def train_draft(
    model_folder: str | Path,
    data: str | Path,
    out: str | Path,
    run: DraftTrainConfig,
    *,
    device: str | None = None,
    minutes: float | None = None,
    stop_after: float | None = None,
    held_out_sequences: int = 256,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train a draft for a model folder and write the two together to `out/model`.

    Text, checkpoints and log lie in `out`; the same command goes on from there. The backbone's tensors come out byte
    for byte as they went in.

    Args:
        data: Prepared data folder: prompts come from it.
        minutes: Of training proper, after the text is written and read; replaces the number of steps.
        stop_after: Minutes of training after which this command saves and ends.
        held_out_sequences: Of each length, for calibration and measuring.

    Returns:
        What `training.json` says of the draft; empty if the run is not complete.

    Raises:
        ConfigError: The options make no draft.
        FormatError: A file is damaged or of another run, or the target changed while it should be frozen.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    model = _open(model_folder, device)
    config = draft_config(model.config, run)
    own_hash = weights_hash(model)
    texts = _texts(model, out, Path(data), run, own_hash, report)
    report(f"text: {', '.join(f'{kind} {count:,}' for kind, count in summary(texts).items())} tokens")
    features = [extract(model, config, text) for text in texts]
    size = sum(part.taps_NLX.nbytes + part.hidden_NLD.nbytes for part in features)
    draft = Draft(config, model, device=model.device, dtype=torch.float32)
    initialise(draft, run.seed)
    count = sum(p.numel() for p in draft.parameters())
    report(f"features: {size / 1e6:,.0f} MB; draft: {run.blocks} blocks, {count / 1e6:.2f} M parameters")
    meta = {"run": json.loads(json.dumps({k: v for k, v in asdict(run).items() if k not in _FREE})), "model": own_hash}
    clock = Clock(minutes=minutes, stop_after=stop_after)
    trainer = Trainer(run, draft, features, out, clock, meta, report)
    if trainer.resume():
        report(f"resumed at step {trainer.step}")
    trainer.fit()
    over = minutes is not None and clock.elapsed_s >= 60 * minutes
    if trainer.step < trainer.total_steps and not over:
        report(f"stopped at step {trainer.step}; the same command goes on from there")
        return {}
    if weights_hash(model) != own_hash:
        raise FormatError("the target's weights changed while its draft was trained; this is a fault of cedar")
    return _finish(trainer, model_folder, held_out_sequences, own_hash, texts)


# what may change between commands
_FREE = ("steps", "log_every", "save_every", "graphs")


def _finish(
    trainer: Trainer, model_folder: str | Path, held_out_sequences: int, own_hash: str, texts: Sequence[Text]
) -> dict[str, Any]:
    """Round, write, read back, measure: what is measured is what was written."""
    run, draft, folder = trainer.run, trainer.draft, trainer.folder / "model"
    source = open_checkpoint(model_folder)
    files = [source.directory / name for name in (*COMPANIONS, "training.json")]
    write_checkpoint(draft.target, folder, draft=draft, source=source, files=[f for f in files if f.is_file()])
    source.close()
    # the target stays as it is, with its own config; the draft is what the file says
    stored = Draft(draft.config, draft.target, device=draft.target.device)
    load_weights(stored, open_checkpoint(folder))
    measured = measure(stored, trainer.features, sequences=held_out_sequences)
    facts = {
        "run": asdict(run),
        "steps": trainer.step,
        "minutes": round(trainer.clock.elapsed_s / 60, 1),
        "parameters": sum(p.numel() for p in draft.parameters()),
        "text_tokens": summary(texts),
        "backbone_sha256": own_hash,
        "measured": measured,
    }
    _merge(folder / "training.json", {"draft": facts})
    temperatures = {name: measured[name]["temperatures"] for name in ("sampled", "greedy")}
    _merge(folder / "generation_config.json", {"draft_confidence_temperatures": temperatures})
    size = sum(file.stat().st_size for file in folder.iterdir())
    trainer.report(f"model with draft written to {folder} ({size / 1e6:.1f} MB)")
    trainer.report(json.dumps(measured, indent=1))
    return facts


def _merge(file: Path, values: dict[str, Any]) -> None:
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps({**found, **values}, indent=1) + "\n", encoding="utf-8")
