"""Deltas beside other codecs, on the same pairs of checkpoints: bytes and time for each element that changed.

`python bench/deltas.py FOLDER [--peers SITE_PACKAGES] [--mib N] [--threads N]`. FOLDER is one that bench/delta_steps.py
has made, or any folder of folders with `base` and `next`, bfloat16 checkpoints. Each pair is one payload, for the
times of ours repeated up to N MiB so that no cache holds it. Times are CPU seconds of one thread, the least of some
rounds; with --threads above 1 they are wall seconds, and only of ours. SITE_PACKAGES is a folder for the peers alone,
which are left out without it:

    pip install --target SITE_PACKAGES --no-deps basilica-sdk zstandard xxhash

PULSE v3 is basilica-sdk's codec of positions by the old exponent and of zig-zag values, compressed by zstd-1, without
its headers and digests. Adding includes the base's digest. Install is a copy to live tensors, undo its inverse. Digest
is what digests of tensors add to encoding. The tables end with the bars of weightcast's own codecs that were missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from weightcast.format.packed_base import base_memory
from weightcast.native.deltas import count_changed, decode, encode, pieces_of
from weightcast.native.tables import CopyTable, chunk_lanes, digest, digest_of_lanes
from weightcast.sources.safetensors import SafetensorsSource

ROUNDS = 3
T = TypeVar("T")


@dataclasses.dataclass
class Figures:
    """Of one codec on one pair. Nanoseconds are for each element that changed; 0: there is no such step."""

    codec: str
    bytes_each: float
    encode_ns: float
    decode_ns: float
    apply_ns: float = 0.0
    undo_ns: float = 0.0
    install_ns: float = 0.0
    digest_ns: float = 0.0


@dataclasses.dataclass
class Whole:
    """Of one pair, in memcpys of its payload, which take `memcpy_seconds`.

    `receive`: decoding, adding to the base and to its digest. `install`: that, and copying to live tensors.
    """

    memcpy_seconds: float
    detect: float
    encode: float
    encode_and_advance: float
    receive: float
    install: float


class Clock:
    """The least time of a call in some rounds."""

    def __init__(self, threads: int) -> None:
        self._now = time.thread_time if threads == 1 else time.perf_counter

    def __call__(self, call: Callable[[], T], rounds: int = ROUNDS) -> tuple[float, T]:
        seconds = []
        for _ in range(rounds):
            start = self._now()
            found = call()
            seconds.append(self._now() - start)
        return min(seconds), found


def payload(folder: Path) -> torch.Tensor:
    source = SafetensorsSource(folder)
    regions = [source.regions()[spec.name] for spec in source.specs()]
    parts = [tensor.reshape(-1).view(torch.uint8) for ((_, tensor),) in regions]
    assert all(spec.dtype == "bfloat16" for spec in source.specs()), f"{folder} is not bfloat16"
    return torch.cat(parts)


def measure_ours(base: torch.Tensor, now: torch.Tensor, num_bytes: int, threads: int) -> tuple[Whole, list[Figures]]:
    """Sizes are those of the pair, times those of the pair repeated."""
    sizes = [encode(base, now, 2, by_classes=by_classes)[0] for by_classes in (False, True)]
    changed_once = count_changed(base, now, 2)
    base, now = (each.repeat(max(1, -(-num_bytes // base.nbytes))) for each in (base, now))
    clock, num_words = Clock(threads), base.nbytes // 2
    target = base_memory(base.nbytes)
    memcpy, _ = clock(lambda: target.copy_(base), 5)
    detect, changed = clock(lambda: count_changed(base, now, 2, threads=threads))
    rows, found = [], []
    for by_classes in (False, True):
        seconds, (delta, _) = clock(lambda: encode(base, now, 2, by_classes=by_classes, threads=threads))  # noqa: B023
        assert delta is not None
        known = base if by_classes else None
        decoding, changes = clock(lambda: decode(delta, num_words, 2, base=known, threads=threads))  # noqa: B023
        adding, digesting, installing, undoing = (list[float]() for _ in range(4))
        for _ in range(ROUNDS):
            target.copy_(base)
            lanes = chunk_lanes(target)
            seconds_each, changed_words = clock(lambda: changes.apply(target, lanes=lanes, threads=threads), 1)  # noqa: B023
            adding.append(seconds_each)
            assert torch.equal(target, now)
            digesting.append(clock(lambda: digest_of_lanes(lanes, target.nbytes))[0])  # noqa: B023
            live = base.clone()
            placed = CopyTable([live], [target]).rows_in(target)
            installing.append(clock(lambda: changed_words.scatter(placed, threads=threads), 1)[0])  # noqa: B023
            assert torch.equal(live, now)
            undoing.append(clock(lambda: changed_words.scatter(placed, former=True, threads=threads), 1)[0])  # noqa: B023
            assert torch.equal(live, base)
        assert digest_of_lanes(lanes, target.nbytes) == digest(now)
        advancing, following = (
            min(
                advanced(clock, base, now, target, by_classes=by_classes, pieces=pieces, threads=threads)
                for _ in range(ROUNDS)
            )
            for pieces in (None, pieces_of([(0, num_words, 0, 0, 0)]))
        )
        times = (seconds - detect, decoding, min(adding), min(undoing), min(installing), following - advancing)
        each = [s / changed * 1e9 for s in times]
        once = sizes[by_classes]
        assert once is not None
        found.append(Figures("delta by classes" if by_classes else "delta", once.nbytes / changed_once, *each))
        received = decoding + min(adding) + min(digesting)
        rows.append([detect, seconds, advancing, received, received + min(installing)])
    return Whole(memcpy, *(seconds / memcpy for seconds in rows[0])), found


def advanced(clock: Clock, base: torch.Tensor, now: torch.Tensor, target: torch.Tensor, **options: Any) -> float:
    """The time for encoding and the base's advance, in memory that is no cache's."""
    target.copy_(base)
    return clock(lambda: encode(target, now, 2, advance=True, **options), 1)[0]


def measure_peers(base: torch.Tensor, now: torch.Tensor) -> list[Figures]:
    import zstandard
    from basilica._pulse.expctx import decode_indices_expctx, encode_indices_expctx
    from basilica._pulse.values import decode_values_zz, encode_values_zz

    clock = Clock(1)
    compress, decompress = zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress
    old, new = (each.numpy().view(np.uint16) for each in (base, now))
    positions = np.flatnonzero(old != new)
    changed, former, values = len(positions), old[positions], new[positions]
    found = []

    def add(name: str, coded: Callable[[], Any], decoded: Callable[[Any], bool]) -> None:
        encoding, code = clock(coded, 1)
        decoding, is_right = clock(lambda: decoded(code), 1)
        assert is_right, name
        size = len(code) if isinstance(code, bytes) else sum(map(len, code))
        found.append(Figures(name, size / changed, encoding / changed * 1e9, decoding / changed * 1e9))

    def pulse() -> tuple[bytes, bytes]:
        indices = encode_indices_expctx(positions, old)
        return compress(indices), compress(encode_values_zz(former, values))

    def from_pulse(code: tuple[bytes, bytes]) -> bool:
        at = decode_indices_expctx(decompress(code[0]), changed, old, 1)
        return np.array_equal(decode_values_zz(decompress(code[1]), old[at], changed).view(np.uint16), values)

    add("PULSE v3", pulse, from_pulse)

    def absolute() -> tuple[bytes, bytes]:
        return positions.astype(np.int32).tobytes(), values.tobytes()

    def from_absolute(code: tuple[bytes, bytes]) -> bool:
        at = np.frombuffer(code[0], np.int32)
        return np.array_equal(at, positions) and np.array_equal(np.frombuffer(code[1], np.uint16), values)

    add("int32 + value", absolute, from_absolute)
    wanted = (old ^ new).tobytes()
    add("XOR + zstd-1", lambda: compress((old ^ new).tobytes()), lambda code: decompress(code) == wanted)
    return found


def bars(density: float, whole: Whole, found: dict[str, Figures]) -> list[tuple[str, float, float]]:
    """What was asked for at about this density: its name, the figure, and the most that it may be."""
    plain, classes = found["delta"], found["delta by classes"]
    wanted: list[tuple[str, float, float]] = []
    for at, most, most_by_classes in ((0.002, 1.6, 1.12), (0.01, 1.3, 0.95), (0.1, 0.95, None)):
        if at / 1.35 < density < at * 1.35:
            wanted.append((f"bytes each at {at:.1%}", plain.bytes_each, most))
            if most_by_classes is not None:
                wanted.append((f"bytes each by classes at {at:.1%}", classes.bytes_each, most_by_classes))
    if 0.0075 < density < 0.0135:
        steps = [("encode", plain.encode_ns, 12), ("encode by classes", classes.encode_ns, 30)]
        steps += [("decode", plain.decode_ns, 10), ("apply", plain.apply_ns, 20), ("undo", plain.undo_ns, 20)]
        steps.append(("digest of tensors", plain.digest_ns, 8))
        wanted += [(f"{name} ns", ns, most) for name, ns, most in steps]
        wanted += [("detection, memcpys", whole.detect, 1.5), ("receiver, memcpys", whole.install, 1.2)]
        wanted.append(("with the new base in the same pass, memcpys", whole.encode_and_advance, 2.2))
    if density < 0.0027:
        wanted.append(("receiver at 0.2%, memcpys", whole.install, 0.4))
    if "PULSE v3" in found:
        wanted.append(("bytes each by classes beside PULSE v3", classes.bytes_each, found["PULSE v3"].bytes_each))
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", type=Path, metavar="SITE_PACKAGES")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peers:
        sys.path.append(str(options.peers))
    missed = []
    for pair in sorted({path.parent for path in options.folder.glob("*/base")}):
        base, now = (payload(pair / name) for name in ("base", "next"))
        whole, found = measure_ours(base, now, options.mib << 20, options.threads)
        if options.peers and options.threads == 1:
            found += measure_peers(base, now)
        density = count_changed(base, now, 2) / (base.nbytes // 2)
        print(f"\n{pair.name}: {density:.3%} of {base.nbytes // 2:,} elements changed; {in_memcpys(whole)}")
        steps = ("encode", "decode", "apply", "undo", "install", "digest")
        print(f"{'codec':18}{'bytes':>8}{''.join(f'{step:>8}' for step in steps)}  ns, each")
        for it in found:
            figures = (it.encode_ns, it.decode_ns, it.apply_ns, it.undo_ns, it.install_ns, it.digest_ns)
            shown = "".join(f"{ns:8.1f}" if ns else f"{'-':>8}" for ns in figures)
            print(f"{it.codec:18}{it.bytes_each:8.3f}{shown}")
        for name, figure, most in bars(density, whole, {it.codec: it for it in found}):
            print(f"  {name}: {figure:.3g}, bar {most:.3g}: {'reached' if figure <= most else 'MISSED'}")
            missed += [f"{pair.name} {name}"] * (figure > most)
    print(f"\nmissed: {'; '.join(missed) or 'none'}")


def in_memcpys(it: Whole) -> str:
    return (
        f"a memcpy takes {it.memcpy_seconds * 1e3:.1f} ms. In memcpys: detection {it.detect:.2f}, with encoding "
        f"{it.encode:.2f}, with the base's advance {it.encode_and_advance:.2f}; receiver {it.receive:.2f}, "
        f"with the install {it.install:.2f}"
    )


if __name__ == "__main__":
    main()
