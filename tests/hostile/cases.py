"""Malformed manifests and messages as data: name -> (bytes, the fault they are refused with, what the text says)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightcast.format import manifest as m

Json = dict[str, Any]
Case = tuple[bytes, str, str]

RUN = "0123456789abcdef" * 2
PROTOCOL_1 = (Path(__file__).parent / "protocol_1" / "manifest.json").read_bytes()
"""The manifest of the golden files before protocol 2."""

VALID: Json = {
    "protocol": 4,
    "digest_kind": "nh-128",
    "buckets": [1024, 512],
    "forms": [
        {"dtype": "bfloat16", "shape": [16, 16]},
        {"dtype": "float32", "shape": [16]},
        {"dtype": "int8", "shape": [0, 4]},
        {"dtype": "int64", "shape": []},
    ],
    "names": ["embed.weight", "norm.weight", "empty", "step"],
    "form_numbers": [0, 1, 2, 3],
    "bucket_numbers": [-1, 0, -1, 1],
    "offsets_bytes": [0, 256, 0, 256],
    "pieces": {
        "embed.weight": [
            {"bucket": 0, "offset_bytes": 0, "region": {"offsets": [0, 0], "sizes": [8, 16]}},
            {"bucket": 1, "offset_bytes": 0, "region": {"offsets": [8, 0], "sizes": [8, 16]}},
        ]
    },
    "aliases": {"embed.weight": ["head.weight"]},
    "groups": {"norm.weight": "norm"},
}

EMBED, NORM, EMPTY, STEP = range(4)


def changed(change: Callable[[Json], object]) -> bytes:
    """The valid manifest after `change`, as JSON."""
    document = copy.deepcopy(VALID)
    change(document)
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


def with_(*path: str | int, value: Any) -> bytes:
    """The valid manifest with one value replaced."""

    def change(document: Json) -> None:
        target: Any = document
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return changed(change)


def without(*path: str | int) -> bytes:
    def change(document: Json) -> None:
        target: Any = document
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]

    return changed(change)


def raw_replace(old: str, new: str) -> bytes:
    """For what Python's own JSON would not write."""
    text = json.dumps(VALID)
    assert old in text
    return text.replace(old, new, 1).encode()


def _piece(bucket: int, offset_bytes: int, offsets: list[int], sizes: list[int]) -> Json:
    return {"bucket": bucket, "offset_bytes": offset_bytes, "region": {"offsets": offsets, "sizes": sizes}}


def _many_tensors() -> bytes:
    return changed(lambda d: d.update(names=[""] * (m.MAX_TENSORS + 1)))


def _only(document: Json, names: list[str], form: Json) -> None:
    """Replace the tensors by others of one form, which are in `pieces` or nowhere."""
    zeros = [0] * len(names)
    document.update(names=names, forms=[form] if names else [], form_numbers=zeros, offsets_bytes=zeros)
    document.update(bucket_numbers=[-1] * len(names), pieces={}, aliases={}, groups={})


def _pinwheels(side: int, num_tensors: int = 1) -> bytes:
    """Rings of four strips, one in the other, that no plane parts: disjoint, but more of them than may be compared."""
    boxes = [([side // 2, side // 2], [1, 1])]
    for low in range(side // 2):
        high = side - 1 - low
        long = high - low
        boxes += [([low, low], [1, long]), ([low, high], [long, 1])]
        boxes += [([high, low + 1], [1, long]), ([low + 1, low], [long, 1])]
    names = [f"w{bucket}" for bucket in range(num_tensors)]

    def change(document: Json) -> None:
        _only(document, names, {"dtype": "int8", "shape": [side, side]})
        for bucket, name in enumerate(names):
            document["pieces"][name] = [_piece(bucket, 1280 * i, *box) for i, box in enumerate(boxes)]
        document["buckets"] = [1280 * len(boxes)] * num_tensors

    return changed(change)


def _renumber(document: Json, to: dict[int, int]) -> None:
    document["bucket_numbers"] = [to.get(bucket, bucket) for bucket in document["bucket_numbers"]]
    for piece in document["pieces"]["embed.weight"]:
        piece["bucket"] = to.get(piece["bucket"], piece["bucket"])


def _widen_norm(document: Json) -> None:
    document["forms"][NORM]["shape"] = [100]
    document["offsets_bytes"][NORM] = 0
    document["pieces"]["embed.weight"][0]["offset_bytes"] = 256


def _cut_step(document: Json) -> None:
    document["bucket_numbers"][STEP] = -1
    document["pieces"]["step"] = [_piece(1, 256, [], []), _piece(0, 512, [], [])]


PIECES = ("pieces", "embed.weight")
FIRST = (*PIECES, 0)
REGION = (*FIRST, "region")
VALID_BYTES = json.dumps(VALID).encode()

MANIFESTS: dict[str, Case] = {
    # syntax
    "nothing": (b"", "syntax", "not the JSON of a Manifest.*0 bytes"),
    "truncated in the middle": (VALID_BYTES[: len(VALID_BYTES) // 2], "syntax", "truncated"),
    "truncated by one byte": (VALID_BYTES[:-1], "syntax", "truncated"),
    "a byte too many": (VALID_BYTES + b"}", "syntax", "trailing"),
    "two manifests": (VALID_BYTES * 2, "syntax", "trailing"),
    "zero bytes": (bytes(64), "syntax", "malformed"),
    "byte order mark": (b"\xef\xbb\xbf" + VALID_BYTES, "syntax", "malformed"),
    "utf-16": (VALID_BYTES.decode().encode("utf-16"), "syntax", "malformed"),
    "a pickle": (b"\x80\x05\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.", "syntax", "malformed"),
    "name of invalid utf-8": (VALID_BYTES.replace(b"norm.weight", b"norm\xff\xfeweight"), "syntax", "utf-8"),
    "name of a lone surrogate": (VALID_BYTES.replace(b"norm.weight", b"norm\\ud800"), "syntax", "JSON"),
    "NaN for a size": (raw_replace('"shape": [16]', '"shape": [NaN]'), "syntax", "malformed"),
    "infinity for a size": (raw_replace('"shape": [16]', '"shape": [Infinity]'), "syntax", "malformed"),
    "a comment": (b"/* x */" + VALID_BYTES, "syntax", "malformed"),
    "deep nesting": (b"[" * 200_000, "type", "Manifest"),
    "deep nesting in an unknown field": (
        b'{"x":' + b"[" * 10**6 + b"]" * 10**6 + b"}",
        "depth",
        "nested too deep",
    ),
    "deep objects in an unknown field": (b'{"x":' * 10**6 + b"1" + b"}" * 10**6, "depth", "nested too deep"),
    # types
    "a list": (b"[]", "type", "Manifest of protocol 4.*array"),
    "null": (b"null", "type", "null"),
    "buckets missing": (without("buckets"), "type", "missing required field `buckets`"),
    "dtype missing": (without("forms", NORM, "dtype"), "type", "missing required field `dtype`"),
    "names is a number": (with_("names", value=3), "type", "Expected `array`"),
    "a name is null": (with_("names", NORM, value=None), "type", r"Manifest's names of protocol 4: .*\$\[1\]"),
    "name is a number": (with_("names", NORM, value=7), "type", "Expected `str`"),
    "shape is a number": (with_("forms", NORM, "shape", value=16), "type", "Expected `array`"),
    "float size": (with_("forms", NORM, "shape", value=[16.0]), "type", "Expected `int`, got `float`"),
    "size in exponent form": (raw_replace('"shape": [16]', '"shape": [1e1]'), "type", "Expected `int`"),
    "size as text": (with_("forms", NORM, "shape", value=["16"]), "type", "Expected `int`"),
    "boolean size": (with_("forms", NORM, "shape", value=[True]), "type", "Expected `int`"),
    "unknown digest": (
        with_("digest_kind", value="md5"),
        "type",
        "by 'md5', expected 'nh-128': install the same version of weightcast at both ends",
    ),
    "size of 5000 digits": (raw_replace('"shape": [16]', f'"shape": [{"9" * 5000}]'), "type", "out of range"),
    # protocol
    "newer protocol": (with_("protocol", value=5), "protocol", "protocol 5 was offered, this engine speaks 4: install"),
    "protocol 1": (PROTOCOL_1, "protocol", "protocol 1 was offered, this engine speaks 4: install"),
    "protocol zero": (with_("protocol", value=0), "protocol", "protocol 0"),
    # counts
    "too many tensors": (_many_tensors(), "count", f"{m.MAX_TENSORS + 1} tensors; the limit is {m.MAX_TENSORS}"),
    "too many buckets": (with_("buckets", value=[256] * (m.MAX_BUCKETS + 1)), "count", "buckets; the limit"),
    "too many aliases": (
        with_("aliases", "norm.weight", value=[f"a{i}" for i in range(65)]),
        "count",
        "'norm.weight' has 65 aliases; the limit is 64",
    ),
    "too many pieces": (
        with_(*PIECES, value=[_piece(0, 0, [0, 0], [1, 1])] * (m.MAX_PIECES_PER_TENSOR + 1)),
        "count",
        "'embed.weight' has 65537 pieces",
    ),
    "entangled regions": (_pinwheels(1041), "count", "'w0' are too entangled to check"),
    "entangled regions of many tensors": (_pinwheels(301, num_tensors=40), "count", "are too entangled to check"),
    # sizes of buckets
    "negative bucket": (with_("buckets", 0, value=-1024), "size", "bucket 0 has -1024 bytes"),
    "bucket of no bytes": (with_("buckets", 1, value=0), "size", "bucket 1 has 0 bytes; it must be a positive"),
    "misaligned bucket": (with_("buckets", 0, value=1000), "size", "positive multiple of 256"),
    "overflowing bucket": (with_("buckets", 0, value=1 << 64), "size", "bucket 0"),
    "buckets that overflow together": (with_("buckets", value=[1 << 56] * 4), "size", "bytes in all; the limit"),
    # names
    "empty name": (with_("names", NORM, value=""), "name", "is empty or longer than 1024"),
    "empty alias": (with_("aliases", "embed.weight", value=[""]), "name", "is empty"),
    "name too long": (with_("names", NORM, value="x" * 1025), "name", "longer than 1024 bytes"),
    "name too long in utf-8": (with_("names", NORM, value="重" * 342), "name", "longer than 1024 bytes"),
    "group too long": (with_("groups", "norm.weight", value="g" * 1025), "name", "group of 'norm.weight'"),
    "same name twice": (with_("names", NORM, value="step"), "duplicate", "'step' occurs twice"),
    "alias of itself": (with_("aliases", "norm.weight", value=["norm.weight"]), "duplicate", "'norm.weight'"),
    "alias is another's name": (with_("aliases", "embed.weight", value=["step"]), "duplicate", "'step'"),
    "alias is another's alias": (
        with_("aliases", "norm.weight", value=["head.weight"]),
        "duplicate",
        "'head.weight'",
    ),
    "same alias twice": (with_("aliases", "embed.weight", value=["a", "a"]), "duplicate", "'a' occurs twice"),
    # columns
    "names missing": (without("names"), "count", "columns of 0, 4, 4, 4 tensors"),
    "an offset too many": (
        with_("offsets_bytes", value=[0] * 5),
        "count",
        "columns of 4, 4, 4, 5 tensors; expected one length",
    ),
    "form that does not exist": (with_("form_numbers", STEP, value=4), "shape", "form 4; there are 4 forms"),
    "form without a tensor": (with_("form_numbers", STEP, value=0), "shape", "form 3 has no tensor"),
    "pieces of no tensor": (with_("pieces", "other", value=[]), "name", "of 'other', a name that no"),
    "aliases of no tensor": (with_("aliases", "head.weight", value=[]), "name", "of 'head.weight', a name that no"),
    "group of no tensor": (with_("groups", "", value="norm"), "name", "of '', a name that no tensor has"),
    "negative form": (with_("form_numbers", STEP, value=-1), "type", ">= 0"),
    "offset as text": (with_("offsets_bytes", STEP, value="256"), "type", "Expected `int`"),
    # dtypes
    "unknown dtype": (
        with_("forms", NORM, "dtype", value="float12"),
        "dtype",
        "'norm.weight' has the dtype 'float12'",
    ),
    "dtype with its module": (with_("forms", NORM, "dtype", value="torch.float32"), "dtype", "known: bool, uint8"),
    "dtype without a fixed size": (with_("forms", NORM, "dtype", value="quint4x2"), "dtype", "quint4x2"),
    "huge dtype": (with_("forms", NORM, "dtype", value="f" * 100_000), "dtype", "'f{40}'; known"),
    # shapes
    "negative size": (with_("forms", NORM, "shape", value=[-16]), "shape", r"shape \[-16\]: sizes must be 0 to"),
    "two negative sizes": (with_("forms", NORM, "shape", value=[-4, -4]), "shape", r"\[-4, -4\]"),
    "overflowing size": (with_("forms", NORM, "shape", value=[1 << 70]), "shape", "sizes must be"),
    "overflowing product": (with_("forms", NORM, "shape", value=[1 << 32, 1 << 32]), "shape", "has over"),
    "overflowing product of no elements": (
        with_("forms", EMPTY, "shape", value=[0, 1 << 40, 1 << 40]),
        "shape",
        "over",
    ),
    "too many dims": (with_("forms", NORM, "shape", value=[1] * 17), "shape", "17 dims; the limit is 16"),
    # regions
    "region of other dims": (with_(*REGION, "sizes", value=[128]), "region", "other dims than its shape"),
    "offsets and sizes differ": (with_(*REGION, "offsets", value=[0]), "region", "other dims"),
    "negative offset in the tensor": (with_(*REGION, "offsets", value=[-1, 0]), "region", "is not inside its shape"),
    "region beyond the tensor": (with_(*REGION, "sizes", value=[17, 16]), "region", r"sizes \[17, 16\] is not inside"),
    "region without elements": (with_(*REGION, "sizes", value=[0, 16]), "region", "not inside"),
    "negative size of a region": (with_(*REGION, "sizes", value=[-8, -16]), "region", "not inside"),
    "huge offset in the tensor": (with_(*REGION, "offsets", value=[1 << 100, 0]), "region", "not inside"),
    "pieces of a tensor without elements": (
        with_("pieces", "empty", value=[_piece(0, 0, [0, 0], [0, 4])]),
        "region",
        "'empty' has no elements but 1 pieces",
    ),
    "place of a tensor without elements": (with_("bucket_numbers", EMPTY, value=0), "region", "but 1 pieces"),
    # coverage and overlap of regions
    "no pieces": (with_("bucket_numbers", NORM, value=-1), "coverage", "0 of its 16 elements"),
    "half of a tensor": (without(*PIECES, 1), "coverage", "128 of its 256 elements: missing or doubled"),
    "a hole": (with_(*PIECES, 1, "region", "sizes", value=[7, 16]), "coverage", "240 of its 256"),
    "a doubled row": (with_(*PIECES, 1, "region", value={"offsets": [7, 0], "sizes": [9, 16]}), "coverage", "272"),
    "the same region twice": (
        with_(*PIECES, 1, "region", value=VALID["pieces"]["embed.weight"][0]["region"]),
        "overlap",
        "overlap",
    ),
    "overlap and hole": (
        with_(*PIECES, 1, "region", value={"offsets": [4, 0], "sizes": [8, 16]}),
        "overlap",
        "regions of 'embed.weight' overlap",
    ),
    "a scalar in two pieces": (
        changed(_cut_step),
        "coverage",
        "2 of its 1 elements",
    ),
    # buckets
    "bucket that does not exist": (with_(*FIRST, "bucket", value=2), "bucket", "lies in bucket 2; there are 2"),
    "negative bucket number": (with_(*FIRST, "bucket", value=-1), "bucket", "bucket -1"),
    "huge bucket number": (with_(*FIRST, "bucket", value=1 << 200), "bucket", "there are 2"),
    "bucket that does not exist, of a whole tensor": (
        with_("bucket_numbers", NORM, value=2),
        "bucket",
        "'norm.weight' lies in bucket 2; there are 2",
    ),
    "negative bucket number of a whole tensor": (with_("bucket_numbers", NORM, value=-2), "type", ">= -1"),
    "huge bucket number of a whole tensor": (with_("bucket_numbers", NORM, value=1 << 200), "type", "<= 1048576"),
    "an empty bucket at the end": (changed(lambda d: d["buckets"].append(256)), "bucket", "bucket 2 is empty"),
    "an empty bucket in the middle": (
        changed(lambda d: (d["buckets"].insert(1, 256), _renumber(d, {1: 2}))),
        "bucket",
        "bucket 1 is empty",
    ),
    "a bucket and no tensors": (changed(lambda d: _only(d, [], {})), "bucket", "bucket 0 is empty"),
    # origins
    "one origin that is listed": (
        with_("origins", value=[2]),
        "origin",
        "1 origins with 2 buckets, expected none or 2",
    ),
    "an origin without buckets": (
        with_("origins", value=[2, 0]),
        "origin",
        "2 origins with 2 buckets.*each but the first with a",
    ),
    "an origin of less than no buckets": (
        with_("origins", value=[3, -1]),
        "origin",
        "each but the first with a bucket, and 2 buckets",
    ),
    "origins with fewer buckets": (
        with_("origins", value=[1, 1, 1]),
        "origin",
        "3 origins with 3 buckets.*and 2 buckets",
    ),
    "origins of more buckets than there are": (with_("origins", value=[1 << 62, 1 << 62]), "origin", "and 2 buckets"),
    "too many origins": (
        changed(lambda d: d.update(origins=[1] * (m.MAX_ORIGINS + 1))),
        "origin",
        f"{m.MAX_ORIGINS + 1} origins.*expected none or 2 to {m.MAX_ORIGINS}",
    ),
    "origins is a number": (with_("origins", value=2), "type", "Expected `array`"),
    "buckets of an origin as text": (with_("origins", value=["1", "1"]), "type", "Expected `int`"),
    "origins is null": (with_("origins", value=None), "type", "Expected `array`"),
    # offsets
    "misaligned offset": (with_(*FIRST, "offset_bytes", value=8), "offset", "must be multiples of 256"),
    "negative offset": (with_(*FIRST, "offset_bytes", value=-256), "offset", "offset -256 of bucket 0"),
    "offset beyond the bucket": (
        with_(*FIRST, "offset_bytes", value=1024),
        "offset",
        "256 bytes of .* offset 1024 of bucket 0",
    ),
    "end beyond the bucket": (with_("offsets_bytes", NORM, value=1024), "offset", "norm.weight"),
    "misaligned offset of a whole tensor": (with_("offsets_bytes", NORM, value=264), "offset", "multiples of 256"),
    "negative offset of a whole tensor": (with_("offsets_bytes", NORM, value=-256), "type", ">= 0"),
    "overflowing offset of a whole tensor": (with_("offsets_bytes", NORM, value=1 << 63), "type", "<= "),
    "overflowing offset": (with_(*FIRST, "offset_bytes", value=1 << 64), "offset", "bucket 0 with 1024 bytes"),
    "offset of 4300 digits": (
        raw_replace('"offset_bytes": 0', f'"offset_bytes": {"9" * 4300}'),
        "offset",
        "bucket 0 with 1024 bytes",
    ),
    # bytes that two tensors share
    "shared bytes": (
        with_("offsets_bytes", NORM, value=0),
        "overlap",
        "share bytes of bucket 0 at 0",
    ),
    "partly shared bytes": (
        changed(_widen_norm),
        "overlap",
        "share bytes of bucket 0 at 256",
    ),
}


OFFER: Json = {"kind": "offer", "run": RUN, "version": 3, "manifest_digest": "a" * 64, "manifest": json.dumps(VALID)}
SEAL: Json = {"kind": "seal", "run": RUN, "version": 3, "num_buckets": 2, "root": "b" * 32}
ABORT: Json = {"kind": "abort", "run": RUN, "version": 3, "reason": "the trainer ended"}
INIT: Json = {
    "run": RUN,
    "engine": "http://127.0.0.1:8000",
    "transport": "ipc://@x",
    "link": "unix:@y",
    "secret": "c" * 64,
    "lease_seconds": 10.0,
}
HELLO: Json = {"kind": "hello", "run": RUN, "engine": "e", "engine_rank": 0, "secret": "c" * 64}
RECEIVED: Json = {"kind": "received", "version": 3, "num_buckets": 2, "root": "b" * 32}
INSTALLED: Json = {"kind": "installed", "version": 3, "seconds": 0.5}
FAILED: Json = {"kind": "failed", "version": 3, "error": {"kind": "InstallError", "message": "m", "torn": True}}


def _but(message: Json, **changes: Any) -> bytes:
    return json.dumps({**message, **changes}).encode()


def _lacks(message: Json, field: str) -> bytes:
    return json.dumps({k: v for k, v in message.items() if k != field}).encode()


UPDATES: dict[str, Case] = {
    "unknown tag": (_but(SEAL, kind="install"), "type", "Invalid value 'install'"),
    "tag missing": (_lacks(SEAL, "kind"), "type", "missing required field `kind`"),
    "tag is a number": (_but(SEAL, kind=1), "type", "kind"),
    "a link record": (json.dumps(HELLO).encode(), "type", "Invalid value 'hello'"),
    "run in capitals": (_but(ABORT, run=RUN.upper()), "type", "regex"),
    "run too short": (_but(ABORT, run=RUN[:-1]), "type", "regex"),
    "run too long": (_but(ABORT, run=RUN + "0"), "type", "regex"),
    "run with a newline": (_but(ABORT, run=RUN + "\n"), "type", "regex"),
    "run is empty": (_but(OFFER, run=""), "type", "regex"),
    "version negative": (_but(SEAL, version=-1), "type", ">= 0"),
    "version overflows": (_but(SEAL, version=1 << 63), "type", "9223372036854775807|out of range"),
    "version overflows widely": (_but(SEAL, version=1 << 100), "type", "out of range|9223372036854775807"),
    "version is text": (_but(SEAL, version="3"), "type", "Expected `int`"),
    "version is a float": (_but(SEAL, version=3.0), "type", "Expected `int`"),
    "base a number": (_but(OFFER, base=2), "type", "Expected `object | null`"),
    "base negative": (_but(OFFER, base={"version": -2, "root": "0" * 32, "encoded_bytes": [8]}), "type", ">= 0"),
    "base of a length below 0": (
        _but(OFFER, base={"version": 2, "root": "0" * 32, "encoded_bytes": [-8]}),
        "type",
        ">= 0",
    ),
    "buckets negative": (_but(SEAL, num_buckets=-1), "type", ">= 0"),
    "root too short": (_but(SEAL, root="b" * 31), "type", "regex"),
    "root with a newline": (_but(SEAL, root="b" * 32 + "\n"), "type", "regex"),
    "digest of another length": (_but(OFFER, manifest_digest="a" * 32), "type", "regex"),
    "unknown install mode": (_but(OFFER, install="fast"), "type", "Invalid enum value 'fast'"),
    "undo is a number": (_but(OFFER, undo=1), "type", "Expected `bool`"),
    "manifest of another form": (_but(OFFER, manifest=VALID), "type", "Expected `str | null`, got `object`"),
    "manifest is a list": (_but(OFFER, manifest=[]), "type", "Expected `str | null`, got `array`"),
    "reason too long": (_but(ABORT, reason="x" * 4097), "type", "length <= 4096"),
    "reason is null": (_but(ABORT, reason=None), "type", "Expected `str`"),
    "a list": (b"[]", "type", "array"),
    "nothing": (b"", "syntax", "0 bytes received"),
    "truncated": (json.dumps(OFFER).encode()[:-2], "syntax", "truncated"),
    "deep nesting": (b'{"kind":"abort","x":' + b"[" * 10**6, "depth", "nested too deep"),
}

INITS: dict[str, Case] = {
    "lease of no time": (_but(INIT, lease_seconds=0), "type", "> 0"),
    "deadline without end": (_but(INIT, deadline_seconds=1e12), "type", "<= 864000"),
    "deadline of no time": (_but(INIT, deadline_seconds=0), "type", "> 0"),
    "deadline is a truth value": (_but(INIT, deadline_seconds=True), "type", "got `bool`"),
    "deadline is a huge number": (_but(INIT, deadline_seconds=10**400), "type", "out of range"),
    "lease negative": (_but(INIT, lease_seconds=-1), "type", "> 0"),
    "lease without end": (_but(INIT, lease_seconds=1e300), "type", "<= 86400"),
    "lease overflows": (_but(INIT).replace(b"10.0", b"1e999"), "type", "out of range"),
    "lease is NaN": (_but(INIT).replace(b"10.0", b"NaN"), "syntax", "malformed"),
    "secret missing": (_lacks(INIT, "secret"), "type", "secret"),
    "secret is empty": (_but(INIT, secret=""), "type", "regex"),
    "run is a path": (_but(INIT, run="../../etc/passwd"), "type", "regex"),
    "engine too long": (_but(INIT, engine="e" * 4097), "type", "length <= 4096"),
    "origin too long": (_but(INIT, origins=["x" * 4097]), "type", "length <= 4096"),
    "too many origins": (_but(INIT, origins=["x"] * (m.MAX_ORIGINS + 1)), "type", f"length <= {m.MAX_ORIGINS}"),
    "origins is text": (_but(INIT, origins="ipc://@x"), "type", "Expected `array`"),
    "origin is null": (_but(INIT, origins=[None]), "type", "Expected `str`"),
    "link is a list": (_but(INIT, link=["unix:@y"]), "type", "Expected `str`"),
    "takeover is text": (_but(INIT, takeover="yes"), "type", "Expected `bool`"),
    "protocol is text": (_but(INIT, protocol="1"), "type", "Expected `int`"),
}

LINKS: dict[str, Case] = {
    "a control record": (json.dumps(SEAL).encode(), "type", "Invalid value 'seal'"),
    "rank negative": (_but(HELLO, engine_rank=-1), "type", ">= 0"),
    "rank overflows": (_but(HELLO, engine_rank=(1 << 32) + 1), "type", "<= 4294967296"),
    "secret in capitals": (_but(HELLO, secret="C" * 64), "type", "regex"),
    "seconds negative": (_but(INSTALLED, seconds=-1), "type", ">= 0"),
    "seconds without end": (_but(INSTALLED, seconds=1e300), "type", "<= 864000"),
    "seconds is NaN": (_but(INSTALLED).replace(b"0.5", b"NaN"), "syntax", "malformed"),
    "seconds overflows": (_but(INSTALLED).replace(b"0.5", b"1e999"), "type", "out of range"),
    "error is text": (_but(FAILED, error="it failed"), "type", "Expected `object`"),
    "error without a kind": (_but(FAILED, error={"message": "m"}), "type", "kind"),
    "problems is text": (_but(FAILED, error={"kind": "k", "message": "m", "problems": "p"}), "type", "array"),
    "root missing": (_lacks(RECEIVED, "root"), "type", "root"),
    "nothing": (b"", "syntax", "0 bytes"),
}
