"""`nh-128`: by its definition, and which damages it finds. Most are computed from the words that they change alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from nh_128 import KEYS, chunk_key, chunk_product, nh_128

from weightcast.format.bucket_digest import torch_digest

WORDS = 256
"""Of a chunk."""
HALF = np.uint64((1 << 32) - 1)
SHIFT = np.uint64(32)
LANE_KEYS = np.array(KEYS, dtype=np.uint64)
Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


def digest(words: Words) -> bytes:
    """Of a payload, as the package computes it."""
    found = torch_digest(torch.from_numpy(words.view(np.int64))).numpy()
    return bytes(found.astype("<i8").tobytes())


def payloads() -> dict[str, Words]:
    """Two chunks of each kind: a chunk of weights is seldom random."""
    rng = np.random.default_rng(33)
    weights = torch.from_numpy(rng.standard_normal(8 * WORDS) * 0.02).bfloat16().view(torch.int64).numpy()
    return {
        "zeros": np.zeros(2 * WORDS, np.uint64),
        "ones": np.full(2 * WORDS, (1 << 64) - 1, np.uint64),
        "random": rng.integers(0, 1 << 64, 2 * WORDS, np.uint64),
        "weights": weights.view(np.uint64),
        "counting": np.arange(2 * WORDS, dtype=np.uint64),
        "the keys' inverses": np.concatenate([-LANE_KEYS[0].view(np.int64), LANE_KEYS[0].view(np.int64)]).view(
            np.uint64
        ),
    }


PAYLOADS = payloads()
each_payload = pytest.mark.parametrize("name", PAYLOADS)


def products(words: Words, places: Words) -> list[Words]:
    """What words at these places of a chunk bring to each lane."""
    keys = [lane[places] for lane in LANE_KEYS]
    return [(((words + key) & HALF) * (((words >> SHIFT) + (key >> SHIFT)) & HALF)) for key in keys]


def changes(payload: Words, places: Words, damaged: Words) -> list[Words]:
    """By how much each lane of the first chunk changes where words [n, k] come to k different places, n times."""
    now, then = products(damaged, places), products(payload[places], places)
    return [(a - b).reshape(len(places), -1).sum(axis=1, dtype=np.uint64) for a, b in zip(now, then, strict=True)]


def num_missed(payload: Words, places: Words, damaged: Words) -> int:
    """How many of n damages of a payload's first chunk its digest does not show: its other chunks are the same."""
    lanes = [each.sum(dtype=np.uint64) for each in products(payload[:WORDS], np.arange(WORDS, dtype=np.uint64))]
    number = chunk_product([int(lane) for lane in lanes], 0)
    x, y = (int(lane) + change for lane, change in zip(lanes, changes(payload, places, damaged), strict=True))
    low = (x + np.uint64(chunk_key(0, 0))) * (y + np.uint64(chunk_key(1, 0)))
    # The upper halves are computed of those alone whose lower ones are equal.
    suspects = np.flatnonzero(low == np.uint64(number & ((1 << 64) - 1)))
    return sum(chunk_product([int(x[i]), int(y[i])], 0) == number for i in suspects)


@pytest.mark.parametrize("num_words", [0, 1, 31, 255, 256, 257, 2047, 2048, 2049, 3 * 2048 + 17])
@pytest.mark.parametrize("fill", ["random", "ones"])
def test_it_is_what_the_wire_format_says(num_words: int, fill: str) -> None:
    words = np.random.default_rng(num_words).integers(0, 1 << 64, num_words, dtype=np.uint64)
    if fill == "ones":
        words[:] = np.uint64((1 << 64) - 1)
    assert digest(words) == nh_128(words.tobytes())


def test_torch_computes_a_large_payload_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(1).integers(0, 1 << 64, 5000, dtype=np.uint64)
    whole = digest(words)
    monkeypatch.setattr("weightcast.format.bucket_digest._PIECE_WORDS", 4 * WORDS)
    assert digest(words) == whole == nh_128(words.tobytes())


def test_no_word_has_equal_keys_in_both_lanes() -> None:
    """So damage within 32 bits can't leave both lanes as they were: each is multiplied by another number."""
    for shift in (0, 32):
        halves = (LANE_KEYS >> np.uint64(shift)) & HALF
        assert (halves[0] != halves[1]).all()


@each_payload
def test_lanes_change_as_the_digest_does(name: str) -> None:
    """`changes` is what the tests below rely on."""
    payload, rng = PAYLOADS[name], np.random.default_rng(2)
    for _ in range(50):
        places = rng.choice(WORDS, (1, 3), replace=False).astype(np.uint64)
        damaged = rng.integers(0, 1 << 64, (1, 3), dtype=np.uint64)
        copy = payload.copy()
        copy[places[0]] = damaged[0]
        is_missed = digest(copy) == digest(payload)
        lanes = [each.sum(dtype=np.uint64) for each in products(payload[:WORDS], np.arange(WORDS, dtype=np.uint64))]
        after = [
            int(lane) + int(change[0]) for lane, change in zip(lanes, changes(payload, places, damaged), strict=True)
        ]
        moved = chunk_product(after, 0) - chunk_product([int(lane) for lane in lanes], 0)
        first, second = (int.from_bytes(digest(each)[:8], "little") for each in (copy, payload))
        assert (first - second - moved) % (1 << 64) == 0
        assert num_missed(payload, places, damaged) == is_missed == 0


@each_payload
def test_every_flipped_bit_is_found(name: str) -> None:
    payload = PAYLOADS[name]
    places = np.repeat(np.arange(WORDS, dtype=np.uint64), 64)[:, None]
    bits = np.tile(np.uint64(1) << np.arange(64, dtype=np.uint64), WORDS)[:, None]
    assert num_missed(payload, places, payload[places] ^ bits) == 0


@each_payload
def test_every_pair_of_flipped_bits_is_found(name: str) -> None:
    """134 million in a chunk. Two of different words are missed if one changes both lanes by the other's, negated."""
    payload = PAYLOADS[name]
    places = np.repeat(np.arange(WORDS, dtype=np.uint64), 64)[:, None]
    bits = np.tile(np.uint64(1) << np.arange(64, dtype=np.uint64), WORDS)[:, None]
    by_bit = changes(payload, places, payload[places] ^ bits)
    found = set(zip(*(change.tolist() for change in by_bit), strict=True))
    negated = set(zip(*((np.uint64(0) - change).tolist() for change in by_bit), strict=True))
    assert len(found) == places.size
    assert not found & negated
    pairs = np.array([(1 << a) | (1 << b) for a, b in itertools.combinations(range(64), 2)], dtype=np.uint64)
    places, masks = np.repeat(np.arange(WORDS, dtype=np.uint64), len(pairs))[:, None], np.tile(pairs, WORDS)[:, None]
    assert num_missed(payload, places, payload[places] ^ masks) == 0


@each_payload
def test_two_bits_of_one_place_are_found_at_every_distance(name: str) -> None:
    """A stuck line: the same bit of two words. Two top bits an even distance apart were once missed."""
    payload = PAYLOADS[name]
    pairs = np.array(list(itertools.combinations(range(WORDS), 2)), dtype=np.uint64)
    for bit in range(64):
        assert num_missed(payload, pairs, payload[pairs] ^ np.uint64(1 << bit)) == 0


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 255, 256, 257, 512, 768])
def test_two_signs_are_found_across_chunks(distance: int) -> None:
    rng = np.random.default_rng(distance)
    for kind in ("zeros", "weights"):
        payload = np.resize(PAYLOADS[kind], 5 * WORDS)
        for first in rng.integers(0, payload.size - distance, 20):
            copy = payload.copy()
            copy[[first, first + distance]] ^= np.uint64(1 << 63)
            assert digest(copy) != digest(payload)


@each_payload
def test_exchanged_words_are_found(name: str) -> None:
    payload = PAYLOADS[name]
    pairs = np.array(list(itertools.combinations(range(WORDS), 2)), dtype=np.uint64)
    differ = payload[pairs[:, 0]] != payload[pairs[:, 1]]
    pairs = pairs[differ]
    if len(pairs):
        assert num_missed(payload, pairs, payload[pairs[:, ::-1]]) == 0


def block_damages(payload: Words) -> Iterator[Words]:
    """Blocks exchanged, moved, zeroed and repeated; payloads shifted, cut and made longer."""
    data = payload.view(np.uint8)
    for size in (1, 2, 8, 64, 256, 2048, 4096):
        for start in range(0, data.size - size + 1, max(size, 512)):
            copy = data.copy()
            copy[start : start + size] = 0
            yield copy
        for start, other in itertools.permutations(range(0, data.size - size + 1, max(size, 1024)), 2):
            copy = data.copy()
            copy[start : start + size] = data[other : other + size]
            yield copy
            copy = copy.copy()
            copy[other : other + size] = data[start : start + size]
            yield copy
    for shift in (*range(1, 65), 256, 1024, 2048, 4096):
        yield np.roll(data, shift)
        yield np.concatenate([data[shift:], np.zeros(shift, np.uint8)])
    for num_words in (1, 32, 256, 512):
        yield data[: -8 * num_words]
        yield np.concatenate([data, np.zeros(8 * num_words, np.uint8)])


@pytest.mark.parametrize("name", ["zeros", "ones", "random", "weights"])
def test_damaged_blocks_are_found(name: str) -> None:
    payload = np.resize(PAYLOADS[name], 4 * WORDS)
    expected, num = digest(payload), 0
    for damaged in block_damages(payload):
        if not np.array_equal(damaged, payload.view(np.uint8)):
            assert digest(damaged.view(np.uint64)) != expected
            num += 1
    assert num > 7


@each_payload
def test_none_of_a_million_random_damages_is_missed(name: str) -> None:
    """Of one to four words, with random bits or bytes, or some bits flipped."""
    payload, rng, num = PAYLOADS[name], np.random.default_rng(4), 1_000_000 // len(PAYLOADS) // 4
    for num_words in (1, 2, 3, 4):
        places = np.argsort(rng.random((num, 8)), axis=1)[:, :num_words].astype(np.uint64)
        places += (8 * rng.integers(0, WORDS // 8, (num, 1))).astype(np.uint64)
        masks = rng.integers(1, 1 << 64, (num, num_words), dtype=np.uint64)
        few = rng.random(num) < 0.5
        masks[few] &= np.uint64(0xFF) << (8 * rng.integers(0, 8, (int(few.sum()), num_words))).astype(np.uint64)
        masks[masks == 0] = 1
        assert num_missed(payload, places, payload[places] ^ masks) == 0
