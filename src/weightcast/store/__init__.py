"""A store: weight versions in a directory, or in an object store, with one writer and many readers.

`address`: its URL. `records`: the small files. `reading`, `writing`: the two sides, which have the rules. `storage`:
the seam to where the bytes lie: `directory` (with `locks` and `files`), `objects`, or `remote`, which is only read.
`copying`: versions from one store into another. The guarantees are in `docs/store.md`.

Records are JSON in the encoding of `docs/wire-format.md`, which defines buckets too. The files:

`digest` is the SHA-256 of a record's encoding with an empty `digest`, in hex.

    current.json             the pointer: replaced by rename, last of all
    next.json                the next pointer, for engines of the publish; renamed to current.json, or removed
    writer.lock              locked by the writer, exclusively, from byte 0 on
    writer.json              format, run, host, pid, attempt, number, aborted, digest
    slots/N/seal.json        the version in slot N; absent while the slot is written
    slots/N/manifest.json    the manifest; its SHA-256 is in pointer and seal
    slots/N/data.0 ...       the buckets; each origin has as many files of its own
    slots/N/pins             256 records of 256 bytes, each locked by one reader and holding its name; then a byte
                             for each origin, locked by the rank that writes its files
    .checkpoint              for stock servers to reload; readers ignore it

- `current.json` and `next.json` are `{"format", "newest", "previous", "digest"}`, `seal.json` the same without
  `previous`. `format` MUST be `weightcast-store-4`: a store of another one is neither read nor written. `newest`
  and `previous` are `{"run", "number", "slot", "num_files", "num_buckets", "manifest_digest", "root",
  "committed_at", "base"}`; `committed_at` is the Unix time of the seal. `number` in `writer.json` is that of the
  last version that was begun.
- `base` is null for a full version, else `{"number", "slot", "root"}` of the version, of the same run and manifest,
  on which it is a delta. Behind the header of a bucket with codec `delta` are the header of the raw payload and the
  delta. The payload that a reader has put together MUST have the digest of the raw header; `root` is that of the
  raw payloads. A writer MUST NOT change a slot that the newest version needs.
- `num_files` MUST be a multiple of the number of origins. With m files for each origin, bucket k of origin o lies
  in `data.F`, F = o m + (k modulo m), behind the buckets of that file with smaller numbers, each from a multiple of
  4,096 bytes on. Bytes between are undefined, and a file may be longer than its version.
- Locks are open-file-description locks of fcntl. A writer MUST lock all of `pins`, from byte 0 without end, while
  it changes anything in a slot. It MAY release all behind the 256 records once `writer.json` has its attempt: then
  the rank that writes origin o's files MUST lock byte 65,536 + o, and MUST then find the attempt in `writer.json`,
  not aborted.
- A writer MUST NOT change the slot that the pointer names. It MUST remove the seal before the first byte of data
  and make it after the last; then it makes `next.json`. Before it renames that to the pointer it MUST find the
  pointer unchanged. To give a version up it removes `next.json` and then the seal, also under readers' pins.
- A reader MUST lock one record of `pins` (shared, if it may not write there) while it reads the slot. It MUST find
  the wanted version in the seal after that, and read the pointer again.

In an object store the records are the same, and there are neither `pins` nor `writer.lock`:

    slots/N/bucket.K         bucket K, of any origin; N is the attempt in `writer.json`, and `num_files` is 1

- A writer MUST put its record into `writer.json` before each version, on the condition that the object still has the
  entity tag of its own last record, or when it opens the store, of the record that was there. It MUST NOT write to a
  slot unless it has done so for that slot's number.
- It MUST seal only while `writer.json` has its record, and put the pointer on the condition that it still has the tag
  of the one that the writer saw last. After an answer that was lost, it MUST look which one is there.
- It MUST NOT remove a slot that the newest version needs, nor one with the seal of a version that was replaced less
  than `keep_seconds` ago, or of the last `num_slots` ones. It MUST remove a seal before the objects of its slot.
- A writer that has closed the store says so in `aborted`.
"""
