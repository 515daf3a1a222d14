"""The errors that an HTTP server answers with, of a TLS connection too, for every client of one."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Mapping
from typing import Any

import msgspec

from weightcast.errors import ControlError, ErrorRecord, PeerError, WeightcastError, from_record
from weightcast.format.manifest import convert


def error_in(content: bytes, peer: str) -> WeightcastError | str:
    """Return the error in an answer of `peer`, rebuilt from weightcast's record, or the text if there is no record.

    weightcast's body is {"error": {"record", "message"}}, vLLM's is {"error": text or {"message"}}. Others are text.
    """
    text = content[:500].decode("utf-8", "replace")
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, WeightcastError):
        body: Any = msgspec.json.decode(content)
        error = body.get("error") if isinstance(body, Mapping) else None
        if isinstance(error, Mapping) and "record" in error:
            rebuilt = from_record(convert(error["record"], ErrorRecord))
            if isinstance(rebuilt, PeerError):
                rebuilt.peer = peer
            return rebuilt
        message = error.get("message") if isinstance(error, Mapping) else error
        if isinstance(message, str):
            text = message
    return text


def tls_error(error: ssl.SSLError, peer: str, *, trusted: str, scheme: str) -> ControlError:
    """Return the error of a connection to `peer` that failed in TLS.

    `trusted`: the authorities whose certificates are accepted; `scheme`: that of URLs of servers without TLS.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return ControlError(
            f"the certificate of {peer} is not accepted: {error.verify_message}; it must be of this host name, and of "
            f"an authority that {trusted}",
            peer=peer,
        )
    return ControlError(f"{peer} did not answer with TLS: {error}; use {scheme} for a server without TLS", peer=peer)
