"""Writes the files of this folder anew: `python tests/golden/regenerate.py`. A change of them needs a new protocol."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.objects import DIGEST_KINDS, MANIFEST, MESSAGES, bucket

from weightcast.format.bucket import payload_digest, root_digest
from weightcast.format.manifest import encode

HERE = Path(__file__).parent


def main() -> None:
    for name, (message, _) in MESSAGES.items():
        (HERE / name).write_bytes(encode(message))
    digests = {"manifest": MANIFEST.digest()}
    for kind in DIGEST_KINDS:
        buffer = bucket(kind)
        (HERE / f"header.{kind}.bin").write_bytes(bytes(buffer.header.tolist()))
        digests[kind] = payload_digest(buffer.payload, kind).hex()
    digests["root"] = root_digest(digests["manifest"], [bytes.fromhex(digests[kind]) for kind in DIGEST_KINDS])
    (HERE / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
