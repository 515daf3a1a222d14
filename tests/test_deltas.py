"""Deltas: bytes as their format says, round trips of any bits, damage."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from delta_code import decoded
from golden.objects import delta_pair

from weightcast.native import _core
from weightcast.native.deltas import Changes, Pieces, count_changed, decode, encode, pieces_of
from weightcast.native.tables import CopyTable, chunk_lanes, digest, digest_of_lanes, digest_words

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
CHUNK_WORDS = 1 << 20
GOLDEN = Path(__file__).parent / "golden"


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def weights(num_words: int, density: float, seed: int = 0, most: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A payload of bf16 weights, and another where small ones have changed more often."""
    rng = np.random.default_rng(seed)
    base = torch.from_numpy(rng.normal(0, 0.02, num_words).astype(np.float32)).bfloat16()
    scale = base.float().abs().clamp(min=1e-4).numpy()
    is_changed = rng.random(num_words) < density * scale.mean() / scale
    steps = rng.integers(1, most + 1, num_words) * rng.choice([-1, 1], num_words) * is_changed
    words = base.view(torch.int16) + torch.from_numpy(steps.astype(np.int16))
    return base.view(torch.uint8), words.view(torch.uint8)


def thirds(words: torch.Tensor) -> Pieces:
    """Thirds of the words, the second one left out, from the middle of a tensor on."""
    third, left = len(words) // 3, len(words) - len(words) // 3 * 2
    parts = [(0, third, 5000), (third, 0, 7), (2 * third, left, 1 << 40)]
    sums = [digest_words(words[at : at + n], first, (1,)) if n else (0, 0) for at, n, first in parts]
    return pieces_of((*part, *each) for part, each in zip(parts, sums, strict=True))


def require_round_trip(base: torch.Tensor, payload: torch.Tensor, word_bytes: int) -> list[torch.Tensor | None]:
    """By either codec and any number of threads, there and back again; the deltas."""
    former, found = base.clone(), []
    words = [each.clone().view(WORDS[word_bytes]).to(torch.int64) for each in (base, payload)]
    pieces, pieces_after = (thirds(each.clone().view(WORDS[word_bytes])) for each in (base, payload))
    expected = (words[1] - words[0]).numpy()
    for by_classes in (False, True):
        delta, changed = encode(base, payload, word_bytes, by_classes=by_classes)
        options = {"by_classes": by_classes, "advance": True, "pieces": pieces.copy(), "threads": 3}
        again, _ = encode(base.clone(), payload, word_bytes, **options)
        assert np.array_equal(options["pieces"], pieces_after)
        assert changed == count_changed(base, payload, word_bytes, threads=2) == np.count_nonzero(expected)
        assert (delta is None and again is None) or (again is not None and torch.equal(delta, again))
        found.append(delta)
        if delta is None:
            continue
        assert delta.nbytes < payload.nbytes
        assert delta.nbytes % 8 == 0
        changes = decode(delta, len(expected), word_bytes, base=base if by_classes else None, threads=3)
        assert np.array_equal(changes.positions, np.flatnonzero(expected))
        assert np.array_equal(changes.differences, expected[changes.positions])
        lanes = chunk_lanes(base, threads=2) if base.nbytes % 8 == 0 else None
        changed = changes.apply(base, lanes=lanes, threads=3)
        assert torch.equal(base, payload)
        assert lanes is None or digest_of_lanes(lanes, base.nbytes) == digest(payload)
        changed.scatter(CopyTable([base], [payload]).rows_in(payload), former=True, threads=3)
        assert torch.equal(base, former)
    return found


# --- the code ---


@pytest.mark.parametrize("by_classes", [False, True])
def test_a_delta_has_the_bytes_that_it_had(by_classes: bool) -> None:
    delta, changed = encode(*delta_pair(), 2, by_classes=by_classes)
    assert delta is not None
    assert changed == 8
    assert delta.numpy().tobytes() == (GOLDEN / f"delta{'_classes' * by_classes}.bin").read_bytes()


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
@pytest.mark.parametrize("by_classes", [False, True])
@pytest.mark.parametrize("density", [0.003, 0.2, 1.0])
def test_a_delta_is_what_the_wire_format_says(word_bytes: int, by_classes: bool, density: float) -> None:
    base, payload = noise(12_004), noise(12_004)
    words = payload.view(WORDS[word_bytes])
    rng = np.random.default_rng(1)
    is_changed = torch.from_numpy(rng.random(len(words)) < density)
    words[is_changed] += torch.from_numpy(rng.integers(-4, 5, len(words))).to(words.dtype)[is_changed]
    delta, _ = encode(base, payload, word_bytes, by_classes=by_classes)
    assert delta is not None
    found = decoded(delta.numpy().tobytes(), len(words), word_bytes, base.numpy().tobytes())
    former, now = (each.view(WORDS[word_bytes]).tolist() for each in (base, payload))
    assert found == {i: b - a for i, (a, b) in enumerate(zip(former, now, strict=True)) if a != b}


def test_what_changed_beyond_a_code_is_dense() -> None:
    scattered = noise(1 << 12, seed=1)
    changed = scattered.clone()
    changed[:3900] = noise(3900, seed=2)
    assert require_round_trip(scattered, changed, 2) == [None, None]
    # A chunk that is another beside one that is as it was.
    base = noise(4 * CHUNK_WORDS)
    payload = base.clone()
    payload[: 2 * CHUNK_WORDS] = noise(2 * CHUNK_WORDS, seed=3)
    delta, _ = require_round_trip(base, payload, 2)
    assert delta is not None
    kinds = delta.numpy()[7:16:8].tolist()
    assert kinds == [3, 0]


@pytest.mark.parametrize("density", [0.002, 0.01, 0.1])
def test_small_weights_change_more_often(density: float) -> None:
    """Of their changes 1 in 10 is by more than 1."""
    base, payload = weights(2 * CHUNK_WORDS, density)
    words = payload.view(torch.int16)
    large = torch.from_numpy(np.flatnonzero(words.numpy() != base.view(torch.int16).numpy())[::10])
    words[large] += torch.where(words[large] > base.view(torch.int16)[large], 1, -1).to(torch.int16)
    plain, by_classes = require_round_trip(base, payload, 2)
    assert plain is not None
    assert by_classes is not None
    num_changed = count_changed(base, payload, 2)
    most = {0.002: (1.6, 1.12), 0.01: (1.3, 0.95), 0.1: (0.95, 0.95)}[density]
    assert plain.nbytes / num_changed < most[0]
    assert by_classes.nbytes / num_changed < most[1]


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
@pytest.mark.parametrize("num_words", [1, 2, 7, 31, 64, 65, 1000, CHUNK_WORDS + 1])
def test_any_length_and_any_number_of_changes(word_bytes: int, num_words: int) -> None:
    base = noise(num_words * word_bytes, num_words)
    for changed in {0, 1, min(5, num_words), num_words}:
        payload = base.clone()
        positions = np.random.default_rng(changed).choice(num_words, changed, replace=False)
        payload.view(WORDS[word_bytes])[torch.from_numpy(positions)] += 1
        delta, _ = require_round_trip(base, payload, word_bytes)
        assert (delta is not None) or num_words * word_bytes < 600
    for at in (0, num_words - 1):
        payload = base.clone()
        payload.view(WORDS[word_bytes])[at] ^= -1
        require_round_trip(base, payload, word_bytes)


def test_nothing_changed() -> None:
    base = noise(4 * CHUNK_WORDS)
    for delta in require_round_trip(base, base.clone(), 2):
        assert delta is not None
        assert delta.tolist() == [0] * 16
    assert encode(base[:0], base[:0], 2) == (None, 0)


ODD = {
    torch.bfloat16: [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 1e-40, 3e38],
    torch.float16: [0.0, -0.0, float("nan"), float("inf"), 6e-8, -65504.0],
    torch.float32: [0.0, -0.0, float("nan"), float("inf"), 1e-45, -3e38],
    torch.float8_e4m3fn: [0.0, -0.0, float("nan"), 448.0, -0.002],
    torch.float64: [0.0, -0.0, float("nan"), float("inf"), 1e300, -1e-300],
    torch.int64: [0, -1, 1 << 62, -(1 << 63), 7],
}


@pytest.mark.parametrize("dtype", ODD, ids=str)
def test_any_bits_travel(dtype: torch.dtype) -> None:
    values = torch.tensor(ODD[dtype], dtype=torch.int64 if dtype == torch.int64 else torch.float64).to(dtype)
    bits = values.view(torch.uint8).view(len(values), -1)
    generator = torch.Generator().manual_seed(0)
    base, payload = (bits[torch.randint(len(bits), (3000,), generator=generator)].reshape(-1) for _ in range(2))
    payload[: len(base) // 2] = base[: len(base) // 2]
    require_round_trip(base.clone(), payload.clone(), min(dtype.itemsize, 4))
    every = torch.arange(1 << 16).to(torch.int32).view(torch.int16)[::2].contiguous()
    flipped = every.clone()
    flipped[::3] ^= -0x8000
    require_round_trip(every.view(torch.uint8), flipped.view(torch.uint8), 2)


def test_memory_need_not_be_aligned() -> None:
    base, payload = weights(5000, 0.1)
    skewed, other = torch.zeros(10_001, dtype=torch.uint8)[1:], torch.zeros(10_003, dtype=torch.uint8)[3:]
    skewed.copy_(base)
    other.copy_(payload)
    require_round_trip(skewed, other, 2)


# --- damage ---


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_delta_is_refused_or_is_another(seed: int) -> None:
    rng = random.Random(seed)
    base, payload = weights(30_000, rng.choice([0.002, 0.05]), seed, most=1 + 40 * (seed % 2))
    former, refused = base.clone(), 0
    for by_classes in (False, True):
        delta, num_changed = encode(base, payload, 2, by_classes=by_classes)
        assert delta is not None
        for _ in range(400):
            damaged = delta.clone()[: rng.choice([delta.nbytes, rng.randrange(delta.nbytes)])]
            for _ in range(rng.randrange(4) if damaged.nbytes < delta.nbytes else rng.randrange(1, 4)):
                if damaged.nbytes:
                    damaged[rng.randrange(rng.choice([damaged.nbytes, min(damaged.nbytes, 24)]))] = rng.randrange(256)
            num_words = rng.choice([30_000, 30_000, rng.randrange(1, 60_000)])
            own = (
                base[: 2 * num_words] if 2 * num_words <= base.nbytes else torch.zeros(2 * num_words, dtype=torch.uint8)
            )
            try:
                changes = decode(damaged, num_words, 2, base=own if by_classes else None)
            except ValueError:
                refused += 1
                continue
            assert len(changes.positions) <= num_words
            assert (np.diff(changes.positions.astype(np.int64)) > 0).all()
            assert (np.abs(changes.differences) < 1 << 16).all()
            assert (changes.differences != 0).all()
        assert num_changed
        assert torch.equal(base, former)
    assert refused > 400


def a_delta() -> torch.Tensor:
    delta, _ = encode(*weights(30_000, 0.01), 2)
    assert delta is not None
    return delta


def with_row(size: int | None = None, count: int | None = None, kind: int | None = None) -> torch.Tensor:
    delta = a_delta()
    row = delta[:8].tolist()
    size = int.from_bytes(bytes(row[:4]), "little") if size is None else size
    count = int.from_bytes(bytes(row[4:7]), "little") if count is None else count
    made = size.to_bytes(4, "little") + count.to_bytes(3, "little") + bytes([row[7] if kind is None else kind])
    delta[:8] = torch.tensor(list(made), dtype=torch.uint8)
    return delta


IMPOSSIBLE = "a row of its table is invalid"


@pytest.mark.parametrize(
    ("delta", "why"),
    [
        (torch.zeros(0, dtype=torch.uint8), "it is shorter than its table, or not a multiple of 8 bytes long"),
        (torch.zeros(4, dtype=torch.uint8), "it is shorter than its table, or not a multiple of 8 bytes long"),
        (torch.zeros(16, dtype=torch.uint8), "its length is not that of its table and chunks"),
        (a_delta()[:-8].clone(), "its length is not that of its table and chunks"),
        (with_row(size=0), IMPOSSIBLE),
        (with_row(size=(1 << 32) - 1), IMPOSSIBLE),
        (with_row(count=0), IMPOSSIBLE),
        (with_row(count=30_001), IMPOSSIBLE),
        (with_row(count=(1 << 24) - 1), IMPOSSIBLE),
        (with_row(count=29_999), IMPOSSIBLE),
        (with_row(kind=0), IMPOSSIBLE),
        (with_row(kind=2), "it is coded by classes and needs a base"),
        (with_row(kind=3), IMPOSSIBLE),
        (with_row(kind=4), IMPOSSIBLE),
        (with_row(count=5), "one of its chunks is damaged"),
    ],
)
def test_a_hostile_table_is_refused_before_anything_is_allocated(delta: torch.Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(delta, 30_000, 2)


def test_each_change_needs_two_bits() -> None:
    """So that a delta of some bytes can't ask for memory of some gigabytes."""
    delta = torch.zeros(24, dtype=torch.uint8)
    delta[:8] = torch.tensor([16, 0, 0, 0, 65, 0, 0, 1])
    with pytest.raises(ValueError, match=IMPOSSIBLE):
        _core.delta_count(delta.numpy(), CHUNK_WORDS, 2, False)
    delta[4] = 64
    assert _core.delta_count(delta.numpy(), CHUNK_WORDS, 2, False) == 64


def test_a_wrong_base_gives_other_changes_or_an_error() -> None:
    base, payload = weights(30_000, 0.01)
    delta, _ = encode(base, payload, 2, by_classes=True)
    assert delta is not None
    with pytest.raises(ValueError, match="one of its chunks is damaged"):
        decode(delta, 30_000, 2, base=torch.zeros_like(base))
    with pytest.raises(ValueError, match="the payload has 59998 bytes, expected 60000"):
        decode(delta, 30_000, 2, base=base[2:])


def test_lengths_and_words_have_to_fit() -> None:
    base, payload = weights(1000, 0.1)
    for refused in (
        lambda: encode(base[:-2], payload, 2),
        lambda: encode(base[:-1], payload[:-1], 2),
        lambda: count_changed(base, payload[2:], 2),
        lambda: encode(base, payload, 8),
        lambda: encode(base, payload, 0),
        lambda: encode(base.view(torch.int16), payload, 2),
        lambda: decode(a_delta(), 30_000, 2).apply(base),
        lambda: decode(a_delta(), (1 << 32) + 1, 2),
    ):
        with pytest.raises(ValueError, match=r"words|word_bytes is|the payload is|can.t be decoded"):
            refused()


def test_rows_of_pieces_have_five_words() -> None:
    base, payload = weights(1000, 0.2)
    with pytest.raises(ValueError, match=r"48 bytes of rows of pieces at .*, expected 5 aligned elements of 8 bytes"):
        encode(base, payload, 2, advance=True, pieces=np.zeros(6, np.uint64))
    assert not torch.equal(base, payload)


def test_changes_that_are_not_in_order_are_refused() -> None:
    payload = torch.zeros(8, dtype=torch.uint8)
    for positions, differences in ([3, 1], [1, 1]), ([1, 1], [1, 1]), ([0, 4], [1, 1]):
        made = Changes(np.array(positions, np.uint32), np.array(differences, np.int64), 4, 2)
        with pytest.raises(ValueError, match="change 1 is not above the one before, or not below 4"):
            made.apply(payload)
    with pytest.raises(ValueError, match=r"8 bytes of differences at .*, expected 2 aligned elements of 8 bytes"):
        Changes(np.array([0, 1], np.uint32), np.array([1], np.int64), 4, 2).apply(payload)
    one = Changes(np.array([0], np.uint32), np.array([1], np.int64), 4, 2)
    with pytest.raises(ValueError, match=r"32 bytes of lanes at .*, expected 2 aligned elements of 8 bytes"):
        one.apply(payload, lanes=np.zeros((2, 2), np.uint64))
    with pytest.raises(ValueError, match="lanes of 2 chunks, expected those of 8 bytes"):
        digest_of_lanes(np.zeros((2, 2), np.uint64), 8)
    assert not payload.any()


# --- where copies would bring the words ---


def test_changes_go_where_copies_bring_the_words() -> None:
    """A rank's part of rows, of columns, a transposed one, and one that is kept twice."""
    base, payload = weights(6 * 40 * 64, 0.2)
    parts = base.view(torch.bfloat16).view(6, 40, 64)
    sources = [parts[0], parts[1, 10:20], parts[2, :, 16:32], parts[3].t(), parts[4, ::2, ::4], parts[4], parts[5, 3]]
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    copies = CopyTable(targets, sources)
    assert not copies.others
    copies.run()
    before = [target.clone() for target in targets]
    delta, _ = encode(base, payload, 2)
    assert delta is not None
    changes, rows = decode(delta, 6 * 40 * 64, 2), copies.rows_in(base)
    changed = changes.apply(base)
    for former, expected in ((False, sources), (True, before), (True, before), (False, sources)):  # `former` twice
        changed.scatter(rows, former=former, threads=3)
        for target, source in zip(targets, expected, strict=True):
            assert torch.equal(target.view(torch.int16), source.view(torch.int16))


def test_a_copy_that_cuts_words_takes_no_changes() -> None:
    base, payload = weights(1000, 0.2)
    target = torch.zeros(99, dtype=torch.uint8)
    delta, _ = encode(base, payload, 2)
    assert delta is not None
    changed = decode(delta, 1000, 2).apply(base.clone())
    for source in (base[1:100], base[:99]):
        with pytest.raises(ValueError, match="row 0 of the table can't take changes"):
            changed.scatter(CopyTable([target], [source]).rows_in(base))
    with pytest.raises(ValueError, match="its source is outside of the payload"):
        changed.scatter(CopyTable([target[:98]], [noise(98)]).rows_in(base))
    assert not target.any()
