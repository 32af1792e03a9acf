"""Which of the model's own roundings are on.

Low-precision rounding is part of the released model's function. Training turns parts of it on stage by
stage, and tests turn it off to compare tightly.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """One switch per quantizer (architecture.md 4.4; `weights` is training's own, training.md 1.6).

    Attributes:
        activations: FP8 per 32 channels into every quantized linear (Q8).
        window_kv: FP8 window rows (Q8).
        main_kv: FP4 compressed entries (Q4s).
        index: FP4 index queries and keys (Q4m).
        weights: Round weights to their storage format in the forward pass, gains and the embedding included. A
            loaded checkpoint holds such values already, so only training sets it.
    """

    activations: bool = True
    window_kv: bool = True
    main_kv: bool = True
    index: bool = True
    weights: bool = False

    @classmethod
    def none(cls) -> Rounding:
        return cls(activations=False, window_kv=False, main_kv=False, index=False)

    @classmethod
    def cache_only(cls) -> Rounding:
        """The caches' formats without FP8 activations (golden mode `f32_kv`)."""
        return cls(activations=False)
