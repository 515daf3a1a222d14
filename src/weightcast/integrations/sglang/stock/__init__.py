"""Stock SGLang servers, with no code of ours beside them: their routes, and a sender that feeds all of them.

`server` is one server, `sender` the data plane, `route_*` two of SGLang's ways to take weights; the third, a directory,
is `integrations.stock_directory`.
"""
