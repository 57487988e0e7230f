"""A store with its model and its embedder at work: what warm, ask, chat and bench stand on.

Knows how the parts are put together; knows nothing of what is asked or printed, but for notes on what takes time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kvboost_rag.cli import embedding, printing
from kvboost_rag.cli.choices import Chosen, Common, check_device, choose, location
from kvboost_rag.cli.corpus import Corpus, StoreError
from kvboost_rag.cli.passages import Passage
from kvboost_rag.kvboost import KVBoost

EMBEDDED_AT_ONCE = 32


class Session:
    """``embedder`` is loaded when it is first needed."""

    def __init__(self, engine: KVBoost, corpus: Corpus, chosen: Chosen):
        self.engine, self.corpus, self.chosen = engine, corpus, chosen
        self._embedder: embedding.Embedder | None = None

    @property
    def embedder(self) -> embedding.Embedder:
        """Raises MissingExtraError, ModelNotFoundError."""
        if self._embedder is None:
            self._embedder = embedding.load(self.chosen.embedder)
        return self._embedder

    def embed(self) -> int:
        """Give every passage its vector. Returns how many had none. What is done when it is interrupted is kept."""
        items = list(self.corpus.without_vector().items())
        batches = [items[at : at + EMBEDDED_AT_ONCE] for at in range(0, len(items), EMBEDDED_AT_ONCE)]
        for batch in printing.track(batches, "embedding"):
            ids, texts = zip(*batch, strict=True)
            self.corpus.add_vectors(ids, self.embedder.documents(texts))
        return len(items)

    def search(self, question: str, k: int) -> list[Passage]:
        """At most ``k`` passages, the nearest first."""
        return self.corpus.nearest(self.embedder.question(question), k)

    def read(self, passages: Sequence[Passage]) -> None:
        """Warm what of these is not warm yet, for this model."""
        report = self.engine.warm([passage.text for passage in passages], progress=False)
        if report.num_warmed:
            printing.note(f"note: not read before by this model: {report}")


def check_searchable(corpus: Corpus, chosen: Chosen) -> None:
    """Raises StoreError if no passage can be found in it by that embedder."""
    if not corpus.passages:
        raise StoreError(f"there are no passages in {corpus.folder}: add some with kvboost-rag warm PATH")
    if chosen.embedder != corpus.settings.embedder:
        raise StoreError(
            f"the vectors in {corpus.folder} come from the embedder {corpus.settings.embedder!r}, not "
            f"{chosen.embedder!r}: leave out --embedder, or kvboost-rag warm PATH --embedder {chosen.embedder} makes "
            "new ones"
        )
    left = len(corpus.without_vector())
    if left:
        printing.note(f"note: {left} passages have no vector and are not found; kvboost-rag warm PATH goes on there")


@contextmanager
def opened(common: Common, corpus: Corpus, **reuse: Any) -> Iterator[Session]:
    """The store's engine, KV in ``kv/``; ``reuse``: its calls' options. Raises KVBoostError.

    Notes the model in the store, so that its KV can be told from others'.
    """
    chosen = choose(common, corpus.settings)
    if corpus.settings.model not in ("", chosen.model):
        printing.note(
            f"note: the store was made with {corpus.settings.model}; documents are read again for {chosen.model}"
        )
    with load(common, chosen, cache_dir=corpus.kv, **reuse) as engine:
        note_model(corpus, engine, chosen.model)
        yield Session(engine, corpus, chosen)


def note_model(corpus: Corpus, engine: KVBoost, name: str) -> None:
    """Whose KV lies under this fingerprint; written if the store is there already and can be written to."""
    dtype = str(engine.engine.model.dtype).removeprefix("torch.")
    fingerprint, said = engine.engine.model.fingerprint().hex(), f"{name} ({dtype})"
    if corpus.settings.models.get(fingerprint) != said:
        corpus.settings.models[fingerprint] = said
        if corpus.settings.model:
            with suppress(OSError):
                corpus.save_settings()


def load(common: Common, chosen: Chosen, **options: Any) -> KVBoost:
    """An engine for the chosen model. Raises KVBoostError."""
    device = check_device(common.device)
    printing.note(f"loading {chosen.model} on {device or 'cpu'}")
    quiet()
    return KVBoost.from_pretrained(
        location(chosen.model),
        dtype=chosen.dtype,
        device=device,
        kv_dtype=chosen.kv_dtype,
        **common.budgets,
        **options,
    )


def quiet() -> None:
    """No bars for what is loaded within a second."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
