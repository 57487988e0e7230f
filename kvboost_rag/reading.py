"""The half of ``KVBoost`` that reads documents: before anyone asks, behind what, and what becomes of them.

Knows texts, prompts' openings and an engine; knows nothing of questions or frameworks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvboost_rag.documents import DocumentCutter
from kvboost_rag.engine.store import StoreStats
from kvboost_rag.engine.types import Segment
from kvboost_rag.facade import Facade
from kvboost_rag.prompt import SEPARATOR, Piece, Prompt, rag
from kvboost_rag.report import Estimate, WarmReport
from kvboost_rag.warming import Document, Warmer, WarmPlan, check_texts

Header = str | Prompt | Sequence[Mapping[str, Any]] | None


class Reading(Facade):
    """What a KVBoost can do with documents."""

    _cutter: DocumentCutter
    _warmer: Warmer
    _promoter: ThreadPoolExecutor

    def estimate(self, texts: str | Iterable[str]) -> Estimate:
        """Tokens and bytes that warming ``texts`` would take, and how many fit the budget. Does no work."""
        self._segmenter.recall()
        return self._warmer.estimate(self._warmer.documents(check_texts(texts)))

    def warm(
        self,
        texts: str | Iterable[str],
        primer: str | None = "auto",
        header: Header = None,
        progress: bool = True,
        pinned: bool = False,
        chunking: str | Sequence[str] | None = None,
        first: bool = False,
    ) -> WarmReport:
        """Read documents once, so that prompts find them already read (the paper's ``warm``).

        ``primer``: what stands in front while a document is read: ``"auto"`` (what was read before: a document that
        shares text with it, else the last one), ``"bundled"``, any text, or None. ``header``: what the prompts will
        begin with, if it is known: the system text of ``prompt(system=header)``, or a prompt or chat messages, of which
        the part before the first document counts. ``first``: keep a second version of each document, read straight
        behind that header: it is exact when the document comes first in a prompt.
        ``pinned`` documents are never evicted. Documents already warm are left as they are.

        ``chunking``: how each text is kept; a list has one for each. If not given, as it was kept before, else
        ``"document"``: whole, however long (past ``max_document_tokens`` in parts, which are one document all the
        same). ``"semantic"``: in parts of at most ``chunk_size`` tokens, cut at ends of paragraphs and sentences.
        ``"fixed"``: for a system prompt, cut every ``chunk_size`` tokens and read where a system message stands,
        with no primer: exact in every prompt that begins with it.

        Raises TypeError on a document that is no string, OptionError, PromptTooLongError; all before any work.
        Warns with BudgetWarning, also before any work, if not everything will fit.
        """
        self._check_open()
        self._segmenter.recall()
        if chunking == "fixed":
            plan = WarmPlan(self._beginning(), None if primer == "auto" else primer, pinned, first)
        else:
            plan = WarmPlan(self._opening(header), primer, pinned, first)
        given = check_texts(texts)
        return self._read(given, self._warmer.documents(given, chunking), plan, progress)

    def rewarm(
        self,
        texts: str | Iterable[str] | None = None,
        primer: str | None = "auto",
        header: Header = None,
        progress: bool = True,
        first: bool = False,
    ) -> WarmReport:
        """Read documents again, warm or not: after a change of header or primer. Each old version stays until the new
        one is there. ``texts``: all that are warm if not given; how each is cut, and options, as in ``warm``.

        Another model finds nothing of this one's: hand it ``texts()``.
        """
        self._check_open()
        plan = WarmPlan(self._opening(header), primer, first=first, again=True)
        given = self.texts() if texts is None else check_texts(texts)
        self._warmer.clear()  # old versions prime nothing
        return self._read(given, self._warmer.documents(given), plan, progress)

    def texts(self) -> list[str]:
        """The documents that are warm now, each once, in no particular order."""
        self._segmenter.recall()
        known = dict.fromkeys(entry.text for entry in self.engine.store.texts())
        return [text for text in known if self.is_warm(text)]

    def _read(self, given: Sequence[str], documents: Sequence[Document], plan: WarmPlan, progress: bool) -> WarmReport:
        report = WarmReport(num_documents=len(given), num_blank=sum(not text for text in given))
        try:
            self._warmer.warm(documents, report, plan, progress)
        finally:  # interrupted in the middle, what was read so far is found all the same
            for document in documents:
                if self._warmer.is_warm(document):
                    self._segmenter.file(document.text, len(document.ids))
        return report

    def _opening(self, header: Header) -> list[Segment]:
        """What documents are read behind: a prompt's beginning up to its first document."""
        if header is None or isinstance(header, str):
            prompt = rag(self.chat_format, ["x"], system=header)
        else:
            prompt = self._segmenter.as_prompt(header)
        return self._segmenter.segments(Prompt(prompt.header(), prompt.opening), detect=False)

    def _beginning(self) -> list[Segment]:
        """What stands in a prompt before its system message."""
        content = [Piece("x", "document")]
        prompt = self.chat_format.render([{"role": "system", "content": content}, {"role": "user", "content": "x"}])
        return self._segmenter.segments(Prompt(prompt.header(), prompt.opening), detect=False)

    def prefetch(self, texts: str | Iterable[str]) -> Future[int]:
        """Start bringing documents from disk to memory, in the background. The result is how many came from there."""
        self._check_open()
        self._segmenter.recall()
        parts = [self._cutter.cut(text) for text in check_texts(texts) if text]
        return self._promoter.submit(lambda: sum(self.engine.promote(each) for each in parts))

    def order(self, documents: Sequence[str], header: Header = None) -> list[int]:
        """Indices of ``documents`` in an order that begins with those whose exact KV is kept: one that has a version
        straight behind ``header`` comes first, then one kept behind that one, and so on. The rest stays in order.
        """
        self._segmenter.recall()
        context, left = self._opening(header), list(range(len(documents)))
        chosen: list[int] = []
        separator = self._segmenter.segments(Prompt((Piece(SEPARATOR),)), detect=False)
        parts = [self._cutter.cut(text) for text in check_texts(documents)]
        while True:
            found = next((i for i in left if parts[i] and self.engine.holds(context, parts[i])), None)
            if found is None:
                return chosen + left
            chosen.append(found)
            left.remove(found)
            context = [*context, *parts[found], *separator]

    def is_warm(self, text: str) -> bool:
        """Whether the KV of this document is there now. If another process has read it, prompts find it from now on."""
        self._segmenter.recall()
        found = next((d for d in self._warmer.documents(check_texts(text)) if self._warmer.is_warm(d)), None)
        if found is not None and self._segmenter.index.find(found.text) != [(0, len(found.text))]:
            self._segmenter.file(found.text, len(found.ids))
        return found is not None

    def forget(self, texts: str | Iterable[str]) -> int:
        """Drop documents from the store. Returns how many were there."""
        self._segmenter.recall()
        num_gone = 0
        for document in self._warmer.documents(check_texts(texts)):
            self._segmenter.unfile(document.text)
            num_gone += sum(self.engine.store.remove(content) for content in document.contents) > 0
        return num_gone

    def clear(self) -> None:
        """Drop everything that is kept, in ``cache_dir`` too."""
        self.engine.store.clear()
        self._segmenter.index.clear()
        self._warmer.clear()
        self._cutter.clear()

    @property
    def store_id(self) -> str:
        """A name for what is kept here by this model: a new store, or a cleared one, has another; a reopened
        ``cache_dir`` the same."""
        return f"{self.engine.model.fingerprint().hex()[:16]}-{self.engine.store.identity}"

    def stats(self) -> StoreStats:
        return self.engine.store.stats()
