"""Gives the package its long description: README.md, with the paths of files in the place of links to them.

All else is in pyproject.toml. Once the repository has a URL, links and picture can lead there.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text)
text = re.sub(r"\[([^\]]+)\]\(#[^)]*\)", r"\1", text)
text = re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", r"\1 (`\2`)", text)
setup(long_description=text, long_description_content_type="text/markdown")
