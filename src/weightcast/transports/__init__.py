"""Transports send buckets from a publisher to workers. They don't know of each other; `registry` finds one by its URL.

Code here moves bytes and knows which peer has them; other packages decide what an update means. The transports share
these modules: `records`, `sending` and `receiving` run an update at either end and know which peers are connected, late
or lost; `linked` sends records over links; `kept_memory` allocates host memory for buckets.
"""
