"""Transports send buckets from a publisher to workers. They don't know of each other; `registry` finds one by its URL.

Code here moves bytes and knows who has them; the meaning of an update is decided elsewhere. The parts that transports
have in common are here once: `records`, `sending` and `receiving` are an update's life at either end, and who is
connected, late or lost; `linked` sends records over links; `kept_memory` allocates host memory for buckets.
"""
