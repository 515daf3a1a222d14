"""Stock SGLang servers, without weightcast's plugin: their routes, and one sender for all of them.

`server`: the client of one server, and the sender. `route_*`: two of SGLang's ways to receive weights; the
third, a directory, is `integrations.stock_directory`.
"""
