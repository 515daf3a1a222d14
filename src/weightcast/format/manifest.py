"""The content of an update, as typed JSON: tensors, their regions, and each region's offset in a bucket.

Invariants of a manifest that `check()` has accepted: every name occurs once, each tensor is covered exactly once by its
pieces, no two pieces share a byte, every piece is aligned and inside its bucket. Names, shapes and offsets are kept
nowhere else.
The format is defined in `docs/wire-format.md`. This module does not need torch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from weightcast.errors import malformed
from weightcast.format.geometry import ALIGNMENT_BYTES, CheckSteps, Region, check_tiling, is_inside, whole

PROTOCOL = 4

MAX_MESSAGE_BYTES = 256 << 20
MAX_TENSORS = 1 << 20
MAX_BUCKETS = 1 << 20
MAX_ORIGINS = 1 << 12
MAX_PIECES_PER_TENSOR = 1 << 16
MAX_NAME_BYTES = 1024
MAX_ALIASES = 64
MAX_DIMS = 16
MAX_BYTES = 1 << 56
MAX_VERSION = (1 << 63) - 1

DIGEST_KIND = "nh-128"
"""Kind of the buckets' digests, which `format.bucket_digest` defines."""

ITEMSIZE_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Size of an element in bytes, by torch's name of the dtype, for every dtype that can be sent."""


RunId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""A run's random id: 16 bytes in lower-case hex."""

VersionNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]

# `gc=False`, here and for Region: a model has several of these objects for each tensor. They are in no reference cycle;
# if the garbage collector tracked them, a first publish would trigger collections of the whole heap.


class WeightVersion(msgspec.Struct, frozen=True):
    """A version of the weights. `number` grows within `run`, the random id of one publisher's life."""

    run: RunId
    number: VersionNumber


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A region stored contiguously, in row-major order, at `offset_bytes` of bucket number `bucket`."""

    bucket: int
    offset_bytes: int
    region: Region


class TensorSpec(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A tensor in checkpoint form: its global shape, and `aliases`, the other names tied to the same values.

    Tensors of one non-empty `group` must reach the engine in one call.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    group: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor's data."""
        return math.prod(self.shape) * ITEMSIZE_BYTES[self.dtype]

    @property
    def load_group(self) -> str:
        """Key that is equal for tensors of one load group; unique for a tensor without a group."""
        return self.group or f"\0{self.name}"


class TensorRecord(TensorSpec, frozen=True, omit_defaults=True):
    """A tensor of an update with its pieces; a tensor without elements has none."""

    pieces: tuple[Piece, ...] = ()

    @property
    def spec(self) -> TensorSpec:
        """The tensor without its pieces."""
        return TensorSpec(self.name, self.dtype, self.shape, aliases=self.aliases, group=self.group)


class TensorForm(msgspec.Struct, frozen=True, gc=False):
    """A dtype and a shape that tensors of a manifest have in common."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data of a tensor of this form."""
        return math.prod(self.shape) * ITEMSIZE_BYTES[self.dtype]


BucketNumber = Annotated[int, msgspec.Meta(ge=-1, le=MAX_BUCKETS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """All tensors of an update and the plan of its buckets (`buckets[i]`: raw payload bytes of bucket i).

    `origins`: number of buckets of each origin, the first ones being origin 0's; empty if there is one origin.
    The tensors are columns, since a peer decodes these many times faster than records: tensor i is called `names[i]`,
    has the dtype and shape `forms[form_numbers[i]]`, and all of it is at `offsets_bytes[i]` of bucket
    `bucket_numbers[i]`. For a tensor in other pieces, or without any, this number is -1, and the offset 0. `pieces`,
    `aliases` and `groups` have what other tensors lack, by name. `tensors` has all of that as records.
    A manifest has no version and no run, so it is equal for every publish of the same model, and need not be sent again
    to a peer that knows its `digest()`.
    """

    protocol: int
    digest_kind: str
    buckets: tuple[int, ...]
    origins: tuple[int, ...] = ()
    forms: tuple[TensorForm, ...] = ()
    names: tuple[str, ...] = ()
    form_numbers: tuple[Number, ...] = ()
    bucket_numbers: tuple[BucketNumber, ...] = ()
    offsets_bytes: tuple[Number, ...] = ()
    pieces: dict[str, tuple[Piece, ...]] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    groups: dict[str, str] = {}

    @classmethod
    def of(cls, tensors: Sequence[TensorRecord], buckets: tuple[int, ...], origins: tuple[int, ...] = ()) -> Manifest:
        """Return the manifest of these tensors in these buckets. Nothing is checked."""
        forms: dict[tuple[str, tuple[int, ...]], int] = {}
        numbers = tuple([forms.setdefault((t.dtype, t.shape), len(forms)) for t in tensors])
        is_whole = [len(t.pieces) == 1 and t.pieces[0].region == whole(t.shape) for t in tensors]
        placed = list(zip(tensors, is_whole, strict=True))
        bucket_numbers = tuple([t.pieces[0].bucket if is_one else -1 for t, is_one in placed])
        offsets_bytes = tuple([t.pieces[0].offset_bytes if is_one else 0 for t, is_one in placed])
        names, of_form = tuple([t.name for t in tensors]), tuple(itertools.starmap(TensorForm, forms))
        pieces = {t.name: t.pieces for t, is_one in placed if t.pieces and not is_one}
        aliases = {t.name: t.aliases for t in tensors if t.aliases}
        groups = {t.name: t.group for t in tensors if t.group}
        columns = names, numbers, bucket_numbers, offsets_bytes
        return cls(PROTOCOL, DIGEST_KIND, buckets, origins, of_form, *columns, pieces, aliases, groups)

    @functools.cached_property
    def tensors(self) -> tuple[TensorRecord, ...]:
        """The tensors with their pieces. Of a manifest from a peer only after `check`."""
        forms = [(form.dtype, form.shape, whole(form.shape)) for form in self.forms]
        aliases, groups, records = self.aliases, self.groups, list[TensorRecord]()
        rows = zip(self.names, self.form_numbers, self.bucket_numbers, self.offsets_bytes, strict=True)
        for name, form, bucket, start in rows:
            dtype, shape, region = forms[form]
            pieces = (Piece(bucket, start, region),) if bucket >= 0 else self.pieces.get(name, ())
            records.append(TensorRecord(name, dtype, shape, aliases.get(name, ()), groups.get(name, ""), pieces))
        return tuple(records)

    def whole_tensors(self) -> list[list[int]]:
        """Return by bucket, in order of offset, the numbers of the tensors of which all is there in one piece."""
        buckets = np.array(self.bucket_numbers, np.int64)
        order = np.lexsort((np.array(self.offsets_bytes, np.int64), buckets))
        ends = np.searchsorted(buckets[order], np.arange(len(self.buckets) + 1)).tolist()
        return [order[first:end].tolist() for first, end in itertools.pairwise(ends)]

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of tensor data, without padding and headers."""
        return sum(self.forms[form].num_bytes * count for form, count in Counter(self.form_numbers).items())

    @property
    def max_bucket_bytes(self) -> int:
        return max(self.buckets, default=0)

    @functools.cached_property
    def spans(self) -> tuple[range, ...]:
        """The numbers of each origin's buckets."""
        if not self.origins:
            return (range(len(self.buckets)),)
        ends = tuple(itertools.accumulate(self.origins, initial=0))
        return tuple(map(range, ends, ends[1:]))

    @functools.cached_property
    def bucket_origins(self) -> list[int]:
        """The origin of each bucket."""
        return [origin for origin, span in enumerate(self.spans) for _ in span]

    @functools.cached_property
    def rounds(self) -> list[int]:
        """The numbers of all buckets in send order: in each round the next bucket of each origin."""
        return [index for each in itertools.zip_longest(*self.spans) for index in each if index is not None]

    def with_sizes(self, buckets: tuple[int, ...]) -> Manifest:
        """Return what a transport needs to send the same buckets at other lengths, without the tensors."""
        return Manifest(self.protocol, self.digest_kind, buckets, self.origins)

    def of_origin(self, origin: int) -> Manifest:
        """Return the part for one origin's sender and receivers: the origin's buckets only, numbered from 0."""
        span = self.spans[origin]
        return Manifest(self.protocol, self.digest_kind, self.buckets[span.start : span.stop])

    @functools.cached_property
    def text(self) -> str:
        """The manifest's encoding."""
        return encode(self).decode()

    def encode(self) -> bytes:
        return self.text.encode()

    def digest(self) -> str:
        """The manifest's identity: that of its text."""
        return digest_of(self.text)

    @classmethod
    def decode(cls, data: bytes | str) -> Manifest:
        """Read and check a manifest. Raises ManifestError for anything that `docs/wire-format.md` forbids."""
        found: _EncodedManifest = decode(data, _EncodedManifest, what="Manifest")
        columns = [decode(getattr(found, name), kind, what=f"Manifest's {name}") for name, kind in _COLUMNS.items()]
        manifest = cls(found.protocol, found.digest_kind, found.buckets, found.origins, found.forms, *columns)
        manifest.check()
        return manifest

    def check(self) -> None:
        """Check the module's invariants, in O(pieces log pieces). Raises ManifestError for the first violation."""
        self.check_limits()
        lengths = [len(self.names), len(self.form_numbers), len(self.bucket_numbers), len(self.offsets_bytes)]
        if len(set(lengths)) > 1:
            raise malformed("count", f"columns of {', '.join(map(str, lengths))} tensors; expected one length")
        if max(self.form_numbers, default=-1) >= len(self.forms):
            raise malformed("shape", f"a tensor of form {max(self.form_numbers)}; there are {len(self.forms)} forms")
        check_names(self.names, self.aliases, self.groups)
        named = self.pieces.keys() | self.aliases.keys() | self.groups.keys()
        if named and (unknown := named.difference(self.names)):
            raise malformed("name", f"pieces, aliases or a group of {min(unknown)[:80]!r}, a name that no tensor has")
        of_form = dict(zip(reversed(self.form_numbers), reversed(self.names), strict=True))
        for number, form in enumerate(self.forms):
            if number not in of_form:
                raise malformed("shape", f"form {number} has no tensor")
            _check_form(of_form[number], form.dtype, form.shape)
        self.check_pieces()

    def check_limits(self) -> None:
        """Check protocol, buckets and origins against the limits. Raises ManifestError."""
        if self.protocol != PROTOCOL:
            found = self.protocol
            raise malformed(
                "protocol",
                f"protocol {found} was offered, this engine speaks {PROTOCOL}: install the same version of weightcast "
                "at both ends",
            )
        if self.digest_kind != DIGEST_KIND:
            found_kind = repr(self.digest_kind)[:40]
            raise malformed(
                "type",
                f"buckets are digested by {found_kind}, expected {DIGEST_KIND!r}: install the same version of "
                "weightcast at both ends",
            )
        if len(self.names) > MAX_TENSORS:
            raise malformed("count", f"{len(self.names)} tensors; the limit is {MAX_TENSORS}")
        if len(self.buckets) > MAX_BUCKETS:
            raise malformed("count", f"{len(self.buckets)} buckets; the limit is {MAX_BUCKETS}")
        for index, size in enumerate(self.buckets):
            if size <= 0 or size > MAX_BYTES or size % ALIGNMENT_BYTES:
                raise malformed(
                    "size", f"bucket {index} has {size} bytes; it must be a positive multiple of {ALIGNMENT_BYTES}"
                )
        if sum(self.buckets) > MAX_BYTES:
            raise malformed("size", f"{sum(self.buckets)} bytes in all; the limit is {MAX_BYTES}")
        if self.origins and not (
            1 < len(self.origins) <= MAX_ORIGINS
            and self.origins[0] >= 0
            and min(self.origins[1:]) > 0
            and sum(self.origins) == len(self.buckets)
        ):
            raise malformed(
                "origin",
                f"{len(self.origins)} origins with {sum(self.origins)} buckets, expected none or 2 to {MAX_ORIGINS}, "
                f"each but the first with a bucket, and {len(self.buckets)} buckets",
            )

    def check_pieces(self) -> None:
        """Check that pieces tile their tensors, no two share a byte, and no bucket is empty. The columns come first.

        Raises ManifestError.
        """
        form_bytes = np.array([form.num_bytes for form in self.forms], np.int64)
        sizes = form_bytes[np.array(self.form_numbers, np.int64)]
        buckets, starts = np.array(self.bucket_numbers, np.int64), np.array(self.offsets_bytes, np.int64)
        room = np.array([*self.buckets, -1], np.int64)[np.minimum(buckets, len(self.buckets))]
        is_right = (sizes > 0) & (starts <= room - sizes) & (starts % ALIGNMENT_BYTES == 0)
        rows = np.stack([buckets, starts, starts + sizes, np.arange(len(sizes))], axis=1)[is_right]
        # Tensors in other pieces, and those with an error.
        others = np.flatnonzero(~is_right).tolist()
        steps = CheckSteps(sum(len(self.tensors[number].pieces) for number in others))
        spans = [(*span, n) for n in others for span in _checked_spans(self.tensors[n], self.buckets, steps)]
        rows = np.concatenate([rows, np.array(spans, np.int64).reshape(-1, 4)])
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        shared = np.flatnonzero((rows[1:, 0] == rows[:-1, 0]) & (rows[1:, 1] < rows[:-1, 2]))
        if shared.size:
            (*_, former), (bucket, start, _, number) = rows[shared[0] : shared[0] + 2].tolist()
            one, other = self.names[number], self.names[former]
            raise malformed("overlap", f"{one!r} and {other!r} share bytes of bucket {bucket} at {start}")
        empty = np.flatnonzero(np.bincount(rows[:, 0], minlength=len(self.buckets)) == 0)
        if empty.size:
            raise malformed("bucket", f"bucket {empty[0]} is empty")


class _EncodedManifest(msgspec.Struct):
    """A manifest with its columns still encoded: a call that decodes all of them holds the GIL for milliseconds."""

    protocol: int
    digest_kind: str
    buckets: tuple[int, ...]
    origins: tuple[int, ...] = ()
    forms: tuple[TensorForm, ...] = ()
    names: msgspec.Raw = msgspec.Raw(b"[]")
    form_numbers: msgspec.Raw = msgspec.Raw(b"[]")
    bucket_numbers: msgspec.Raw = msgspec.Raw(b"[]")
    offsets_bytes: msgspec.Raw = msgspec.Raw(b"[]")
    pieces: msgspec.Raw = msgspec.Raw(b"{}")
    aliases: msgspec.Raw = msgspec.Raw(b"{}")
    groups: msgspec.Raw = msgspec.Raw(b"{}")


_COLUMNS: Mapping[str, Any] = {
    "names": tuple[str, ...],
    "form_numbers": tuple[Number, ...],
    "bucket_numbers": tuple[BucketNumber, ...],
    "offsets_bytes": tuple[Number, ...],
    "pieces": dict[str, tuple[Piece, ...]],
    "aliases": dict[str, tuple[str, ...]],
    "groups": dict[str, str],
}


def digest_of(text: str) -> str:
    """Return the digest of a manifest with this text: SHA-256, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


T = TypeVar("T")
encode: Callable[[msgspec.Struct], bytes] = msgspec.json.Encoder().encode
"""Encodes any message of the protocol; equal messages give equal bytes."""
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making_decoder = threading.Lock()


def decode(
    data: bytes | bytearray | memoryview | msgspec.Raw | str,
    kind: type[T] | Any,
    *,
    max_bytes: int = MAX_MESSAGE_BYTES,
    what: str = "",
) -> T:
    """Decode one message of type `kind`. `what`: its name in errors, by default the type's.

    Raises ManifestError if it is too large, truncated or invalid.
    """
    if len(data) > max_bytes:
        raise malformed("too_large", f"a message of {len(data)} bytes; the limit is {max_bytes}")
    try:
        return (_decoders.get(kind) or decoder(kind)).decode(data)  # type: ignore[no-any-return]
    except msgspec.ValidationError as exc:
        raise malformed("type", f"not a {what or _name_of(kind)} of protocol {PROTOCOL}: {exc}") from exc
    except (msgspec.DecodeError, UnicodeError) as exc:
        what = what or _name_of(kind)
        raise malformed("syntax", f"not the JSON of a {what}: {exc}; {len(data)} bytes received") from exc
    except RecursionError as exc:
        raise malformed("depth", "JSON nested too deeply; no message of this protocol has more than 6 levels") from exc


def convert(values: Any, kind: Any) -> Any:
    """Convert values, as decoded from JSON without a type, to `kind`. Raises msgspec.ValidationError."""
    decoder(kind)
    return msgspec.convert(values, kind)


def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a message type. The first call makes it: early, where an update would wait for that."""
    # msgspec attaches a Struct's description to its class before it is complete, and another thread that decodes the
    # class meanwhile crashes.
    with _making_decoder:
        if kind not in _decoders:
            _decoders[kind] = msgspec.json.Decoder(kind)
        return _decoders[kind]


for _kind in (_EncodedManifest, *_COLUMNS.values()):
    decoder(_kind)


def _name_of(kind: object) -> str:
    """Return the name of a message type. Used only for errors, since formatting a union is slow."""
    return getattr(kind, "__name__", None) or str(kind)


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Check that names are unique, and names, dtypes and shapes within the limits. Raises ManifestError."""
    aliases = {spec.name: spec.aliases for spec in specs if spec.aliases}
    check_names([spec.name for spec in specs], aliases, {spec.name: spec.group for spec in specs if spec.group})
    for form, name in {(spec.dtype, spec.shape): spec.name for spec in reversed(specs)}.items():
        _check_form(name, *form)


def check_names(names: Sequence[str], aliases: Mapping[str, tuple[str, ...]], groups: Mapping[str, str]) -> None:
    """Check that names and aliases are unique, and these and the groups within the limits. Raises ManifestError."""
    for name, others in aliases.items():
        if len(others) > MAX_ALIASES:
            raise malformed("count", f"{name[:80]!r} has {len(others)} aliases; the limit is {MAX_ALIASES}")
    every = [*names, *itertools.chain.from_iterable(aliases.values())]
    lengths = [*map(len if all(map(str.isascii, every)) else _name_bytes, every)]
    if every and not 0 < min(lengths) <= max(lengths) <= MAX_NAME_BYTES:
        name = next(n for n, length in zip(every, lengths, strict=True) if not 0 < length <= MAX_NAME_BYTES)
        raise malformed("name", f"the name {name[:80]!r} is empty or longer than {MAX_NAME_BYTES} bytes")
    if len(set(every)) < len(every):
        raise malformed("duplicate", f"the name {Counter(every).most_common(1)[0][0]!r} occurs twice")
    for name, group in groups.items():
        if _name_bytes(group) > MAX_NAME_BYTES:
            raise malformed("name", f"the group of {name[:80]!r} is longer than {MAX_NAME_BYTES} bytes")


def _check_form(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if dtype not in ITEMSIZE_BYTES:
        raise malformed("dtype", f"{name!r} has the dtype {dtype[:40]!r}; known: {', '.join(ITEMSIZE_BYTES)}")
    if len(shape) > MAX_DIMS:
        raise malformed("shape", f"{name!r} has {len(shape)} dims; the limit is {MAX_DIMS}")
    if shape and not 0 <= min(shape) <= max(shape) <= MAX_BYTES:
        raise malformed("shape", f"{name!r} has the shape {list(shape)}: sizes must be 0 to {MAX_BYTES}")
    if math.prod(filter(None, shape)) * ITEMSIZE_BYTES[dtype] > MAX_BYTES:
        raise malformed("shape", f"{name!r} of shape {list(shape)} has over {MAX_BYTES} bytes")


def _name_bytes(name: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError as exc:
        character = f"{exc.reason} at {exc.start}"
        raise malformed("name", f"the name {name[:80]!r} can't be UTF-8 ({character}): rename the tensor") from exc


def _checked_spans(record: TensorRecord, buckets: Sequence[int], steps: CheckSteps) -> list[tuple[int, int, int]]:
    """Check that a tensor's pieces tile it, inside their buckets.

    Returns bucket, first byte and end of each piece.
    """
    if len(record.pieces) > MAX_PIECES_PER_TENSOR:
        num_pieces = len(record.pieces)
        raise malformed("count", f"{record.name!r} has {num_pieces} pieces; the limit is {MAX_PIECES_PER_TENSOR}")
    numel = math.prod(record.shape)
    if numel == 0:
        if record.pieces:
            raise malformed("region", f"{record.name!r} has no elements but {len(record.pieces)} pieces")
        return []
    itemsize, spans = ITEMSIZE_BYTES[record.dtype], []
    for piece in record.pieces:
        region, start = piece.region, piece.offset_bytes
        if not (len(region.offsets) == len(region.sizes) == len(record.shape)):
            raise malformed("region", f"a region of {record.name!r} has other dims than its shape {list(record.shape)}")
        numel = region.numel
        if not is_inside(region, record.shape) or not numel:
            raise malformed(
                "region",
                f"a region of {record.name!r} at {list(region.offsets)} of sizes {list(region.sizes)} "
                f"is not inside its shape {list(record.shape)}",
            )
        if not 0 <= piece.bucket < len(buckets):
            raise malformed("bucket", f"{record.name!r} lies in bucket {piece.bucket}; there are {len(buckets)}")
        num_bytes = numel * itemsize
        if not 0 <= start <= buckets[piece.bucket] - num_bytes or start % ALIGNMENT_BYTES:
            raise malformed(
                "offset",
                f"{num_bytes} bytes of {record.name!r} lie at offset {start} of bucket {piece.bucket} "
                f"with {buckets[piece.bucket]} bytes; offsets must be multiples of {ALIGNMENT_BYTES}",
            )
        spans.append((piece.bucket, start, start + num_bytes))
    check_tiling([piece.region for piece in record.pieces], record.shape, record.name, steps)
    return spans
