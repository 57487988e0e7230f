"""Reads documents into the store before anyone asks: which, behind what, and whether they fit.

Knows documents, primers and the engine; knows nothing of prompts' questions or frameworks. A document encoded all
alone takes its first tokens for the beginning of everything, and no token of it has ever looked back at another text.
So each one is encoded behind a prompt's opening and a *primer*, other text of the same corpus; only the document's own
KV is kept, and the primer costs nothing when questions come.

The automatic primer is the document read before that shares most with the new one (chunks of one text overlap, and
are retrieved together): its KV is there already, moved into place like any other. Where nothing is related, it is
some 320 tokens of a document chosen by content hash, computed once for all. Measured against one shared primer, on
passages that overlap: KL 0.50 instead of 0.69 of a document encoded alone, 0.38 instead of 0.52 with repair.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from tqdm.auto import tqdm

from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.types import Segment, total_tokens
from kvboost_rag.errors import BudgetWarning, OptionError
from kvboost_rag.prompt import SEPARATOR, document_piece
from kvboost_rag.related import RelatedIndex, runs
from kvboost_rag.report import Estimate, WarmReport, format_bytes
from kvboost_rag.tokens import Tokens

PRIMER_TOKENS = 320
MAX_RELATED_TOKENS = 1024
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


@dataclass(frozen=True)
class _Primer:
    """What stands in front of a document while it is read. ``shared``: the same for all, computed once."""

    ids: tuple[int, ...]
    name: str
    shared: bool = True


class Warmer:
    """Warms documents into one engine's store, and remembers which texts prime the others."""

    def __init__(self, engine: Engine, tokens: Tokens):
        self._engine, self._tokens = engine, tokens
        self._pool: list[Document] = []
        self._read: dict[bytes, Document] = {}
        self._related: RelatedIndex[bytes] = RelatedIndex()

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
        self._read.clear()
        self._related.clear()

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
        shared = self._shared_primers(primer, cold)
        for document in cold:
            num_tokens = total_tokens(opening) + len(document.ids)
            self._engine.check_length(
                num_tokens, 0, f"the document {document.text[:40]!r}... behind the prompt's opening"
            )
        self._warn_if_too_big(cold)
        with tqdm(total=len(cold), desc="warming", unit="doc", disable=not progress or len(cold) < 2) as bar:
            for document in cold:
                self._warm_one(document, report, opening, shared, primer == "auto", pinned)
                report.seconds = time.perf_counter() - started
                bar.update()

    def _warm_one(
        self,
        document: Document,
        report: WarmReport,
        opening: Sequence[Segment],
        shared: Sequence[Document],
        related: bool,
        pinned: bool,
    ) -> None:
        found = runs(document.ids) if related else frozenset()
        primer = self._primer(document, found, shared)
        context = self._context(document, opening, primer)
        with self._engine.lock:
            put = self._engine.warm(context, Segment(document.ids, document=True), pinned)
        report.num_evicted += sum(entry.warmed for entry in put.evicted)
        if not put.stored:
            report.num_rejected += 1
            return
        if related:
            self._read[document.content] = document
            self._related.add(document.content, found)
        report.num_warmed += 1
        report.num_tokens += len(document.ids)
        report.num_bytes += self.size(document)
        if primer is not None and not primer.shared:
            report.num_related += 1
        elif primer is not None and primer.name not in report.primers:
            report.primers.append(primer.name)

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

    def _shared_primers(self, primer: str | None, cold: Sequence[Document]) -> list[Document]:
        """The texts that prime documents without a related one: the first that is another text than the document."""
        if primer is None:
            return []
        if not isinstance(primer, str) or not primer.strip():
            raise OptionError.bad_value("primer", primer, "'auto', 'bundled', any text, or None")
        if primer not in ("auto", "bundled"):
            return self.documents([primer.strip()])
        (bundled,) = self.documents([bundled_primer()])
        if primer == "bundled":
            return [bundled]
        if len(self._pool) < NUM_POOL:
            known = {d.content for d in self._pool}
            fresh = [d for d in cold if d.content not in known]
            # By content hash: the same corpus gets the same primers in whatever order it comes.
            fresh.sort(key=lambda d: (len(d.ids) < PRIMER_TOKENS, d.content))
            self._pool += fresh[: NUM_POOL - len(self._pool)]
        return [*self._pool, bundled]

    def _primer(self, document: Document, found: frozenset[int], shared: Sequence[Document]) -> _Primer | None:
        for content in self._related.related(found):
            other = self._read[content]
            if content != document.content and len(other.ids) <= MAX_RELATED_TOKENS and self.is_warm(other):
                return _Primer(other.ids, other.text[:60], shared=False)
        for other in shared:
            if other.content != document.content:
                return _Primer(other.ids[:PRIMER_TOKENS], other.text[:60])
        return None

    def _context(self, document: Document, opening: Sequence[Segment], primer: _Primer | None) -> list[Segment]:
        if primer is None:
            return list(opening)
        separator = Segment(self._tokens.encode(SEPARATOR))
        context = [*opening, Segment(primer.ids, document=True), separator]
        fits = total_tokens(context) + len(document.ids) <= self._engine.model.context_tokens
        return context if fits else list(opening)


def bundled_primer() -> str:
    """The neutral text that primes a document when there is no other."""
    return resources.files("kvboost_rag").joinpath("data/primer.txt").read_text(encoding="utf-8").strip()
