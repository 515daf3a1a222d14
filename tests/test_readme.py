"""The pages' Python (`python`) runs, block after block, in a folder and a process of its own; pieces of programs (`py`,
or with a line `...`) are read by a type checker; what pages name exists."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import weightcast
from weightcast import testing
from weightcast.integrations import vllm

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text()) if found == language]


def is_program(body: str) -> bool:
    """A block that shows a signature or leaves something out with `...` on a line of its own is not run."""
    return not re.search(r"^\s*\.\.\.\s*$", body, re.MULTILINE)


PIECE = """\
# mypy: disable-error-code="name-defined, no-untyped-call", allow-untyped-defs, allow-subclassing-any
import weightcast


def piece():
"""


@pytest.mark.timeout(900)
def test_what_is_not_run_has_the_names_and_the_arguments_that_there_are(tmp_path: Path) -> None:
    """A type checker reads what of the pages is a piece of a program; what a piece does not define is taken as it is.

    With the options of scripts/lint, whose cache it uses; it takes a minute where there is none.
    """
    for page in PAGES:
        pieces = blocks(page, "py") + [body for body in blocks(page, "python") if not is_program(body)]
        for number, body in enumerate(pieces):
            name = f"{page.stem.lower().replace('-', '_')}_{number}.py"
            (tmp_path / name).write_text(PIECE + textwrap.indent(body, "    "))
    files = sorted(tmp_path.iterdir())
    assert len(files) > 10
    command = [sys.executable, "-m", "mypy", "--strict", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_has_code_that_runs(tmp_path: Path) -> None:
    found = blocks(ROOT / "README.md", "python")
    assert found, "the README shows no Python"
    assert all(map(is_program, found))
    run(found, tmp_path)


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "README.md"], ids=lambda p: p.name)
def test_the_pages_code_runs(page: Path, tmp_path: Path) -> None:
    programs = [body for body in blocks(page, "python") if is_program(body)]
    if programs:
        run(programs, tmp_path)


def run(programs: list[str], folder: Path) -> None:
    script = folder / "blocks.py"
    script.write_text("\n\n".join(programs))
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not re.search("Traceback|Exception ignored", done.stderr), done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_script_that_is_named_exists(page: Path) -> None:
    for script in re.findall(r"(?:\./)?\b(scripts/[a-z-]+)", page.read_text()):
        assert (ROOT / script).is_file(), script


def test_the_api_page_has_every_public_name_with_its_contract_and_an_example() -> None:
    """An error's class among all others of its module; an example may be on the page about its subject."""
    page = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: weightcast\.(?:[\w.]+\.)?(\w+)$", page, re.MULTILINE))
    for members in re.findall(r"^ +members:\s+\[([^\]]+)\]$", page, re.MULTILINE):
        shown |= set(re.findall(r"\w+", members))
    pages = (ROOT / "docs").glob("*.md")
    examples = "\n".join(body for each in pages for word in ("python", "py") for body in blocks(each, word))
    names = {*weightcast.__all__, *testing.__all__, *vllm.__all__} - {"errors", "__version__"}
    errors = {name for name in names if getattr(weightcast.errors, name, None)}
    assert names - errors - shown == set(), "without an entry"
    assert names - set(re.findall(r"\w+", examples)) == set(), "without an example"
    for module in (weightcast, testing, vllm):
        # One of them needs vLLM to be imported.
        for name in names & set(module.__all__) - {"PAYLOADS", "WeightcastTrainerInitInfo"}:
            assert inspect.getdoc(getattr(module, name)), name


def test_every_public_method_has_its_contract() -> None:
    """Its own or an inherited one; tests of the contract suites are no methods for users."""
    classes = {
        obj
        for module in (weightcast, testing)
        for name in module.__all__
        if inspect.isclass(obj := getattr(module, name))
    }
    silent = [
        f"{each.__qualname__}.{name}"
        for each in classes
        for name, member in vars(each).items()
        if not name.startswith(("_", "test_")) and (inspect.isroutine(member) or isinstance(member, property))
        if not inspect.getdoc(getattr(each, name))
    ]
    assert not silent, "without a docstring"


def test_the_site_shows_the_signature_of_every_public_name(tmp_path: Path) -> None:
    """As it is built: without a warning, so that every link on it leads somewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    parts = re.split(r'<h\d id="(?:weightcast\.)?([\w.]+)"', (tmp_path / "api.html").read_text())
    signed = {
        name.split(".")[-1] for name, body in zip(parts[1::2], parts[2::2], strict=True) if "doc-signature" in body
    }
    # An error that carries nothing but its message has no constructor of its own, nor has a Protocol.
    plain = {
        name
        for name in weightcast.__all__
        if getattr(getattr(weightcast, name), "__init__", None) is Exception.__init__
        or getattr(getattr(weightcast, name), "_is_protocol", False)
    }
    assert set(weightcast.__all__) - {"errors", "__version__"} - signed == plain


def messages() -> list[str]:
    """Every text of the package that is no docstring, with a NUL for what is filled in at run time."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.append(re.sub(r"\{\w+\}", "\0", node.value))
    return found


def quoted() -> list[str]:
    """The first column of every table of the troubleshooting page."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^\| `([^`]*)` \|", page, re.MULTILINE)


def is_said(quotation: str, texts: list[str]) -> bool:
    """Whether one text has the quotation as it stands, with something filled in wherever it has `...`."""
    pattern = r"[^\0]*\0.*".join(map(re.escape, quotation.split("...")))
    return any(re.search(pattern, text, re.DOTALL) for text in texts)


def test_every_message_in_the_troubleshooting_page_is_one_of_ours() -> None:
    """As it is quoted, and long enough to be found: three words of its own at least."""
    found, texts = quoted(), messages()
    assert len(found) > 20
    assert len(found) == (ROOT / "docs" / "troubleshooting.md").read_text().count("\n| `")
    assert [words for words in found if len(re.findall(r"\w+", words)) < 3] == []
    assert [words for words in found if not is_said(words, texts)] == []


def test_a_quotation_that_nobody_says_is_found() -> None:
    texts = messages()
    assert is_said("run ... took ... over while this publisher connected to it", texts)
    assert not is_said("over while the publisher connected to it", texts)
    assert not is_said("run ... over while this publisher connected", [text for text in texts if "took" not in text])
