"""A store: a directory of weight versions, with one writer and many readers.

`address`: its URL. `records`: the small files. `locks`: locks of readers and writers. `files`: reading and replacing of
files. `reading`, `writing`: the two sides. The layout and its guarantees are in `docs/store.md`.
"""
