"""The shape of the code base: imports point one way, and importing the package costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvboost_rag"
# Each module may import from its own rank and those before it (design: "imports point one way").
RANKS = [
    {"errors", "_version", "sample"},
    {"engine.types", "engine.lock", "engine.compat", "engine.capabilities", "engine.costs"},
    {"engine.config", "engine.chunking", "engine.keys", "engine.rope"},
    {"engine.cache", "engine.attention", "engine.products", "engine.codecs", "engine.repair"},
    {"engine.exchange"},
    {"engine.runner"},
    {"engine.rotation"},
    {"engine.probe"},
    {"engine.model"},
    {"engine.store"},
    {"engine.assemble", "engine.forward"},
    {"engine.quantize"},
    {"engine.stitch", "engine.generate", "engine.account"},
    {"engine.batch", "engine.keeping"},
    {"engine.engine"},
    {"engine.batches"},
    {"show"},
    {"boundaries", "tokens", "prompt", "detect", "related", "hub", "report"},
    {"documents", "calls", "records"},
    {"stream", "warming", "options", "segmenting"},
    {"facade"},
    {"many", "single", "verify"},
    {"reading", "asking"},
    {"kvboost"},
    {"rag", "diagnosis", "owner"},
    {"demo"},
    {"cli"},
]
FRAMEWORKS = {"langchain_core", "langchain_kvboost", "llama_index"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def rank(name: str) -> int:
    for number, names in enumerate(RANKS):
        if any(name == known or name.startswith(f"{known}.") for known in names):
            return number
    raise AssertionError(f"{name} has no rank: add it to RANKS where the design puts it")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if module_name(p) not in ("__init__", "engine")]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    own = rank(module_name(path))
    for name in imports(path):
        if not name.startswith("kvboost_rag."):
            continue
        other = name.removeprefix("kvboost_rag.")
        if other.split(".")[0] in {p.stem for p in PACKAGE.iterdir()}:
            assert rank(other) <= own, f"{module_name(path)} must not import {other}"


@pytest.mark.parametrize("path", [p for p in MODULES if "engine" in p.parts], ids=module_name)
def test_the_engine_could_be_lifted_out(path: Path) -> None:
    for name in imports(path):
        root, _, rest = name.partition(".")
        assert root not in FRAMEWORKS
        if root == "kvboost_rag":
            assert rest.startswith(("engine.", "errors."))


@pytest.mark.parametrize("path", sorted((ROOT / "integrations").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_integrations_never_see_torch_or_transformers(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "transformers"}


def test_namespace_packages_have_no_init_file() -> None:
    namespace = ROOT / "integrations" / "llama_index"
    assert not (namespace / "__init__.py").exists()
    assert not (namespace / "llms" / "__init__.py").exists()


def test_importing_the_package_loads_neither_torch_nor_a_framework() -> None:
    heavy = ("torch", "transformers", "langchain_core", "llama_index.core", "sentence_transformers")
    code = f"import sys, kvboost_rag; loaded = [m for m in {heavy!r} if m in sys.modules]; assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    import kvboost_rag

    assert set(kvboost_rag._HOMES) | {"__version__"} == set(kvboost_rag.__all__)
    for name in kvboost_rag.__all__:
        assert getattr(kvboost_rag, name) is not None
    assert set(kvboost_rag.__all__) <= set(dir(kvboost_rag))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvboost_rag.nothing


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_say_what_they_know(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_a_missing_extra_names_the_command() -> None:
    for package, module, extra in (
        ("langchain_core", "langchain_kvboost", "langchain"),
        ("llama_index.core", "llama_index.llms.kvboost", "llama-index"),
    ):
        code = (
            f"import sys; sys.modules[{package!r}] = None\n"
            f"try:\n    import {module}\n"
            f"except ImportError as error:\n    assert 'pip install \"kvboost-rag[{extra}]\"' in str(error), error\n"
            "else:\n    raise AssertionError('no error')"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
