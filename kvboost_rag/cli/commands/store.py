"""``kvboost-rag store``: what a store holds, whether it can be read, and getting rid of it. No model is loaded.

Knows the store folder as a whole.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvboost_rag.cli import kvfiles, printing
from kvboost_rag.cli.corpus import Corpus, StoreError, is_store
from kvboost_rag.cli.passages import Passage
from kvboost_rag.engine.config import EngineConfig, parse_bytes

UNKNOWN = "unknown"


def show(folder: Path, max_cache_bytes: str | None) -> dict[str, Any]:
    """What is there. Raises StoreError."""
    corpus = Corpus.open(folder)
    names = model_names(corpus)
    kv = [asdict(each) | {"model": names.get(each.name, UNKNOWN)} for each in kvfiles.usage(corpus.kv)]
    budget = EngineConfig().max_cache_bytes if max_cache_bytes is None else parse_bytes(max_cache_bytes)
    return {
        "store": str(folder),
        "settings": asdict(corpus.settings),
        "num_passages": len(corpus.passages),
        "num_without_vector": len(corpus.without_vector()),
        "sources": sources(corpus),
        "kv": kv,
        "kv_bytes": sum(each["num_bytes"] for each in kv),
        "budget": {"max_cache_bytes": budget, "free_disk_bytes": shutil.disk_usage(folder).free},
    }


def sources(corpus: Corpus) -> list[dict[str, Any]]:
    counted = Counter((passage.source, passage.file) for passage in corpus.passages)
    return [{"source": source, "file": file, "num_passages": count} for (source, file), count in counted.items()]


def model_names(corpus: Corpus) -> dict[str, str]:
    """By the names of their folders in ``kv/``."""
    return {fingerprint[:16]: name for fingerprint, name in corpus.settings.models.items()}


def show_said(found: Mapping[str, Any]) -> None:
    from rich.filesize import decimal  # format_bytes would load torch

    settings, budget = found["settings"], found["budget"]
    print(f"store      {found['store']}")
    print(f"model      {settings['model']}, dtype {settings['dtype']}, KV kept as {settings['kv_dtype']}")
    print(f"embedder   {settings['embedder']}")
    print(f"passages   {found['num_passages']}, cut to {settings['passage_tokens']} tokens")
    for each in found["kv"]:
        print(f"KV         {each['model']}: {each['num_files']} files, {decimal(each['num_bytes'])}")
    print(
        f"budget     {decimal(budget['max_cache_bytes'])} in memory (--max-cache-bytes), on disk no limit; "
        f"{decimal(budget['free_disk_bytes'])} are free there"
    )
    if found["num_without_vector"]:
        print(f"unfinished {found['num_without_vector']} passages have no vector; kvboost-rag warm PATH goes on there")
    rows = [(each["source"], str(each["num_passages"])) for each in found["sources"]]
    printing.table("", ("source", "passages"), rows)


def clear(folder: Path) -> dict[str, Any]:
    """Delete the store; other files in the folder stay. Works on broken stores too. Raises StoreError without one."""
    corpus = Corpus(folder)
    if not is_store(folder) and not kvfiles.folders(corpus.kv):
        raise StoreError(f"there is no store in {folder}")
    num_files = kvfiles.clear(corpus.kv)
    corpus.delete()
    return {"store": str(folder), "num_kv_files": num_files}


def forget(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Drop the passages of these sources, files or folders, and their KV. Raises StoreError for an unknown one."""
    corpus = Corpus.open(folder)
    dropped = [passage for name in names for passage in matching(corpus, name)]
    kept = [passage for passage in corpus.passages if passage not in set(dropped)]
    staying = {passage.id for passage in kept}
    gone = {passage.id: passage.text for passage in dropped if passage.id not in staying}
    num_files = kvfiles.forget(corpus.kv, gone.values())
    num_dropped, corpus.passages = len(corpus.passages) - len(kept), kept
    corpus.save()
    found = list(dict.fromkeys(passage.source for passage in dropped))
    return {"store": str(folder), "sources": found, "num_passages": num_dropped, "num_kv_files": num_files}


def matching(corpus: Corpus, name: str) -> list[Passage]:
    """Passages of the source or file of that name, or of files in the folder of that name."""
    file = name.rstrip("/")
    found = [p for p in corpus.passages if name == p.source or file == p.file or p.file.startswith(f"{file}/")]
    if not found:
        known = dict.fromkeys(name for p in corpus.passages for name in (p.source, p.file))
        close = get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise StoreError(
            f"no passage in {corpus.folder} is from {name}{hint}; kvboost-rag store show names all sources"
        )
    return found


def check(folder: Path, delete: bool = False) -> dict[str, Any]:
    """Read every KV file. ``delete``: what is broken; its documents are read again when they are warmed.

    Raises StoreError.
    """
    corpus = Corpus.open(folder)
    names = model_names(corpus)
    files = [path for each in kvfiles.folders(corpus.kv) for path in kvfiles.files(each)]
    broken = []
    for path in printing.track(files, "checking"):
        if why := kvfiles.fault(path):
            broken.append({"file": str(path), "why": why})
            if delete:
                path.unlink(missing_ok=True)
    return {
        "store": str(folder),
        "num_files": len(files),
        "files_by_model": dict(Counter(names.get(path.parent.name, UNKNOWN) for path in files)),
        "broken": broken,
        "deleted": delete,
        "of_another_model": [str(path) for path in files if path.parent.name not in names],
        "ok": not broken and all(path.parent.name in names for path in files),
    }


def check_said(found: Mapping[str, Any]) -> None:
    by_model = ", ".join(f"{count} of {model}" for model, count in found["files_by_model"].items())
    print(f"{found['num_files']} KV files" + (f": {by_model}" if by_model else ""))
    for each in found["broken"]:
        print(f"broken: {each['file']} ({each['why']})" + (", deleted" if found["deleted"] else ""))
    for path in found["of_another_model"]:
        print(f"of a model this store was never used with: {path}")
    if found["broken"] and not found["deleted"]:
        print("--delete deletes broken files; kvboost-rag warm reads their documents again")
    if found["ok"]:
        print("all of them can be read")
