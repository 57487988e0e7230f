"""The documentation does what it says: its Python runs, its links lead somewhere, its map of the paper is true."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest
import torch
from pages import GIVEN, INDEX, PAGES, ROOT, Given
from transformers import LlamaConfig, LlamaForCausalLM

from kvboost_rag import demo, hub

ROWS = [
    line.split("|")
    for line in (ROOT / "docs/paper.md").read_text(encoding="utf-8").splitlines()
    if "`" in line and line.startswith("|")
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[1].strip()} {row[2].strip()}")
def test_every_section_has_its_code_and_its_test(row: list[str]) -> None:
    code, tests = (re.findall(r"`([^`]+\.py)`", cell) for cell in row[3:5])
    assert code
    assert tests
    assert all((ROOT / "kvboost_rag" / name).is_file() for name in code), code
    assert all((ROOT / "tests" / name).is_file() for name in tests), tests


# The Python of each page


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def given(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """What a page may take as given, in a home of its own, without a network."""
    from indexes import Words
    from llama_index.core import Settings

    from_folder = hub.load
    monkeypatch.setattr(
        hub, "load", lambda name, **options: (from_folder if Path(name).is_dir() else pages.load)(name, **options)
    )
    monkeypatch.setattr(hub, "bundled_model", lambda: model_folder)
    monkeypatch.setattr(demo, "embedder", pages.embedder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Settings.embed_model = Words()
    return Given(model_folder)


@each_page
def test_the_python_of_a_page_runs(page: Path, given: Given) -> None:
    pages.run(page, given)


def test_a_block_that_prints_something_else_is_found(given: Given, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(len(found), 'texts')  # -> 3 texts\nprint(2)  # -> 3\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"block of line 2: '3' is not printed"):
        pages.run(page, given)


@each_page
def test_no_block_of_python_goes_by_another_name(page: Path) -> None:
    """But for the code of other packages on the page about migration, which is marked ``py``."""
    allowed = {"python", "py"} if page.name == "migration.md" else {"python"}
    assert {b.language for b in pages.fenced(page) if b.language.lower().startswith("py")} <= allowed


def test_a_name_that_a_page_assigns_is_its_own(given: Given, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    blocks = (
        "found = 1",
        "print(found, type(documents[0]).__module__)  # -> 1 langchain_core",
        "import llama_index.core",
    )
    blocks += ("print(found, type(documents[0]).__module__)  # -> 1 llama_index.core",)
    page.write_text("\n".join(f"```python\n{block}\n```" for block in blocks), encoding="utf-8")
    pages.run(page, given)


def test_the_index_explains_what_is_given() -> None:
    assert re.findall(r"^\| `(\w+)` \|", INDEX.read_text(encoding="utf-8"), flags=re.MULTILINE) == list(GIVEN)


# Links


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in pages.links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in pages.anchors(file), f"{page.name} links to {target}"


def test_every_page_is_in_the_index() -> None:
    listed = {(INDEX.parent / target).resolve() for target in pages.links(INDEX)}
    assert [page.name for page in PAGES[1:] if page != INDEX and page not in listed] == []


# A number that stands outside the generated tables


def test_the_packed_weights_on_the_page_about_memory() -> None:
    """Counted by shape: the linear layers but the vocabulary, and all parameters, of SmolLM2-135M in float32."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=49_152,
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                tie_word_embeddings=True,
            )
        )
    layers = [part for part in model.model.modules() if isinstance(part, torch.nn.Linear)]
    packed, weights = (
        sum(parameter.numel() for parameter in group) * torch.float32.itemsize / 1e6
        for group in ([layer.weight for layer in layers], model.parameters())
    )
    text = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    assert f"SmolLM2-135M: {packed:.1f} MB beside {weights:.1f} MB of weights" in text.replace("\n  ", " ")
