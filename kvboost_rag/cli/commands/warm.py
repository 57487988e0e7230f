"""``kvboost-rag warm``: files and folders into a store, read once.

Knows in what order a store is brought up to date, so that it can be interrupted anywhere; the steps are others'.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvboost_rag.boundaries import EncodeWithOffsets, offsets_of
from kvboost_rag.cli import kvfiles, loading, printing
from kvboost_rag.cli.choices import Chosen, Common
from kvboost_rag.cli.corpus import Corpus
from kvboost_rag.cli.passages import Passage, cut, digest_of
from kvboost_rag.cli.session import Session, opened
from kvboost_rag.errors import OptionError
from kvboost_rag.report import WarmReport, format_bytes


@dataclass(frozen=True)
class Plan:
    """``passage_tokens``: None as the store was made with; ``skip_unreadable``: go on without broken files."""

    paths: Sequence[Path]
    passage_tokens: int | None = None
    remove_missing: bool = False
    skip_unreadable: bool = False


@dataclass
class Changes:
    """What is different from the store, by file names. ``texts``: of files that are new or were changed."""

    texts: dict[str, tuple[str, list[loading.Text]]] = field(default_factory=dict)  # digest, texts
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    blank: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    num_unchanged: int = 0

    def counts(self) -> dict[str, int]:
        names = ("added", "changed", "removed", "blank", "unreadable")
        return {name: len(getattr(self, name)) for name in names} | {"unchanged": self.num_unchanged}


def run(common: Common, plan: Plan) -> dict[str, Any]:
    """Bring the store up to date. Returns what was done. Raises KVBoostError; before anything is written if a path or
    a file is wrong."""
    corpus = Corpus.open_or_new(common.store)
    found = loading.find(plan.paths, leave_out=common.store)
    if not found.files and not plan.remove_missing:
        raise OptionError.bad_value(
            "PATH", " ".join(map(str, plan.paths)), f"something to read: files that end in {', '.join(loading.KINDS)}"
        )
    size = plan.passage_tokens or corpus.settings.passage_tokens
    changes = compare(corpus, found.files, size, plan)
    with opened(common, corpus) as session:
        new_ids = update(session, changes, size)
        report = read(session)
    return outcome(corpus, session.chosen, changes, found.skipped, new_ids, report)


def compare(corpus: Corpus, files: Sequence[Path], passage_tokens: int, plan: Plan) -> Changes:
    """Read the files and sort out what is new. Raises UnreadableError."""
    changes, known = Changes(), corpus.digests()
    for path in files:
        name = corpus.name_of(path)
        try:
            data = _bytes(path)
            digest = digest_of(data, passage_tokens)
            if known.get(name) == digest:
                changes.num_unchanged += 1
                continue
            texts = loading.parse(path, data)
        except loading.UnreadableError as error:
            if not plan.skip_unreadable:
                raise
            printing.note(f"note: left out: {error}")
            changes.unreadable.append(name)
            continue
        _sort(changes, name, known, (digest, texts))
    if plan.remove_missing:
        changes.removed = corpus.missing()
    return changes


def _sort(changes: Changes, name: str, known: Mapping[str, str], found: tuple[str, list[loading.Text]]) -> None:
    if not found[1]:
        changes.blank.append(name)
    if name in known:
        changes.changed.append(name)
    elif found[1]:
        changes.added.append(name)
    if name in known or found[1]:
        changes.texts[name] = found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise loading.UnreadableError(f"{path}: {error.strerror or error}") from error


def update(session: Session, changes: Changes, passage_tokens: int) -> set[str]:
    """Passages and vectors as they are to be, written; KV of what is gone deleted. Returns the ids that are new."""
    corpus, before = session.corpus, session.corpus.texts()
    passages = cut_all(changes, offsets_of(session.engine.tokenizer), passage_tokens)
    corpus.replace([*changes.texts, *changes.removed], passages)
    after = corpus.texts()
    kvfiles.forget(corpus.kv, (text for key, text in before.items() if key not in after))  # while the old list stands
    settle(session, passage_tokens)
    try:
        session.embed()
    finally:
        corpus.save()
    return after.keys() - before.keys()


def cut_all(changes: Changes, encode: EncodeWithOffsets, passage_tokens: int) -> list[Passage]:
    files = list(changes.texts.items())
    return [
        passage
        for file, (digest, texts) in printing.track(files, "cutting")
        for passage in cut(texts, file, digest, encode, passage_tokens)
    ]


def settle(session: Session, passage_tokens: int) -> None:
    """Note what the store is made with; its model stays, the model's dtypes are the last ones. Another embedder's
    vectors are of no use any more."""
    settings, chosen = session.corpus.settings, session.chosen
    if settings.model in ("", chosen.model):
        settings.model, settings.dtype, settings.kv_dtype = chosen.model, chosen.dtype, chosen.kv_dtype
    if settings.embedder not in ("", chosen.embedder):
        printing.note(f"note: all passages get new vectors, by {chosen.embedder}")
        session.corpus.vectors.clear()
    settings.embedder, settings.passage_tokens = chosen.embedder, passage_tokens


def read(session: Session) -> WarmReport:
    """Warm every passage that is not warm; what was read when this is interrupted stays."""
    texts = list(session.corpus.texts().values())
    try:
        return session.engine.warm(texts, progress=printing.is_terminal(sys.stderr))
    except KeyboardInterrupt:
        printing.note("\nwhat was read is kept; the same command goes on from there")
        raise


def outcome(
    corpus: Corpus,
    chosen: Chosen,
    changes: Changes,
    skipped: Sequence[Path],
    new_ids: set[str],
    report: WarmReport,
) -> dict[str, Any]:
    names = ("num_warmed", "num_already_warm", "num_evicted", "num_rejected", "num_tokens", "num_bytes", "seconds")
    return {
        "store": str(corpus.folder),
        "model": chosen.model,
        "embedder": chosen.embedder,
        "files": changes.counts() | {"skipped": len(skipped)},
        "added": changes.added,
        "changed": changes.changed,
        "removed": changes.removed,
        "skipped_kinds": dict(Counter(path.suffix.lower() or path.name for path in skipped)),
        "num_passages": len(corpus.passages),
        "num_new_passages": len(new_ids),
        "warm": {name: getattr(report, name) for name in names},
        "kv_bytes": sum(each.num_bytes for each in kvfiles.usage(corpus.kv)),
    }


def said(done: Mapping[str, Any]) -> str:
    """The outcome in a few lines."""
    files = ", ".join(f"{count} {what}" for what, count in done["files"].items() if count)
    kinds = ", ".join(f"{count} {kind}" for kind, count in done["skipped_kinds"].items())
    warm = done["warm"]
    return "\n".join(
        [
            f"files: {files or 'none'}" + (f" ({kinds})" if kinds else ""),
            f"passages: {done['num_passages']}, {done['num_new_passages']} of them new",
            f"read: {warm['num_warmed']} passages, {warm['num_tokens']} tokens in {warm['seconds']:.1f} s; "
            f"{warm['num_already_warm']} were read before",
            f"store: {done['store']}, {format_bytes(done['kv_bytes'])} of KV",
        ]
    )
