"""A directory of weight versions: what its files are, who may touch which, how one is written and read.

`address` is the URL, `records` the small files, `locks` who holds what, `files` how files are read and replaced,
`reading` and `writing` the two sides. Promises are in `docs/store.md`, the layout of files in
`docs/wire-format.md`.
"""
