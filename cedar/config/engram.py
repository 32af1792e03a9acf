"""The constants of the n-gram hash, derived from the config alone: multipliers, primes, offsets.

They exist in no checkpoint, so every machine must derive the same ones; all of it is integer arithmetic
and one draw of numpy's PCG64, whose stream is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cedar.config.model import EngramConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramHash:
    """One layer's hash.

    Attributes:
        multipliers: One odd number per look-back, current token first; above 2**53, keep them integers.
        primes: One modulus per column, column = (n - 2) * heads + head.
        offsets: First table row of each column (exclusive running sum of the primes).
        num_rows: Height of the table.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_rows: int


def _is_prime(number: int) -> bool:
    """Miller-Rabin with the bases that decide every number below 3.3e24."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    if number < 2:
        return False
    for base in bases:
        if number % base == 0:
            return number == base
    odd, shift = number - 1, 0
    while odd % 2 == 0:
        odd, shift = odd // 2, shift + 1
    for base in bases:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(shift - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


@lru_cache(maxsize=32)
def engram_hashes(config: EngramConfig) -> dict[int, EngramHash]:
    """Hash constants by layer id.

    The running prime restarts at `vocab_size - 1` for each (layer, n), but a prime taken once is never
    taken again by any layer.

    Source: engram-dspark-vision-chat.md 1.2 and 1.3.

    >>> from cedar.config.presets import flash
    >>> hashes = engram_hashes(flash().engram)
    >>> hashes[1].num_rows, hashes[14].num_rows
    (384006168, 384016682)
    >>> hashes[14].multipliers[0]
    67716810739261
    """
    bound = max(1, (2**63 - 1) // config.compressed_vocab_size // 2)
    used: set[int] = set()
    hashes = {}
    for layer in config.layer_ids:
        draw = np.random.default_rng(10007 * layer).integers(
            low=0, high=bound, size=(config.max_ngram_size,), dtype=np.int64
        )
        primes = []
        for _ in range(2, config.max_ngram_size + 1):
            running = config.vocab_size - 1
            for _ in range(config.num_heads):
                running += 1
                while running in used or not _is_prime(running):
                    running += 1
                used.add(running)
                primes.append(running)
        offsets = [sum(primes[:column]) for column in range(len(primes))]
        hashes[layer] = EngramHash(
            multipliers=tuple(2 * int(value) + 1 for value in draw),
            primes=tuple(primes),
            offsets=tuple(offsets),
            num_rows=sum(primes),
        )
    return hashes
