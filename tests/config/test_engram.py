"""The hash constants that every machine must derive alike (engram-dspark-vision-chat.md 1.2 to 1.4)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.config import presets
from cedar.config.engram import _is_prime, engram_hashes

MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}


def test_release_multipliers_are_whole() -> None:
    hashes = engram_hashes(presets.flash().engram)
    assert list(hashes) == [1, 14]
    for layer, expected in MULTIPLIERS.items():
        assert hashes[layer].multipliers == expected
        assert all(type(value) is int and value % 2 == 1 for value in hashes[layer].multipliers)
    # a compressed id times a multiplier stays below 2**63, so int64 never overflows
    assert max(max(values) for values in MULTIPLIERS.values()) * (99092 - 1) < 2**63


def test_release_primes_and_rows() -> None:
    hashes = engram_hashes(presets.flash().engram)
    primes = [prime for layer in (1, 14) for prime in hashes[layer].primes]
    assert (primes[0], primes[-1]) == (16000057, 16000889)
    assert len(primes) == len(set(primes)) == 48
    assert primes == sorted(primes)
    assert hashes[1].num_rows == 384006168
    assert hashes[14].num_rows == 384016682
    for entry in hashes.values():
        assert entry.offsets[0] == 0
        assert entry.offsets[-1] + entry.primes[-1] == entry.num_rows
        assert all(b - a == p for a, b, p in zip(entry.offsets, entry.offsets[1:], entry.primes, strict=False))


@pytest.mark.parametrize("name", ["nano", "micro", "mini", "small"])
def test_columns_of_a_preset_share_no_prime(name: str) -> None:
    config = presets.preset(name).engram
    hashes = engram_hashes(config)
    primes = [prime for entry in hashes.values() for prime in entry.primes]
    assert len(set(primes)) == len(primes) == len(config.layer_ids) * config.num_columns
    assert min(primes) >= config.vocab_size
    assert all(_is_prime(prime) for prime in primes)


def test_the_layer_id_is_the_seed_not_its_place() -> None:
    engram = presets.flash().engram
    alone = engram_hashes(dataclasses.replace(engram, layer_ids=(14,)))
    assert alone[14].multipliers == MULTIPLIERS[14]
    # alone, the layer takes the primes that layer 1 would have taken
    assert alone[14].primes == engram_hashes(engram)[1].primes


def test_the_vocabulary_bounds_the_multipliers() -> None:
    engram = presets.flash().engram
    small = engram_hashes(dataclasses.replace(engram, compressed_vocab_size=2**40))
    assert all(value < 2**24 for entry in small.values() for value in entry.multipliers)


def test_another_process_derives_the_same() -> None:
    """Sets of integers and a seeded draw depend on nothing that differs between processes."""
    code = "from cedar.config import engram, presets; print(engram.engram_hashes(presets.flash().engram))"
    environments = ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    answers = {subprocess.run([sys.executable, "-c", code], env=e, capture_output=True).stdout for e in environments}
    assert answers == {f"{engram_hashes(presets.flash().engram)}\n".encode()}


@given(st.integers(-10, 10_000))
def test_primes_by_trial_division(number: int) -> None:
    assert _is_prime(number) == (number > 1 and all(number % d for d in range(2, int(number**0.5) + 1)))


@pytest.mark.parametrize("liar", [2047, 3215031751, 3474749660383, 341550071728321, 3825123056546413051])
def test_strong_pseudoprimes_are_found_out(liar: int) -> None:
    """Composite numbers that pass the test for the first bases alone."""
    assert not _is_prime(liar)


# rows of "The capital of France is" behind BOS, at its last token and at its first (pad id 2 before the start)
WORKED = {
    (1, (0, 2, 2, 2)): (
        "5702652 24393184 39183301 61503783 78984481 90144770 103724983 121476532 131476717 152385926 164143652 "
        "191599181 198145581 217419202 238329687 247482304 257520185 283540304 288689443 315264704 322314652 "
        "348890037 367865216 380066193"
    ),
    (14, (0, 2, 2, 2)): (
        "14361964 29977809 32716444 61209771 67456205 84275051 108494439 120604547 132225184 150270452 174805952 "
        "178895254 193207923 211610196 226280582 252505246 261362261 279862797 301364059 312864848 328367036 "
        "349372619 363873742 372375971"
    ),
    (1, (242, 7208, 251, 5095)): (
        "8434518 28335418 33056762 54845833 79590735 82522014 107990915 114522034 130425857 150965795 160866148 "
        "176873966 204352630 218104334 238747352 249482421 265625474 283863772 292296123 304668435 328974802 "
        "341520388 359388308 379106837"
    ),
    (14, (242, 7208, 251, 5095)): (
        "15511642 19799350 44525188 61239392 69665586 94157954 98489139 126054713 139053356 149796646 167594211 "
        "189386395 202012761 221347336 228940866 253372258 257015096 287916013 294274728 315314213 323264185 "
        "338209388 366614273 380659356"
    ),
}


@pytest.mark.parametrize(("layer", "window"), list(WORKED))
def test_worked_rows_follow_from_the_constants(layer: int, window: tuple[int, ...]) -> None:
    """The whole hash in Python integers, newest id first."""
    constants = engram_hashes(presets.flash().engram)[layer]
    rows, mixed = [], 0
    for look_back, (compressed_id, multiplier) in enumerate(zip(window, constants.multipliers, strict=True)):
        mixed ^= compressed_id * multiplier
        for column in range(8 * (look_back - 1), 8 * look_back) if look_back else ():
            rows.append(mixed % constants.primes[column] + constants.offsets[column])
    assert rows == [int(row) for row in WORKED[layer, window].split()]
