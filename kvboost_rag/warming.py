"""Reads documents into the store before anyone asks: which, behind what, and whether they fit.

Knows documents, primers and the engine; knows nothing of prompts' questions or frameworks. A document encoded all
alone takes its first tokens for the beginning of everything, and no token of it has ever looked back at another text.
So each one is encoded behind a chat opening and a *primer*, some 320 tokens of other text; only the document's own KV
is kept. The primer is computed once for all documents, and costs nothing when questions come.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from tqdm.auto import tqdm

from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.types import Segment
from kvboost_rag.errors import BudgetWarning, OptionError
from kvboost_rag.prompt import SEPARATOR, document_piece
from kvboost_rag.report import Estimate, WarmReport, format_bytes
from kvboost_rag.tokens import Tokens

PRIMER_TOKENS = 320
ID_BYTES = 8  # kept beside the KV of each token, to verify hits
NUM_POOL = 2  # two, so that a document that is a primer itself finds another


@dataclass(frozen=True)
class Document:
    """A text that can be warmed: stripped, tokenised, hashed."""

    text: str
    ids: tuple[int, ...]
    content: bytes


def check_texts(texts: str | Iterable[str]) -> list[str]:
    """``texts`` as a list of stripped strings, blank ones included as "". Raises TypeError on anything else."""
    given = [texts] if isinstance(texts, str) else list(texts)
    return [piece.text if (piece := document_piece(t, i)) else "" for i, t in enumerate(given)]


class Warmer:
    """Warms documents into one engine's store, and remembers which texts prime the others."""

    def __init__(self, engine: Engine, tokens: Tokens):
        self._engine, self._tokens = engine, tokens
        self._pool: list[Document] = []

    def documents(self, texts: Iterable[str]) -> list[Document]:
        """One per distinct text, blank ones left out."""
        found: dict[str, Document] = {}
        for text in texts:
            if text and text not in found:
                ids = self._tokens.encode(text)
                found[text] = Document(text, ids, self._engine.content_key(ids))
        return list(found.values())

    def clear(self) -> None:
        self._pool.clear()

    def is_warm(self, document: Document) -> bool:
        entry = self._engine.store.peek(document.content)
        return entry is not None and entry.warmed

    def size(self, document: Document) -> int:
        """Bytes its entry will take."""
        return len(document.ids) * (self._engine.model.bytes_per_token + ID_BYTES)

    def estimate(self, documents: Sequence[Document]) -> Estimate:
        config = self._engine.config
        budget = int(config.max_cache_bytes * config.warmed_share)
        total = num_fitting = 0
        for document in documents:
            total += self.size(document)
            num_fitting += total <= budget
        return Estimate(len(documents), sum(len(d.ids) for d in documents), total, budget, num_fitting)

    def warm(
        self,
        documents: Sequence[Document],
        report: WarmReport,
        opening: Sequence[Segment],
        primer: str | None,
        pinned: bool,
        progress: bool,
    ) -> None:
        """Warm what is not warm yet; fills ``report`` as it goes.

        Raises OptionError and PromptTooLongError before any work; warns with BudgetWarning if not all will fit.
        """
        started = time.perf_counter()
        cold = [d for d in documents if not self.is_warm(d)]
        report.num_already_warm = len(documents) - len(cold)
        choose = self._primers(primer, cold)
        contexts = [self._context(opening, choose(document)) for document in cold]
        for document, (context, _) in zip(cold, contexts, strict=True):
            num_tokens = sum(len(s.ids) for s in context) + len(document.ids)
            self._engine.check_length(num_tokens, 0, f"the document {document.text[:40]!r}... with its primer")
        self._warn_if_too_big(cold)
        bar = tqdm(total=len(cold), desc="warming", unit="doc", disable=not progress or len(cold) < 2)
        with bar:
            for document, (context, name) in zip(cold, contexts, strict=True):
                with self._engine.lock:
                    put = self._engine.warm(context, Segment(document.ids, document=True), pinned)
                report.num_evicted += sum(entry.warmed for entry in put.evicted)
                if put.stored:
                    report.num_warmed += 1
                    report.num_tokens += len(document.ids)
                    report.num_bytes += self.size(document)
                    if name not in report.primers:
                        report.primers.append(name)
                else:
                    report.num_rejected += 1
                report.seconds = time.perf_counter() - started
                bar.update()

    def _warn_if_too_big(self, cold: Sequence[Document]) -> None:
        stats = self._engine.store.stats()
        estimate = self.estimate(cold)
        if estimate.num_fitting < len(cold):
            warnings.warn(
                f"{estimate}. The rest will displace documents warmed earlier; raise max_cache_bytes "
                f"(now {format_bytes(stats.max_bytes)}) or warm fewer.",
                BudgetWarning,
                stacklevel=4,
            )

    def _primers(self, primer: str | None, cold: Sequence[Document]) -> _Chooser:
        if primer is None:
            return _Chooser([], None)
        if not isinstance(primer, str):
            raise OptionError.bad_value("primer", primer, "'auto', 'bundled', any text, or None")
        if primer not in ("auto", "bundled"):
            text = primer.strip()
            if not text:
                raise OptionError.bad_value("primer", primer, "'auto', 'bundled', any text, or None")
            return _Chooser(self.documents([text]), None)
        (bundled,) = self.documents([bundled_primer()])
        if primer == "bundled":
            return _Chooser([bundled], None)
        if len(self._pool) < NUM_POOL:
            known = {d.content for d in self._pool}
            fresh = [d for d in cold if d.content not in known]
            # By content hash: the same corpus gets the same primers in whatever order it comes.
            fresh.sort(key=lambda d: (len(d.ids) < PRIMER_TOKENS, d.content))
            self._pool += fresh[: NUM_POOL - len(self._pool)]
        return _Chooser(list(self._pool), bundled)

    def _context(self, opening: Sequence[Segment], primer: Document | None) -> tuple[list[Segment], str]:
        if primer is None:
            return list(opening), "none"
        body = Segment(primer.ids[:PRIMER_TOKENS], document=True)
        return [*opening, body, Segment(self._tokens.encode(SEPARATOR))], primer.text[:60]


@dataclass(frozen=True)
class _Chooser:
    """The first primer that is another text than the document itself."""

    pool: Sequence[Document]
    fallback: Document | None

    def __call__(self, document: Document) -> Document | None:
        others = (p for p in self.pool if p.content != document.content)
        return next(others, self.fallback)


def bundled_primer() -> str:
    """The neutral text that primes a document when there is no other."""
    return resources.files("kvboost_rag").joinpath("data/primer.txt").read_text(encoding="utf-8").strip()
