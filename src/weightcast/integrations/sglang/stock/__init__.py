"""Stock SGLang servers, with no code of ours beside them: their routes, and a sender that feeds all of them.

`server` is one server, `sender` the data plane, `route_*` SGLang's three ways to take weights.
"""
