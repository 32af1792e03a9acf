"""Layer by layer from exact inputs, both ways: whole sequences, and rows in pieces over stored cache bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cedar.model.engram import lookback_ids
from cedar.model.packs import PackState
from cedar.model.sequence import SequenceStep
from cedar.model.state import AttentionState, SharedKV
from cedar.model.transformer import Transformer
from tests import golden

pytestmark = pytest.mark.device

# the last piece is longer than the window ring, the first shorter than a pair
WAYS = {"whole": None, "one_piece": [1000], "pieces": [1, 2, 1, 3, 1000], "single_rows": [1] * 64}


def _steps(model: Transformer, num_rows: int, way: str) -> Iterator[tuple[AttentionState, slice]]:
    """States whose rows together are 0 .. num_rows - 1."""
    pieces = WAYS[way]
    if pieces is None:
        start = torch.zeros(1, num_rows, dtype=torch.int64)
        yield (
            PackState(
                config=model.config,
                rope=model.rope,
                rounding=model.rounding,
                segment_start_BS=start,
                form="gathered",
                topk=model.config.indexer.topk,
            ),
            slice(0, num_rows),
        )
        return
    state = model.new_state(decoder_replay="off")
    position = 0
    for piece in pieces:
        stop = min(position + piece, num_rows)
        if stop > position:
            yield SequenceStep(state, position, stop), slice(position, stop)
        position = stop


def _run(
    model: Transformer, num_rows: int, way: str, body: Callable[[AttentionState, slice], dict[str, Tensor]]
) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    with torch.inference_mode():
        for state, rows in _steps(model, num_rows, way):
            for name, value in body(state, rows).items():
                parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["f32", "bf16"])
@pytest.mark.parametrize("letter", ["a", "b"])
def test_layers_from_exact_inputs(letter: str, mode: str, way: str) -> None:
    data, model = golden.load(f"layers_{letter}"), golden.model(letter, mode)
    ids = data["ids"]
    raw = lookback_ids(
        ids[None],
        torch.zeros_like(ids[None]),
        num_lookbacks=model.config.engram.max_ngram_size,
        image_token_id=model.config.image_token_id,
    )[0]

    def body(state: AttentionState, rows: slice) -> dict[str, Tensor]:
        outputs, shared = {}, SharedKV()
        for block in model.layers:
            prefix = f"layers.{block.plan.layer}."
            streams, premix = data[prefix + "X"][rows].to(model.dtype), data[prefix + "a"][rows]
            if block.plan.engram:
                streams = block.engram(streams, model.token_map(raw[rows]), raw[rows, 0] < 0, model.rounding)
            mixes, u = block.enter(streams, premix)
            block.attn.write_window(u, state)
            block.attn.write_entries(u, state)
            streams, shared = block.attend(streams, mixes, u, state, shared)
            streams, premix, _ = block.feed(streams, mixes.premix_TN, data["image"][rows], state)
            outputs[prefix + "X_out"], outputs[prefix + "a_out"] = streams, premix
        return outputs

    got = _run(model, len(ids), way, body)
    limit = {"f32": 2e-3, "bf16": 6e-3}[mode]
    for block in model.layers:
        prefix = f"layers.{block.plan.layer}."
        for name in ("X_out", "a_out"):
            want = data[f"{prefix}{mode}.{name}"].float()
            value = got[prefix + name].float()
            error = (value - want).flatten(1).square().mean(1).sqrt() / want.square().mean().sqrt()
            # a flipped expert or index pick costs more: at most 2 % of the rows, which here is none
            assert golden.relative_rms(value, want) <= limit, (prefix, name, error.tolist())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["f32_noquant", "f32", "bf16"])
def test_attention(mode: str, way: str) -> None:
    data, model = golden.load("attention"), golden.model("a", mode)
    num_rows = data["layers.0.u"].shape[0]

    def body(state: AttentionState, rows: slice) -> dict[str, Tensor]:
        outputs, shared = {}, SharedKV()
        for block in model.layers:
            u = data[f"layers.{block.plan.layer}.u"][rows].to(model.dtype)
            block.attn.write_window(u, state)
            block.attn.write_entries(u, state)
            y, shared = block.attn(u, state, shared)
            outputs[f"layers.{block.plan.layer}.y"] = y
            if block.plan.selects:
                selection = shared.selection
                outputs[f"layers.{block.plan.layer}.selection"] = selection[0] if selection.dim() == 3 else selection
        return outputs

    got = _run(model, num_rows, way, body)
    limit = {"f32_noquant": 1e-5, "f32": 2e-3, "bf16": 1.5e-2}[mode]
    for block in model.layers:
        prefix = f"layers.{block.plan.layer}."
        if block.plan.selects:
            assert torch.equal(got[prefix + "selection"], data[f"{prefix}{mode}.selection"].long()), prefix
        assert golden.relative_rms(got[prefix + "y"], data[f"{prefix}{mode}.y"]) <= limit, prefix


@pytest.mark.parametrize("mode", ["f32", "bf16"])
def test_window_rows_are_the_rounded_ones(mode: str) -> None:
    data, model = golden.load("attention"), golden.model("a", mode)
    for layer in (0, 2):
        u = data[f"layers.{layer}.u"].to(model.dtype)
        state = model.new_state(decoder_replay="off")
        state.in_place = False
        with torch.inference_mode():
            step = SequenceStep(state, 0, u.shape[0])
            model.layers[layer].attn.write_window(u, step)
        want = data[f"layers.{layer}.{mode}.window_kv"].float()
        got = step._window_RC[-u.shape[0] :].float()
        assert (got != want).float().mean() <= 0.005
        torch.testing.assert_close(got, want, rtol=0.13, atol=1e-3)


@pytest.mark.parametrize("mode", ["f32_noquant", "f32", "bf16"])
@pytest.mark.parametrize("letter", ["a", "b"])
def test_engram_injection(letter: str, mode: str) -> None:
    data, model = golden.load("engram"), golden.model(letter, mode)
    layer = model.config.engram.layer_ids[0]
    ids = data[f"{letter}.ids"]
    assert torch.equal(ids == model.config.image_token_id, data[f"{letter}.image"])
    raw = lookback_ids(
        ids[None],
        torch.zeros_like(ids[None]),
        num_lookbacks=model.config.engram.max_ngram_size,
        image_token_id=model.config.image_token_id,
    )[0]
    with torch.inference_mode():
        got = model.layers[layer].engram(
            data[f"{letter}.X"].to(model.dtype), model.token_map(raw), raw[:, 0] < 0, model.rounding
        )
    want = data[f"{letter}.layers.{layer}.{mode}.X"].float()
    assert golden.relative_rms(got, want) <= {"f32_noquant": 1e-6, "f32": 2e-3, "bf16": 6e-3}[mode]
    image = data[f"{letter}.image"]
    assert torch.equal(got[image].float(), data[f"{letter}.X"][image].float())


@pytest.mark.parametrize("mode", ["f32_noquant", "f32_kv", "f32", "bf16"])
def test_mixture_of_experts(mode: str) -> None:
    data, model = golden.load("gate"), golden.model("a", mode)
    with torch.inference_mode():
        got, stats = model.layers[3].ffn(data["moe.u"].to(model.dtype), data["moe.image"], model.rounding)
    assert torch.equal(stats.ids_TK, data["moe.ids"])
    limit = {"f32_noquant": 1e-5, "f32_kv": 1e-5, "f32": 5e-3, "bf16": 2e-2}[mode]
    assert golden.relative_rms(got, data[f"moe.{mode}"]) <= limit


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 33])
@pytest.mark.parametrize("mode", ["f32_noquant", "f32", "bf16"])
def test_compressor(mode: str, num_rows: int) -> None:
    """A prefix of t tokens has the first floor(t / ratio) entries, in whatever pieces it came."""
    data, model = golden.load("compressor"), golden.model("a", mode)
    limit = {"f32_noquant": 1e-5, "f32": 2e-3, "bf16": 1e-2}[mode]
    for layer in (2, 8):
        attn, prefix = model.layers[layer].attn, f"layers.{layer}."
        num_entries = num_rows // attn.plan.ratio
        for way in WAYS:

            def body(state: AttentionState, rows: slice) -> dict[str, Tensor]:
                attn.write_entries(data["u"][rows].to(model.dtype), state)  # noqa: B023
                return {"last": torch.zeros(0)}

            states = []

            def spy(state: AttentionState, rows: slice, body: Callable = body, states: list = states) -> dict:
                states.append(state)
                return body(state, rows)

            _run(model, num_rows, way, spy)
            state = states[-1]
            if isinstance(state, PackState):
                main, key = (rows[0] for rows in state._entries[layer])
            else:
                main, key = state.state.entries[layer].all(), state.state.keys[layer].all()
            assert main.shape[0] == key.shape[0] == num_entries
            if num_entries == 0:
                continue
            for got, name in ((main, "main"), (key, "key")):
                want = data[f"{prefix}{mode}.{name}"][:num_entries]
                different = (got.float() != want).float().mean()
                assert golden.relative_rms(got, want) <= limit or different <= 0.005, (layer, way, name)


def test_pending_half_of_a_pair() -> None:
    data, model = golden.load("compressor"), golden.model("a", "f32_noquant")
    state = model.new_state(decoder_replay="off")
    with torch.inference_mode():
        model.layers[2].attn.write_entries(data["u"].float(), SequenceStep(state, 0, 33))
    content, gate = state.tails[2]
    torch.testing.assert_close(content[-1], data["layers.2.pending_wkv"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gate[-1], data["layers.2.pending_wgate"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["f32_noquant", "f32", "bf16"])
def test_indexer(mode: str) -> None:
    """Scores, selection and pool of a Full r2, the boundary and a Reindex layer, all fed the same rows."""
    data, model = golden.load("indexer"), golden.model("a", mode)
    u, latent = data["u"].to(model.dtype), data["qr"].to(model.dtype)
    from cedar.kernels.indexer import index_scores, mask_to_index
    from cedar.model.layers import round_input

    state = model.new_state(decoder_replay="off")
    step = SequenceStep(state, 0, 33)
    shared = SharedKV()
    with torch.inference_mode():
        for layer in (2, 8, 10):
            attn, prefix = model.layers[layer].attn, f"layers.{layer}.{mode}."
            attn.write_entries(u, step)
            source = attn.plan.kv_source
            query, weight = attn.indexer.queries(round_input(latent, model.rounding), u, step)
            keys = state.keys[source].all()
            scores = index_scores(query, weight, keys)
            visible = (torch.arange(33) + 1) // attn.plan.ratio
            hidden = torch.arange(keys.shape[0]) >= visible.unsqueeze(-1)
            want = data[prefix + "scores"]
            got = scores.masked_fill(hidden, -torch.inf)
            if layer != 10:
                assert torch.equal(got == -torch.inf, want == -torch.inf)
            shared = step.select(
                layer, source, query, weight, pool=shared.pool if layer == 10 else None, make_pool=layer == 8
            )
            seen = (want > -torch.inf) & (got > -torch.inf)
            difference = (got[seen] - want[seen]).abs()
            if mode == "f32_noquant":
                assert difference.max() <= 1e-5
                assert torch.equal(shared.selection, data[prefix + "selection"])
                if layer == 8:
                    assert torch.equal(mask_to_index(shared.pool, 3), data[prefix + "pool"])
            else:
                # a flipped FP8 or FP4 code moves a few scores; bf16 adds its own rounding
                limit = 1e-3 if mode == "f32" else 2e-2
                assert (difference > limit * want[seen].abs().max()).float().mean() <= 0.02
                same = (shared.selection == data[prefix + "selection"]).all(-1).float().mean()
                assert same >= (0.98 if mode == "f32" else 0.9), (layer, float(same))
