"""Who may import whom: read from the source, compared with the table in DESIGN, section 3."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "weightcast"

# A module imports only from lines above its own. The design's rows are cut finer here, so that no two modules of a
# line import each other. `x.*` are the modules inside package x; `control` alone is its (empty) __init__.
LINES: tuple[tuple[str, ...], ...] = (
    ("errors", "host_memory", "host_copy", "forked", "rendezvous"),
    ("manifest", "registry", "report", "guard", "trainer_records"),
    ("gate", "plan", "control", "control.messages", "conversion", "sharding", "tensor_digest"),
    ("bucket", "link", "watch", "flat_shards", "control.rank_calls"),
    ("adapters", "interfaces", "listener", "places", "process_group"),
    ("checkpoint", "trainer_epochs", "assignment", "store", "store.address", "store.records", "store.files"),
    ("store.locks",),
    ("store.reading", "store.writing"),
    ("store.survey",),
    ("trainer_ranks", "cuts"),
    ("gather", "rank_arena", "spread"),
    ("arenas",),
    ("agreement",),
    ("assemble",),
    ("admission",),
    ("sources", "sources.*", "transports", "transports.*", "engines", "engines.*"),
    ("update", "fleet", "export", "control.http"),
    ("hold", "publication"),
    ("worker", "ensemble", "follower"),
    ("control.metrics", "control.client", "control.server_openai", "control.server_replies"),
    ("control.server_weights", "control.completions", "publisher"),
    ("control.server", "replay", "relay"),
    ("guest", "guest.*"),
    ("integrations", "integrations.*"),
    ("testing", "testing.*", "bench", "bench.*", "demo", "demo.*"),
    ("cli", "cli.*"),
    ("__init__",),
)
LEAVES = ("sources.*", "transports.*", "engines.*")
LEAF_BLIND = ("update", "hold", "worker", "fleet", "publication", "publisher", "integrations.*")
"""To these, leaves are handed over, or found by the registry."""

FREE_INSIDE = ("guest", "testing", "bench", "demo", "cli")
"""Packages whose modules may import each other."""

# a package that is not of the standard library -> the modules that may import it
FOREIGN: dict[str, tuple[str, ...]] = {
    "msgspec": ("*",),
    "torch": (
        *(
            "host_copy",
            "bucket",
            "adapters",
            "checkpoint",
            "conversion",
            "sharding",
            "flat_shards",
            "watch",
            "tensor_digest",
            "interfaces",
            "assemble",
            "publication",
            "publisher",
            "places",
            "process_group",
            "trainer_epochs",
            "trainer_ranks",
            "assignment",
            "cuts",
            "gather",
            "rank_arena",
            "spread",
            "arenas",
            "agreement",
            "ensemble",
            "store.reading",
            "relay",
        ),
        *(
            "sources.*",
            "transports.*",
            "engines.*",
            "integrations.vllm.*",
            "guest.*",
            "integrations.torchrl.*",
            "integrations.sglang.*",
            "testing.*",
            "bench.*",
            "demo.*",
            "cli.serve",
        ),
    ),
    "numpy": ("tensor_digest", "bench.*", "demo.*", "testing.*"),
    "xxhash": ("bucket",),
    "httpx": ("control.http", "demo.*"),
    "safetensors": (*("sources.safetensors", "export", "guest.reference", "integrations.sglang.stock_disk"),),
    "huggingface_hub": ("guest.reference", "integrations.sglang.stock_acceptance"),
    "ray": ("integrations.vllm.clients", "integrations.vllm.objects"),
    "transformers": ("engines.transformers.*", "demo.*", "bench.shapes", "cli.serve"),
    "tokenizers": ("demo.*",),
    "fastapi": ("control.server", "integrations.vllm.routes", "integrations.sglang.routes"),
    "starlette": (
        *("control.server", "control.server_*", "control.completions"),
        *("integrations.vllm.routes", "guest.routes"),
    ),
    "uvicorn": ("control.server",),
    "prometheus_client": ("control.metrics",),
    "rich": ("cli.*", "demo.*", "bench.*"),
    "matplotlib": ("bench.*", "demo.*"),
    "pytest": ("testing.*",),
    "hypothesis": ("testing.*",),
    "vllm": ("integrations.vllm.*",),
    "sglang": ("integrations.sglang.*",),
    "torchrl": ("integrations.torchrl.*",),
    "tensordict": ("integrations.torchrl.*",),
    "megatron": ("sources.megatron.parallel",),
}

UNSAFE = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
"""Promise 6: what reads a pickle runs what it reads. The queues and connections of multiprocessing pickle as well."""

PICKLING_CALLS = {
    *("torch.load", "torch.save", "all_gather_object", "broadcast_object_list", "gather_object"),
    *("scatter_object_list", "send_object_list", "recv_object_list"),
}


def modules() -> dict[str, Path]:
    """Dotted name below `weightcast` -> file."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every absolute name that an import names, wherever it stands, `from a import b` as a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def inner(name: str) -> str | None:
    """The module of weightcast that an imported name belongs to; None for foreign ones and for the version."""
    if name == "weightcast" or not name.startswith("weightcast."):
        return None
    parts = name.removeprefix("weightcast.").split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in MODULES:
            return ".".join(parts[:end])
    return None if parts == ["__version__"] else "__init__"


def line_of(module: str) -> int:
    for number, patterns in enumerate(LINES):
        if any(fnmatch(module, pattern) for pattern in patterns):
            return number
    raise AssertionError(f"{module} is in no line of the table: give it its place in DESIGN section 3 and here")


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    """`x.*` stands for the package x itself as well."""
    return any(fnmatch(module, p) or module == p.removesuffix(".*") for p in patterns)


def family(module: str) -> str:
    """A leaf: `transports.ipc_sender` is of transports.ipc, `engines.transformers.text` of engines.transformers."""
    package, _, rest = module.partition(".")
    return f"{package}.{rest.split('.')[0].split('_')[0]}"


def may_import(importer: str, imported: str) -> bool:
    if importer == imported or imported == importer.rpartition(".")[0] == "":
        return True
    if matches(imported, LEAVES) and matches(importer, LEAF_BLIND):
        return False
    if any(matches(importer, group) and matches(imported, group) for group in (LEAVES, ("integrations.*",))):
        return family(importer) == family(imported)
    top = importer.split(".")[0]
    if top in FREE_INSIDE and imported.split(".")[0] == top:
        return True
    return line_of(imported) < line_of(importer)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_place(module: str) -> None:
    line_of(module)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_upwards_only(module: str) -> None:
    wrong = [
        f"{MODULES[module]}:{lineno}: {module} imports {target}"
        for lineno, name in imports(MODULES[module])
        if (target := inner(name)) is not None and not may_import(module, target)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", MODULES)
def test_frameworks_stay_in_their_own_modules(module: str) -> None:
    for lineno, name in imports(MODULES[module]):
        package = name.split(".")[0]
        if package == "weightcast" or package in sys.stdlib_module_names:
            continue
        assert package in FOREIGN, f"{module}:{lineno} imports {package}, which is in no table"
        assert matches(module, FOREIGN[package]), f"{module}:{lineno} imports {package}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_reads_or_writes_a_pickle(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    names = [name for _, name in imports(MODULES[module])]
    assert not [n for n in names if n.split(".")[0] in UNSAFE or n.startswith("multiprocessing")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert node.attr not in PICKLING_CALLS, f"{module}:{node.lineno}: {node.attr}"
            assert ast.unparse(node) not in PICKLING_CALLS, f"{module}:{node.lineno}: {ast.unparse(node)}"


def test_only_the_registry_and_the_exports_name_modules_in_strings() -> None:
    """A module path in a string is an import that the tests above would not see; some start a process of their own."""
    wrong = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                dotted = node.value.partition(":")[0]
                if dotted.startswith("weightcast.") and dotted.removeprefix("weightcast.") in MODULES:
                    wrong.append(module)
    known = {"registry", "__init__", "cli", "cli.demo", "guard", "demo.supervisor", "bench.engines", "bench.trainer"}
    known |= {"integrations.vllm", "integrations.vllm.plugin"}
    assert set(wrong) <= known, sorted(set(wrong))


def test_every_package_is_one() -> None:
    """A folder without __init__.py is left out of a wheel."""
    for path in MODULES.values():
        assert (path.parent / "__init__.py").is_file(), path.parent
