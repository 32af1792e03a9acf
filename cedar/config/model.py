"""The shape of a model: frozen, checked where it is built, free of torch.

Every size of the architecture lives in one of the parts below under the report's own word; the names
of the two published JSON layouts are a table in `config/load.py`. Schedules (which layer compresses,
whose keys it reads) are data: `config/layers.py` turns them into one plan per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cedar.errors import ConfigError

# an entry of a page must not straddle two pages, so a page is a multiple of every ratio and block
PAGE_TOKENS = 128


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _divides(name: str, value: int, divisor: int, why: str) -> None:
    _require(
        value > 0 and value % divisor == 0,
        f"{name} is {value}, expected a positive multiple of {divisor} ({why})",
    )


def _ascending(name: str, layer_ids: tuple[int, ...], num_layers: int) -> None:
    _require(
        list(layer_ids) == sorted(set(layer_ids)) and all(0 <= i < num_layers for i in layer_ids),
        f"{name} is {list(layer_ids)}, expected ascending layer ids below {num_layers}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """YaRN of the layers that read a compressed cache; `factor` 1 means none."""

    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Low-rank queries, one shared key-value vector a position, a window, and whose cache is read."""

    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerConfig:
    """Which compressed entries a query attends to, and the pool that later layers choose from."""

    num_heads: int
    head_dim: int
    topk: int
    source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Routed experts, one shared expert, and the clamp inside each."""

    num_routed_experts: int
    num_shared_experts: int
    num_experts_per_token: int
    inner_size: int
    routed_scaling_factor: float
    swiglu_limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperConnectionConfig:
    """Single-pass mHC: parallel residual streams and the Sinkhorn rounds of their mixing matrix."""

    num_streams: int
    sinkhorn_iterations: int
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramConfig:
    """Hashed n-gram memory. `vocab_size` is the smallest table of one (n, head) column."""

    layer_ids: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    num_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def num_columns(self) -> int:
        """Rows fetched per token and layer: one per n-gram size from 2 on and head."""
        return (self.max_ngram_size - 1) * self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """DSpark. `num_blocks` 0 means the checkpoint holds no draft."""

    num_blocks: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    num_routed_experts: int
    num_experts_per_token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """The image tower. `max_wh_ratio` None sets no limit on an image's shape."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that decides a model's tensors and its function.

    Raises:
        ConfigError: A size breaks a rule of the architecture or of the storage formats; the message
            names the key, what came and what was expected.

    Source: architecture.md 1 and training.md 5.1 (shape rules).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    initializer_range: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    attention: AttentionConfig
    indexer: IndexerConfig
    moe: MoEConfig
    mhc: HyperConnectionConfig
    engram: EngramConfig
    draft: DraftConfig
    vision: VisionConfig | None = field(default=None)

    def __post_init__(self) -> None:
        self._check_positive()
        self._check_sizes()
        self._check_schedule()

    @property
    def boundary_layer_id(self) -> int:
        """First decoder layer: the last layer that writes a compressed cache (derived, no key holds it)."""
        return self.attention.kv_source_layer_ids[-1]

    def _check_positive(self) -> None:
        """Every number but ids; what an absent module would need may be anything."""
        parts: dict[str, object] = {
            "": self,
            "attention.": self.attention,
            "attention.rope_scaling.": self.attention.rope_scaling,
            "indexer.": self.indexer,
            "moe.": self.moe,
            "mhc.": self.mhc,
            "engram.": self.engram if self.engram.layer_ids else None,
            "draft.": self.draft if self.draft.num_blocks else None,
            "vision.": self.vision,
        }
        for prefix, part in parts.items():
            for name in () if part is None else part.__dataclass_fields__:  # type: ignore[attr-defined]
                value = getattr(part, name)
                if isinstance(value, (int, float)) and not name.endswith(("token_id", "layer_id")):
                    _require(value > 0, f"{prefix}{name} is {value}, expected a positive number")

    def _check_sizes(self) -> None:
        a, i, m, e = self.attention, self.indexer, self.moe, self.engram
        why = "FP8 activation groups and MXFP4 groups hold 32 channels"
        _divides("hidden_size", self.hidden_size, 32, why)
        _divides("head_dim", a.head_dim, 32, why)
        _divides("q_lora_rank", a.q_lora_rank, 32, why)
        _divides("moe_intermediate_size", m.inner_size, 32, why)
        _divides("index_head_dim", i.head_dim, 32, why)
        _divides("num_attention_heads", a.num_heads, a.o_groups, "heads are cut into o_groups")
        _divides("num_attention_heads * head_dim / o_groups", a.num_heads * a.head_dim // a.o_groups, 32, why)
        _divides("o_lora_rank", a.o_lora_rank, 32, "no FP8 tile may straddle two output groups")
        _require(
            a.rope_head_dim % 2 == 0 and 0 < a.rope_head_dim < a.head_dim,
            f"qk_rope_head_dim is {a.rope_head_dim}, expected an even number below head_dim {a.head_dim}",
        )
        _require(
            a.rope_head_dim * 2 <= i.head_dim,
            f"qk_rope_head_dim is {a.rope_head_dim}, expected at most half of index_head_dim "
            f"{i.head_dim}: a fully rotated index key cannot match content at a distance",
        )
        _require(
            PAGE_TOKENS % i.candidate_block_size == 0,
            f"candidate_block_size is {i.candidate_block_size}, expected a divisor of the page ({PAGE_TOKENS})",
        )
        _require(
            0 < m.num_experts_per_token <= m.num_routed_experts,
            f"num_experts_per_tok is {m.num_experts_per_token}, expected 1..{m.num_routed_experts} (n_routed_experts)",
        )
        _require(m.num_shared_experts == 1, f"n_shared_experts is {m.num_shared_experts}, expected 1")
        for name, token_id in (
            ("bos_token_id", self.bos_token_id),
            ("eos_token_id", self.eos_token_id),
            ("pad_token_id", self.pad_token_id),
            ("image_token_id", self.image_token_id),
            ("engram_pad_token_id", e.pad_token_id),
        ):
            _require(
                0 <= token_id < self.vocab_size,
                f"{name} is {token_id}, expected an id below vocab_size {self.vocab_size}",
            )
        if self.vision is not None:
            _divides("vision hidden_size", self.vision.hidden_size, self.vision.num_heads, "it is cut into heads")
        if e.layer_ids:
            _divides("engram_head_dim", e.head_dim, 32, why)
            _require(e.max_ngram_size >= 2, f"engram_max_ngram_size is {e.max_ngram_size}, expected at least 2")

    def _check_schedule(self) -> None:
        a, i, d = self.attention, self.indexer, self.draft
        _ascending("kv_source_layer_ids", a.kv_source_layer_ids, self.num_layers)
        _ascending("index_source_layer_ids", i.source_layer_ids, self.num_layers)
        _ascending("engram_layer_ids", self.engram.layer_ids, self.num_layers)
        _require(
            len(a.compress_ratios) == self.num_layers + d.num_blocks,
            f"compress_ratios has {len(a.compress_ratios)} entries, expected {self.num_layers + d.num_blocks}: "
            f"num_hidden_layers {self.num_layers} and num_nextn_predict_layers {d.num_blocks}",
        )
        _require(
            all(r in (0, 1, 2) for r in a.compress_ratios),
            f"compress_ratios holds {sorted(set(a.compress_ratios))}, expected only 0 (window), 1 and 2",
        )
        _require(
            not any(a.compress_ratios[self.num_layers :]),
            "compress_ratios of the draft blocks must be 0: they read no compressed cache",
        )
        _require(bool(a.kv_source_layer_ids), "kv_source_layer_ids is empty, expected at least one layer")
        first = a.kv_source_layer_ids[0]
        _require(
            not any(a.compress_ratios[:first]) and all(a.compress_ratios[first : self.num_layers]),
            f"compress_ratios must be 0 before layer {first} (the first of kv_source_layer_ids) and 1 or 2 from it on",
        )
        missing = sorted(set(a.kv_source_layer_ids) - set(i.source_layer_ids))
        _require(not missing, f"index_source_layer_ids lacks {missing}: a layer that writes entries also indexes them")
        for source, following in zip(a.kv_source_layer_ids, (*a.kv_source_layer_ids[1:], self.num_layers), strict=True):
            group = set(a.compress_ratios[source:following])
            _require(
                len(group) == 1,
                f"compress_ratios of layers {source}..{following - 1} are {sorted(group)}, "
                f"expected one ratio: they all read the cache of layer {source}",
            )
        _require(
            i.candidate_source_layer_id == self.boundary_layer_id,
            f"candidate_source_layer_id is {i.candidate_source_layer_id}, expected {self.boundary_layer_id}, "
            "the last of kv_source_layer_ids",
        )
        _require(
            a.compress_ratios[self.boundary_layer_id] == 1,
            f"compress_ratios[{self.boundary_layer_id}] is {a.compress_ratios[self.boundary_layer_id]}, expected 1: "
            "the decoder keeps one entry a token",
        )
        if d.num_blocks:
            _require(bool(d.target_layer_ids), "dspark_target_layer_ids is empty, expected at least one layer")
            _ascending("dspark_target_layer_ids", d.target_layer_ids, self.num_layers)
            _divides("dspark_markov_rank", d.markov_rank, 32, "bf16 rows of whole groups")
            _require(
                d.num_experts_per_token <= d.num_routed_experts,
                f"dspark_num_experts_per_tok is {d.num_experts_per_token}, expected 1..{d.num_routed_experts} "
                "(dspark_n_routed_experts)",
            )
            _require(
                0 <= d.noise_token_id < self.vocab_size,
                f"dspark_noise_token_id is {d.noise_token_id}, expected an id below vocab_size {self.vocab_size}",
            )
