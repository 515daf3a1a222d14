"""Who may import whom, as docs/architecture.md says: read from the source, lazy and type-checking imports included."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "weightcast"

# A folder, or a file at the top, imports only from rows above its own, and from `errors`.
ROWS: tuple[tuple[str, ...], ...] = (
    ("native",),
    ("host", "format"),
    ("links", "process_group"),
    ("seams",),
    ("checkpoint", "store", "registry"),
    ("sources", "engines", "transports"),
    ("serving", "trainer"),
    ("control",),
    ("integrations",),
    ("testing",),
)
BELOW_ALL, ABOVE_ALL = ("errors",), ("__init__", "cli")

ROOMS_OF_LEAVES = ("sources", "engines", "transports", "integrations")
"""In these, what lies side by side doesn't know of each other."""
SHARED_BY_LEAVES = (
    *("engines.gate", "integrations.handed", "integrations.plugin", "integrations.rollout"),
    *("integrations.stock_adapters", "integrations.stock_directory", "sources.joined"),
    *("transports.kept_memory", "transports.receiving", "transports.records", "transports.sending"),
)

BLIND = ("serving", "trainer")
"""To these, leaves are handed over, or found by the registry; a store is published again by its source."""
SEES = {("trainer.rollback", "sources.store"), ("trainer.publisher", "sources.store")}

# a package that is not of the standard library -> the modules that may import it
FOREIGN: dict[str, tuple[str, ...]] = {
    "msgspec": ("*",),
    "torch": (
        *(
            "host.copy",
            "host.device",
            "host.device_memory",
            "host.memory",
            "format.bucket",
            "format.packed_base",
            "format.bucket_digest",
            "format.device_digest",
            "format.digest_kernel",
            "format.tensor_digest",
            "native.deltas",
            "native.tables",
            "process_group",
            "seams.*",
        ),
        *("checkpoint.*", "store.copying", "store.reading", "sources.*", "engines.*", "transports.*"),
        *("serving.*", "trainer.*", "integrations.*", "testing.*"),
        *("cli.bench", "cli.delta", "cli.planned_bytes", "cli.serve"),
    ),
    "numpy": ("format.manifest", "native.deltas", "native.tables", "testing.*"),
    "triton": ("format.digest_kernel",),
    "h11": ("control.client",),
    "obstore": ("store.objects",),
    "safetensors": ("checkpoint.files",),
    "huggingface_hub": ("integrations.plugin.checkpoint_header",),
    "ray": ("integrations.vllm.clients", "integrations.verl.*", "integrations.nemo_rl.*", "integrations.ray.*"),
    "httpx": ("integrations.kubernetes.*",),
    "transformers": ("engines.transformers.*", "integrations.trl.*", "cli.planned_bytes", "cli.serve"),
    "fastapi": ("integrations.vllm.routes", "integrations.sglang.engine"),
    "starlette": ("control.routes", "control.server.*", "integrations.*.routes", "cli.dashboard"),
    "uvicorn": ("control.server.app", "control.server.connections"),
    "prometheus_client": ("control.server.metrics", "integrations.plugin.metrics", "trainer.metrics"),
    "opentelemetry": ("trainer.spans",),
    "rich": ("cli.*",),
    "pytest": ("testing.*",),
    "hypothesis": ("testing.*",),
    "vllm": ("integrations.vllm.*",),
    "sglang": ("integrations.sglang.*",),
    "torchrl": ("integrations.torchrl.*",),
    "tensordict": ("integrations.torchrl.*",),
    "trl": ("integrations.trl.*",),
    "megatron": ("sources.megatron.source",),
    "verl": ("integrations.verl.*",),
    "nemo_rl": ("integrations.nemo_rl.*",),
}

UNSAFE = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
"""Promise 6: what reads a pickle runs what it reads. The queues and connections of multiprocessing pickle as well."""

WRITES_PICKLES = {"integrations.sglang.stock.route_tensor"}
"""What stock SGLang reads. These modules may only write."""

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


def row_of(module: str) -> int:
    room = module.split(".")[0]
    if room in BELOW_ALL + ABOVE_ALL:
        return -1 if room in BELOW_ALL else len(ROWS)
    for number, rooms in enumerate(ROWS):
        if room in rooms:
            return number
    raise AssertionError(f"{module} is in no row: give its room a place here and in docs/architecture.md")


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    """`x.*` stands for the package x itself as well."""
    return any(fnmatch(module, p) or module == p.removesuffix(".*") for p in patterns)


def may_import(importer: str, imported: str) -> bool:
    room, other_room = importer.split(".")[0], imported.split(".")[0]
    if room != other_room:
        is_handed_over = room in BLIND and other_room in ("sources", "engines", "transports")
        return row_of(imported) < row_of(importer) and (not is_handed_over or is_seen(importer, imported))
    if room in ROOMS_OF_LEAVES and not matches(imported, tuple(f"{name}.*" for name in SHARED_BY_LEAVES)):
        return importer.split(".")[:2] == imported.split(".")[:2]
    return True


def is_seen(importer: str, imported: str) -> bool:
    return imported == "engines.gate" or (importer, imported) in SEES


EDGES: dict[str, set[str]] = {
    module: {target for _, name in imports(path) if (target := inner(name)) is not None and target != module}
    for module, path in MODULES.items()
}


def circles() -> list[list[str]]:
    """Modules that import each other, also by way of others: whoever can be reached from a module that it can reach."""
    reached: dict[str, set[str]] = {}
    for module in EDGES:
        found, todo = set[str](), [module]
        while todo:
            todo += (new := EDGES.get(todo.pop(), set()) - found)
            found |= new
        reached[module] = found
    return [
        sorted(m for m in found if module in reached.get(m, ())) for module, found in reached.items() if module in found
    ]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_upwards_only(module: str) -> None:
    wrong = [
        f"{MODULES[module]}:{lineno}: {module} imports {target}"
        for lineno, name in imports(MODULES[module])
        if (target := inner(name)) is not None and target != module and not may_import(module, target)
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_in_a_circle() -> None:
    assert not circles()


def test_the_top_is_four_files_and_a_marker() -> None:
    files = {path.name for path in SRC.iterdir() if path.is_file()}
    assert files == {"__init__.py", "errors.py", "process_group.py", "registry.py", "py.typed"}


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


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
    if module in WRITES_PICKLES:
        names.remove("pickle")
        uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "pickle"]
        calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.value in uses]
        assert calls == ["pickle.dumps"] * len(uses), calls
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
    known = {
        "registry",
        "__init__",
        "cli",
        "links.watchdog",
    }
    known |= {"integrations.vllm", "integrations.vllm.plugin"}
    assert set(wrong) <= known, sorted(set(wrong))


def test_every_package_is_one() -> None:
    """A folder without __init__.py is left out of a wheel."""
    for path in MODULES.values():
        assert (path.parent / "__init__.py").is_file(), path.parent


ORDER = {"Stream", "stream", "Event", "current_stream", "synchronize", "set_device", "wait_stream"}


def test_one_file_asks_torch_for_the_order_of_a_gpus_work() -> None:
    """So that tests can put a GPU without hardware there."""
    asking = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ORDER and ast.unparse(node.value) == "torch.cuda"
    }
    assert not asking
    assert "cuda: Any = torch.cuda" in MODULES["host.device"].read_text()


def test_no_generator_of_a_context_manager_raises_another_error_in_place_of_one() -> None:
    """Python 3.12 and 3.13 make a cycle of that, with the error's frames: `errors.Translated` is none."""
    wrong = []
    for path in MODULES.values():
        for function in ast.walk(ast.parse(path.read_text())):
            if not any("contextmanager" in ast.unparse(each) for each in getattr(function, "decorator_list", [])):
                continue
            handlers = [
                handler
                for attempt in ast.walk(function)
                if isinstance(attempt, ast.Try) and any(isinstance(node, ast.Yield) for node in ast.walk(attempt))
                for handler in attempt.handlers
            ]
            wrong += [
                f"{path}:{node.lineno}: {ast.unparse(node)}"
                for node in itertools.chain.from_iterable(map(ast.walk, handlers))
                if isinstance(node, ast.Raise) and node.exc is not None
            ]
    assert not wrong, "\n".join(wrong)
