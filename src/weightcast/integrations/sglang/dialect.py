"""Detection of the kind of SGLang server at a URL, over its own routes."""

from __future__ import annotations

from weightcast.control.client import HttpRoutes
from weightcast.errors import UnsupportedError
from weightcast.format.messages import PauseMode
from weightcast.integrations.sglang.stock.routes import ModelInfo, ServerInfo, SglangPause, SglangRoutes
from weightcast.integrations.sglang.stock.server import SglangStockServer
from weightcast.seams.client import EngineClient

_QUANTISED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
"""Endings of names of quantised weights: the server names only a quantisation that was asked for."""
_PAUSES: dict[PauseMode, SglangPause] = {"keep": "retract", "abort": "abort"}


def detect(routes: HttpRoutes, pause: PauseMode) -> EngineClient | None:
    """Return the client for an SGLang server, None for another server.

    Raises UnsupportedError if the server can't be updated safely.
    """
    model = routes.probe("/model_info", ModelInfo)
    if model is None:
        return None
    server = routes.probe("/server_info", ServerInfo)
    if server is None:
        return None
    if pause not in _PAUSES:
        raise UnsupportedError(
            f"stock SGLang can't finish its requests before a pause: use pause='keep' or 'abort', not {pause!r}"
        )
    if server.dp_size > 1 or server.pp_size > 1:
        raise UnsupportedError(
            f"{routes.name} has dp_size {server.dp_size} and pp_size {server.pp_size}, but stock SGLang can be updated "
            "only with tensor parallelism: start a server for each replica"
        )
    if server.speculative_algorithm not in (None, "NGRAM"):
        raise UnsupportedError(
            f"{routes.name} has a draft model ({server.speculative_algorithm}), into which stock SGLang would load the "
            "main model's weights, too: install weightcast in its environment"
        )
    api = SglangRoutes(routes, model, server, _PAUSES[pause])
    quantised = [spec.name for spec in api.held or () if spec.name.endswith(_QUANTISED)]
    if server.quantization or quantised:
        what = f"quantised by {server.quantization}" if server.quantization else f"such as {quantised[0]!r}"
        raise UnsupportedError(
            f"{routes.name} serves weights {what}, which can't be sent to stock SGLang: start it without "
            "--quantization, from a checkpoint that is not quantised"
        )
    return SglangStockServer(api)
