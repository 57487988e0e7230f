"""Reads documents into the store before anyone asks: which, behind what, and whether they fit.

Knows documents, primers and the engine; knows nothing of prompts' questions or frameworks. A document encoded all
alone takes its first tokens for the beginning of everything, and no token of it has ever looked back at another text.
So each one is encoded behind a prompt's opening and a *primer*, other text; only the document's own KV is kept, and the
primer costs nothing when questions come.

The automatic primer is what was read before: the document that shares most text with the new one (chunks of one text
overlap, and are retrieved together), else the one read last. Their KV is there already and is moved into place like
any other, so nothing is computed for it; the very first document is read behind a bundled text. Measured against one
shared primer of 320 tokens (``benchmarks/NOTES.md``): KL halved on unrelated passages, and again on overlapping ones.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

from tqdm.auto import tqdm

from kvboost_rag.documents import DocumentCutter, check_chunking
from kvboost_rag.engine.chunking import chunk_prompt, overlapped
from kvboost_rag.engine.engine import Engine
from kvboost_rag.engine.store import Put
from kvboost_rag.engine.types import Segment, total_tokens
from kvboost_rag.errors import BudgetWarning, OptionError
from kvboost_rag.prompt import SEPARATOR, document_piece
from kvboost_rag.related import RelatedIndex, runs
from kvboost_rag.report import Estimate, WarmReport, format_bytes
from kvboost_rag.show.reading import ReadDocument
from kvboost_rag.show.strip import title_of
from kvboost_rag.tokens import Tokens

PRIMER_TOKENS = 320
MAX_PRIMER_TOKENS = 1024
NUM_RECENT = 8
ID_BYTES = 8  # kept beside the KV of each token, to verify hits


@dataclass(frozen=True)
class Document:
    """A text that can be warmed: stripped, cut, tokenised, hashed. ``contents``: the hash of each of its ``parts``."""

    text: str
    parts: tuple[Segment, ...]
    contents: tuple[bytes, ...]
    chunking: str = "document"

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Of the whole document, (num_tokens,)."""
        return tuple(token for part in self.parts for token in part.ids)


@dataclass(frozen=True)
class WarmPlan:
    """Behind what documents are read. ``opening``: the beginning of prompts; ``primer`` as in ``KVBoost.warm``;
    ``first``: keep a version straight behind the opening too; ``again``: read also what is warm."""

    opening: Sequence[Segment]
    primer: str | None = "auto"
    pinned: bool = False
    first: bool = False
    again: bool = False


def check_texts(texts: str | Iterable[str]) -> list[str]:
    """``texts`` as a list of stripped strings, blank ones included as "". Raises TypeError on anything else."""
    given = [texts] if isinstance(texts, str) else list(texts)
    return [piece.text if (piece := document_piece(t, i)) else "" for i, t in enumerate(given)]


class Warmer:
    """Warms documents into one engine's store, and remembers what was read to prime what comes next."""

    def __init__(self, engine: Engine, tokens: Tokens, cutter: DocumentCutter):
        self._engine, self._cutter = engine, cutter
        self._separator = Segment(tokens.encode(SEPARATOR))
        self._read: dict[str, Document] = {}  # by text
        self._recent: deque[Document] = deque(maxlen=NUM_RECENT)  # the last one first
        self._related: RelatedIndex[str] = RelatedIndex()

    def documents(self, texts: Sequence[str], chunking: str | Sequence[str] | None = None) -> list[Document]:
        """One per distinct text, blank ones left out; cut by ``chunking``, one for all or one for each, or as they were
        cut before.

        Raises OptionError, before anything is noted.
        """
        each = [chunking] * len(texts) if chunking is None or isinstance(chunking, str) else list(chunking)
        if len(each) != len(texts):
            raise OptionError.bad_value("chunking", chunking, f"one name, or one for each of the {len(texts)} texts")
        for name in each:
            if name is not None:
                check_chunking(name)
        found: dict[str, Document] = {}
        for text, name in zip(texts, each, strict=True):
            if text and text not in found:
                if name is not None:
                    self._cutter.note(text, name)
                found[text] = self._document(text)
        return list(found.values())

    def _document(self, text: str) -> Document:
        parts = self._cutter.cut(text)
        num_tokens = total_tokens(parts)
        contents = tuple(self._engine.content_key(part.ids, num_tokens) for part in parts)
        return Document(text, parts, contents, self._cutter.chunking_of(text))

    def clear(self) -> None:
        self._read.clear()
        self._recent.clear()
        self._related.clear()

    def is_warm(self, document: Document) -> bool:
        entries = [self._engine.store.peek(content) for content in document.contents]
        return all(entry is not None and entry.warmed and not entry.anchored for entry in entries)

    def size(self, document: Document) -> int:
        """Bytes its entry will take."""
        return len(document.ids) * (self._engine.bytes_per_token + ID_BYTES)

    def estimate(self, documents: Sequence[Document]) -> Estimate:
        budget = self._engine.store.warmed_capacity
        total = num_fitting = 0
        for document in documents:
            total += self.size(document)
            num_fitting += total <= budget
        return Estimate(len(documents), sum(len(d.ids) for d in documents), total, budget, num_fitting)

    def warm(self, documents: Sequence[Document], report: WarmReport, plan: WarmPlan, progress: bool) -> None:
        """Warm what is not warm yet; fills ``report`` as it goes.

        Raises OptionError and PromptTooLongError before any work; warns with BudgetWarning if not all will fit.
        """
        started = time.perf_counter()
        cold = [d for d in documents if plan.again or not self.is_warm(d)]
        half = [d for d in documents if plan.first and (plan.again or not self._engine.holds(plan.opening, d.parts))]
        report.num_already_warm = len(documents) - len(cold)
        known = {d.text for d in documents} - {d.text for d in cold}
        report.documents += [_read(d, "already warm") for d in documents if d.text in known]
        front = self._fixed_primer(plan.primer)
        for document in cold:
            num_tokens = total_tokens(plan.opening) + len(document.ids)
            self._engine.check_length(
                num_tokens, 0, f"the document {document.text[:40]!r}... behind the prompt's opening"
            )
        self._warn_if_too_big([*cold, *half])
        total = len(cold) + len(half)
        with tqdm(total=total, desc="warming", unit="doc", disable=not progress or total < 2) as bar:
            for documents, read in ((cold, self._warm_one), (half, self._warm_first)):
                for document in documents:
                    read(document, report, plan, front)
                    report.seconds = time.perf_counter() - started
                    bar.update()

    def _warm_first(self, document: Document, report: WarmReport, plan: WarmPlan, front: Document | None) -> None:
        """The second version, straight behind the opening."""
        with self._engine.lock:
            put = self._engine.warm(plan.opening, document.parts, plan.pinned, anchored=True)
        report.num_evicted += sum(entry.warmed for entry in put.evicted)
        report.num_first += put.stored

    def _warm_one(self, document: Document, report: WarmReport, plan: WarmPlan, front: Document | None) -> None:
        auto = plan.primer == "auto"
        found = runs(document.ids) if auto else frozenset()
        related = [self._read[content] for content in self._related.related(found)]
        primers = self._read_before(document, related) if auto else []
        if front is not None and sum(len(p.ids) for p in primers) < PRIMER_TOKENS:
            primers.append(front)
        with self._engine.lock:
            put = self._run(self._context(document, plan.opening, primers), document, plan.pinned)
        report.num_evicted += sum(entry.warmed for entry in put.evicted)
        report.documents.append(_read(document, "read" if put.stored else "no room", primers))
        if not put.stored:
            report.num_rejected += 1
            return
        if auto:
            self._read[document.text] = document
            self._recent.appendleft(document)
            self._related.add(document.text, found)
        report.num_warmed += 1
        report.num_tokens += len(document.ids)
        report.num_bytes += self.size(document)
        report.num_related += bool(related) and related[0] in primers

    def _run(self, context: Sequence[Segment], document: Document, pinned: bool) -> Put:
        """Read ``document`` as a whole; or, with ``overlap_tokens``, each part behind the end of the one before it."""
        overlap = self._engine.config.overlap_tokens
        if overlap is None or len(document.parts) == 1:
            return self._engine.warm(context, document.parts, pinned, document.text, document.chunking)
        spans = overlapped(chunk_prompt(document.parts, self._engine.config.chunk_size), overlap)
        largest = max(document.parts, key=lambda part: len(part.ids))
        puts = []
        for part, (start, end) in zip(document.parts, spans, strict=True):
            before = Segment(document.ids[start : end - len(part.ids)])
            text = document.text if part is largest else ""
            puts.append(self._engine.warm([*context, before], part, pinned, text, document.chunking))
        return Put(all(put.stored for put in puts), tuple(entry for put in puts for entry in put.evicted))

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

    def _fixed_primer(self, primer: str | None) -> Document | None:
        """The text that primes where no document read before does. Raises OptionError."""
        if primer is None:
            return None
        if not isinstance(primer, str) or not primer.strip():
            raise OptionError.bad_value("primer", primer, "'auto', 'bundled', any text, or None")
        text = bundled_primer() if primer in ("auto", "bundled") else primer.strip()
        ids = self._document(text).ids[:PRIMER_TOKENS]
        return Document(text, (Segment(ids, document=True),), (self._engine.content_key(ids),))

    def _read_before(self, document: Document, related: Sequence[Document]) -> list[Document]:
        """Warm documents to read this one behind, best first: PRIMER_TOKENS of them if there are, at most
        MAX_PRIMER_TOKENS."""
        chosen: list[Document] = []
        num_tokens = 0
        for other in [*related, *self._recent]:
            if num_tokens >= PRIMER_TOKENS:
                break
            fits = num_tokens + len(other.ids) <= MAX_PRIMER_TOKENS
            if fits and other not in chosen and other.text != document.text and self.is_warm(other):
                chosen.append(other)
                num_tokens += len(other.ids)
        return chosen

    def _context(self, document: Document, opening: Sequence[Segment], primers: Sequence[Document]) -> list[Segment]:
        """The opening and the primers, the best one nearest; the opening alone where the context is too short."""
        context = list(opening)
        for primer in reversed(primers):
            context += [*primer.parts, self._separator]
        model = self._engine.model
        num_tokens, alone = (total_tokens(c) + len(document.ids) for c in (context, opening))
        fits = num_tokens <= model.context_tokens and model.regime(num_tokens) == model.regime(alone)
        return context if fits else list(opening)


def _read(document: Document, outcome: str, behind: Sequence[Document] = ()) -> ReadDocument:
    titles = tuple(title_of(primer.text) for primer in reversed(behind))
    return ReadDocument(title_of(document.text), len(document.ids), outcome, titles)


def bundled_primer() -> str:
    """The neutral text that primes a document when there is no other."""
    return resources.files("kvboost_rag").joinpath("data/primer.txt").read_text(encoding="utf-8").strip()
