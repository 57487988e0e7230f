"""From files and folders to texts: what is read, what is left out, and what is wrong with a file.

Knows file formats; knows nothing of models, tokens or stores. pypdf is asked for when there is a PDF.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvboost_rag.errors import KVBoostError, MissingExtraError, OptionError


class UnreadableError(KVBoostError):
    """A file is not what its name says; the message names it, and the line."""


class Text(NamedTuple):
    """``source``: what a line says of itself, else empty; ``line``: its number, 0 for the text of a whole file."""

    text: str
    source: str = ""
    line: int = 0


@dataclass(frozen=True)
class Found:
    """``files``: to be read, each once, in the order of their names; ``skipped``: of other kinds."""

    files: tuple[Path, ...]
    skipped: tuple[Path, ...]


def find(paths: Iterable[Path], leave_out: Path) -> Found:
    """The files at ``paths``, folders searched through. ``leave_out``: a folder nothing is taken from (the store).

    In folders, names that begin with a dot are passed over. Raises OptionError for a file of another kind.
    """
    files: dict[Path, Path] = {}
    skipped: list[Path] = []
    for path in paths:
        if not path.is_dir():
            check_kind(path)
            files.setdefault(path.resolve(), path)
            continue
        for file in _inside(path, leave_out.resolve()):
            if file.suffix.lower() in KINDS:
                files.setdefault(file.resolve(), file)
            else:
                skipped.append(file)
    return Found(tuple(files.values()), tuple(skipped))


def check_kind(path: Path) -> None:
    """Raises OptionError if it is no file that can be read."""
    if path.suffix.lower() not in KINDS:
        raise OptionError.bad_value("PATH", str(path), f"folders, and files that end in {', '.join(KINDS)}")


def _inside(folder: Path, leave_out: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(n for n in folders if not n.startswith(".") and (here / n).resolve() != leave_out)
        yield from (here / name for name in sorted(names) if not name.startswith(".") and (here / name).is_file())


def parse(path: Path, data: bytes) -> list[Text]:
    """The texts in a file's bytes, by the end of its name; blank ones are left out. Raises UnreadableError."""
    texts = KINDS[path.suffix.lower()](path, data)
    return [each._replace(text=_encodable(each.text)) for each in texts if each.text.strip()]


def _plain(path: Path, data: bytes) -> list[Text]:
    try:
        return [Text(data.decode("utf-8-sig"))]
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UnreadableError(
            f"{path}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x}); convert it, such as with "
            "iconv -f latin1 -t utf-8"
        ) from error


def _lines(path: Path, data: bytes) -> list[Text]:
    (whole,) = _plain(path, data)
    lines = whole.text.split("\n")
    return [_line(f"{path}, line {number}", number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _line(where: str, number: int, line: str) -> Text:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise UnreadableError(f"{where}: not JSON ({error})") from error
    found = [item[key] for key in ("text", "page_content") if key in item] if isinstance(item, dict) else []
    if len(found) != 1 or not isinstance(found[0], str):
        raise UnreadableError(
            f'{where}: a line is {{"text": "..."}} or {{"page_content": "..."}}, with "source" or not'
        )
    source = item.get("source") or _metadata(item).get("source") or ""
    if not isinstance(source, str):
        raise UnreadableError(f'{where}: "source" is {source!r}, not a string')
    return Text(found[0], source, number)


def _metadata(item: dict[str, object]) -> dict[str, object]:
    """That of a LangChain document."""
    metadata = item.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _pdf(path: Path, data: bytes) -> list[Text]:
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, PyPdfError
    except ImportError as error:
        raise MissingExtraError.of("pypdf", "cli") from error
    try:
        pages = [page.extract_text() for page in PdfReader(io.BytesIO(data)).pages]
    except (
        PyPdfError,
        DependencyError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        NotImplementedError,
    ) as error:
        raise UnreadableError(f"{path}: pypdf cannot read it ({error or type(error).__name__})") from error
    return [Text("\n\n".join(page.strip() for page in pages if page.strip()))]


def _encodable(text: str) -> str:
    """Half a surrogate pair, which JSON and PDF can hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


KINDS: dict[str, Callable[[Path, bytes], Sequence[Text]]] = {
    ".txt": _plain,
    ".md": _plain,
    ".markdown": _plain,
    ".rst": _plain,
    ".pdf": _pdf,
    ".jsonl": _lines,
}
