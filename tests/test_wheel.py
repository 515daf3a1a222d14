"""What an installed weightcast says of itself: made by the build backend, out of a copy of the repository."""

from __future__ import annotations

import email
import email.message
import re
import subprocess
import sys

import pytest
from pages import ROOT, put_repository

BUILD = "from setuptools import build_meta as b; print(b.prepare_metadata_for_build_wheel('.'))"


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> email.message.Message:
    folder = put_repository(tmp_path_factory.mktemp("wheel"))
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return email.message_from_string((folder / done.stdout.split()[-1] / "METADATA").read_text())


def test_the_long_description_is_the_readme_and_leads_nowhere_else(metadata: email.message.Message) -> None:
    """A link into the repository would be dead on the page of an index; the path of the file stands in its place."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = str(metadata.get_payload())
    assert text.startswith("# weightcast\n")
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    linked = set(re.findall(r"\]\((?!https?:|#)([^)]+)\)", (ROOT / "README.md").read_text()))
    assert linked - set(re.findall(r"\(`([^`]+)`\)", text)) == {"docs/weightcast.svg"}


def test_every_extra_that_a_page_names_can_be_installed(metadata: email.message.Message) -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").iterdir(),
    ]
    texts = "".join(page.read_text() for page in pages if page.is_file())
    named = {
        extra
        for extras in re.findall(r"(?:PATH_TO_WEIGHTCAST|'\.|weightcast)\[(\w[\w,]*)\]", texts)
        for extra in extras.split(",")
    }
    assert re.findall(r"pip install[^\n#`]* '?weightcast\b", texts) == [], "it is on no package index"
    assert "serve" in named
    assert named <= set(metadata.get_all("Provides-Extra", []))
