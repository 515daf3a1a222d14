"""Transports send buckets from a publisher to workers. They are independent; `registry` finds one by its URL's scheme.

Code here moves bytes and knows which peer has received them; other packages decide what an update means. All transports
share these modules: `sending` and `receiving` run one end of an update and know which peers are connected, late or
lost; `records` has the records that both ends exchange; `kept_memory` allocates host memory for buckets.
"""
