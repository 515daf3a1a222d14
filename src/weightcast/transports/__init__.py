"""How buckets get from a publisher to workers. Transports don't know of each other; `registry` finds one by its URL.

Here belongs what moves bytes and knows who has them. What an update means is not decided here. What transports have in
common is here once: `records`, `sending` and `receiving` are an update's life at either end, and who is connected, late
or lost; `linked` has records travel over links; `kept_memory` is where host memory for buckets comes from.
"""
