"""Where in the run a step lies: learning rate and stage."""

from __future__ import annotations

import math

from cedar.config.train import ScheduleConfig, TrainConfig


def rate_at(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """Learning rate of a step over its peak: linear warm-up, flat, cosine, low flat.

    Source: training.md 2.4.

    >>> [round(rate_at(s, 1000, ScheduleConfig()), 3) for s in (0, 99, 500, 750, 999)]
    [0.01, 1.0, 1.0, 0.55, 0.1]
    """
    # a short run warms up for a tenth of it at most
    warmup = max(1, min(max(config.warmup_steps, round(config.warmup_share * total_steps)), total_steps // 10))
    warm = min(1.0, (step + 1) / warmup)
    part = step / max(1, total_steps)
    width = max(config.decay_to - config.decay_from, 1e-9)
    fallen = min(1.0, max(0.0, (part - config.decay_from) / width))
    return warm * (config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(math.pi * fallen)))


def stage_at(step: int, total_steps: int, config: TrainConfig) -> int:
    """Index of the stage that a step belongs to; every step past the end belongs to the last one."""
    end = 0.0
    for index, stage in enumerate(config.stages):
        end += stage.share
        if step < round(end * total_steps):
            return index
    return len(config.stages) - 1
