"""How buckets get from a publisher to workers. Transports don't know of each other; `registry` finds one by its URL.

Here belongs what moves bytes and knows who has them. What an update means is not decided here. What all transports have
in common is in `sending` and `receiving`: an update's life at either end, and who is connected, done, late or lost.
"""
