"""Writes the files of this folder anew: `python tests/golden/regenerate.py`. A change of them needs a new protocol."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.objects import MANIFEST, MESSAGES, bucket, delta_pair

from weightcast.format.bucket import payload_digest, root_digest
from weightcast.format.manifest import encode
from weightcast.native import deltas

HERE = Path(__file__).parent


def main() -> None:
    for name, (message, _) in MESSAGES.items():
        (HERE / name).write_bytes(encode(message))
    buffer, digests = bucket(), {"manifest": MANIFEST.digest()}
    (HERE / "header.bin").write_bytes(bytes(buffer.header.tolist()))
    digests["nh-128"] = payload_digest(buffer.payload).hex()
    digests["root"] = root_digest(digests["manifest"], [bytes.fromhex(digests["nh-128"]), bytes(16)])
    (HERE / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
    for name, by_classes in (("delta", False), ("delta_classes", True)):
        delta, _ = deltas.encode(*delta_pair(), 2, by_classes=by_classes)
        assert delta is not None
        (HERE / f"{name}.bin").write_bytes(bytes(delta.tolist()))


if __name__ == "__main__":
    main()
