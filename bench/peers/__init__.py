"""weightcast beside what other libraries do, in one run: the same tensors, processes, cores and boundary.

`ways.py` lists what is measured, `adapters/` drives each library unmodified, `measure.py` times them in turn,
`page.py` makes docs/benchmarks.md and results.md of the JSON.
"""
