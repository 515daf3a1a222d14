"""Writes a run's report: `report.json` for machines and `report.html` for people. A reader never sees half a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from weightcast.demo import page
from weightcast.demo.result import Result


def write(result: Result, directory: Path) -> list[Path]:
    """Write both files, in place of former ones, and return their paths. Makes the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    found = {**msgspec.to_builtins(result), "failures": list(result.failures())}
    contents = {
        "report.json": msgspec.json.format(msgspec.json.encode(found), indent=2),
        "report.html": page.render(result).encode(),
    }
    return [_replace(directory / name, data) for name, data in contents.items()]


def _replace(path: Path, data: bytes) -> Path:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return path
