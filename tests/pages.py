"""The pages of the documentation: their Python blocks, what these may take as given, and how they are run.

Knows Markdown, tiny models and stand-ins for what a reader has; knows nothing of what a page says. The names of GIVEN
are explained to readers in `docs/README.md`. A page's blocks share one namespace, in order, as the cells of a notebook
do, ``await`` outside a function included. A line that ends with ``# -> text`` says what it prints.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from conftest import build_model, build_tokenizer, embed

from kvboost_rag import KVBoost, hub, sample

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
# What a page may use without saying where it comes from.
GIVEN = ("passages", "found", "question", "engine", "documents", "embedding", "retriever", "model_folder")
# README.md is an overview: each of its blocks is an excerpt, begins from what is given anew, and leaves these out too.
LEFT_OUT_IN_README = ("model", "join", "prompt", "RunnablePassthrough", "VectorStoreIndex", "SentenceSplitter")
NUM_PASSAGES, PASSAGE_CHARACTERS, NUM_FOUND = 6, 240, 3
CONTEXT_TOKENS = 16_384
_FENCE = re.compile(r"^( *)```(.*)$")
_PRINTS = re.compile(r"# -> (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line``: the number of its first line within the page."""

    language: str
    text: str
    line: int

    @property
    def prints(self) -> list[str]:
        """How lines begin that it is said to print, in order."""
        return [said.strip() for said in _PRINTS.findall(self.text)]

    def framework(self, before: str) -> str:
        """The framework it imports; the one ``before`` it if it imports none."""
        roots = re.findall(r"^\s*(?:from|import) (langchain|llama_index)", self.text, flags=re.MULTILINE)
        return roots[-1] if roots else before


def fenced(page: Path) -> Iterator[Block]:
    """Every fenced block of ``page``."""
    language, first, lines = None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence is not None and language is None:
            language, first, lines = fence[2].strip(), number + 1, []
        elif fence is not None:
            yield Block(language or "", textwrap.dedent("\n".join(lines)), first)
            language = None
        else:
            lines.append(line)
    assert language is None, f"{page.name}: the block of line {first} has no end"


def python_blocks(page: Path) -> list[Block]:
    return [block for block in fenced(page) if block.language == "python"]


def prose(page: Path) -> str:
    """The page without its fenced blocks and code spans."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", "", text)


def links(page: Path) -> list[str]:
    """Targets of the page's links and images that are no web addresses."""
    found = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", prose(page))
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """What ``#...`` may name in ``page``: its headings, as they are linked to."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def tiny_model() -> Any:
    """A random model whose answers are short: one token of three ends them."""
    model = build_model(num_hidden_layers=2, max_position_embeddings=CONTEXT_TOKENS)
    model.generation_config.eos_token_id = list(range(2, model.config.vocab_size, 3))
    return model


def save_tiny_model(folder: Path) -> Path:
    tiny_model().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def load(name: Any, **options: Any) -> hub.Loaded:
    """Stands for ``hub.load`` where there is no folder ``name``: a tiny model, whatever the name."""
    return hub.Loaded(tiny_model(), build_tokenizer())


def embedder() -> Any:
    """Stands for ``kvboost_rag.demo.embedder``."""
    return lambda texts: [embed(text) for text in texts]


class Given:
    """The values of GIVEN, for one page. ``documents``, ``embedding`` and ``retriever`` are of a framework."""

    def __init__(self, model_folder: Path):
        texts = list(sample.passages().items())[:NUM_PASSAGES]
        asked = next(q for q in sample.questions() if q.passage in dict(texts))
        self.passages = {name: text[:PASSAGE_CHARACTERS].strip() for name, text in texts}
        self.question, self.model_folder = asked.question, model_folder
        self.engine = KVBoost(tiny_model(), build_tokenizer(), max_cache_bytes="200MB")

    def names(self, framework: str) -> dict[str, Any]:
        texts = list(self.passages.values())
        own = {
            "passages": texts,
            "found": texts[:NUM_FOUND],
            "question": self.question,
            "engine": self.engine,
            "model_folder": str(self.model_folder),
        }
        return own | (self._llama_index if framework == "llama_index" else self._langchain)

    @cached_property
    def _langchain(self) -> dict[str, Any]:
        from langchain_core.documents import Document
        from langchain_core.vectorstores import InMemoryVectorStore
        from stores import Words

        documents = [Document(page_content=text, metadata={"source": name}) for name, text in self.passages.items()]
        store = InMemoryVectorStore.from_documents(documents, Words())
        retriever = store.as_retriever(search_kwargs={"k": NUM_FOUND})
        return {"documents": documents, "embedding": Words(), "retriever": retriever}

    @cached_property
    def _llama_index(self) -> dict[str, Any]:
        from indexes import Words
        from llama_index.core import Document, VectorStoreIndex

        documents = [Document(text=text, metadata={"source": name}) for name, text in self.passages.items()]
        index = VectorStoreIndex.from_documents(documents, embed_model=Words())
        return {
            "documents": documents,
            "embedding": Words(),
            "retriever": index.as_retriever(similarity_top_k=NUM_FOUND),
        }


def left_out_in_readme() -> dict[str, Any]:
    """The values of LEFT_OUT_IN_README."""
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnablePassthrough
    from llama_index.core import VectorStoreIndex
    from llama_index.core.node_parser import SentenceSplitter

    def join(documents: list[Any]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    template = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
    values = ("a hub name", join, template, RunnablePassthrough, VectorStoreIndex, SentenceSplitter)
    return dict(zip(LEFT_OUT_IN_README, values, strict=True))


def run(page: Path, given: Given) -> None:
    """Run the page's Python blocks. Raises what they raise, AssertionError if one prints other than it says."""
    names: dict[str, Any] = {"__name__": "__main__"}
    ours: dict[str, Any] = {}  # of ``names``, what was given; a page that assigns such a name keeps its own
    framework = "langchain"
    try:
        for block in python_blocks(page):
            framework = block.framework(framework)
            if page == README:
                names.update(given.names(framework) | left_out_in_readme())
            else:
                kept = {name for name in names if names[name] is not ours.get(name)}
                ours = {name: value for name, value in given.names(framework).items() if name not in kept}
                names.update(ours)
            _run(page, block, names)
    finally:
        for engine in (given.engine, *(value for value in names.values() if isinstance(value, KVBoost))):
            engine.close()


def _run(page: Path, block: Block, names: dict[str, Any]) -> None:
    source = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's own lines
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    printed = io.StringIO()
    with redirect_stdout(printed):
        waiting = eval(code, names)
        if inspect.iscoroutine(waiting):
            asyncio.run(waiting)
    left = iter(printed.getvalue().splitlines())
    for said in block.prints:
        assert any(line.startswith(said) for line in left), (
            f"{page.name}, block of line {block.line}: {said!r} is not printed (there), but:\n{printed.getvalue()}"
        )
