"""Files to texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost_rag.cli.loading import KINDS, Text, UnreadableError, find, parse
from kvboost_rag.errors import OptionError


def pdf(*pages: str) -> bytes:
    """The smallest PDF with a line of text on each page."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {5 + 2 * number} 0 R >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    data, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{each}\nendobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    tail = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\n"
    )
    return data + tail.encode() + f"startxref\n{len(data)}\n%%EOF".encode()


def test_pages_of_a_pdf_are_paragraphs() -> None:
    assert parse(Path("a.PDF"), pdf("The first page.", "", "The third.")) == [Text("The first page.\n\nThe third.")]
    assert parse(Path("scan.pdf"), pdf("")) == []


def test_a_byte_order_mark_is_no_text() -> None:
    assert parse(Path("a.txt"), b"\xef\xbb\xbfHello") == [Text("Hello")]


def test_lines_name_their_sources_or_their_numbers() -> None:
    lines = b"""{"text": "one"}

{"page_content": "two", "source": "wiki/Two"}
{"page_content": "three", "metadata": {"source": "three.html"}}
{"text": "  "}
{"text": "six", "source": null}
"""
    assert parse(Path("a.jsonl"), lines) == [
        Text("one", "", 1),
        Text("two", "wiki/Two", 3),
        Text("three", "three.html", 4),
        Text("six", "", 6),
    ]


@pytest.mark.parametrize(
    "line, said",
    [
        ("[1]", "a line is"),
        ('"text"', "a line is"),
        ('{"text": 5}', "a line is"),
        ('{"text": "a", "page_content": "b"}', "a line is"),
        ('{"text": "a", "source": 7}', '"source" is 7'),
        ("{'text': 'a'}", "not JSON"),
    ],
)
def test_a_wrong_line_is_named(line: str, said: str) -> None:
    with pytest.raises(UnreadableError, match=r"b\.jsonl, line 2: ") as caught:
        parse(Path("b.jsonl"), f'{{"text": "fine"}}\n{line}\n'.encode())
    assert said in str(caught.value)


def test_half_a_surrogate_pair_is_no_reason_to_stop() -> None:
    (text,) = parse(Path("a.jsonl"), rb'{"text": "a\ud800b"}')
    assert text.text == "a?b"


def test_folders_are_searched_and_files_found_once(tmp_path: Path) -> None:
    for name in ("b.md", "a.TXT", "deep/c.jsonl", "deep/d.html", ".git/e.md", "kept/f.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    found = find([tmp_path, tmp_path / "b.md", tmp_path / ".git/e.md"], leave_out=tmp_path / "kept")
    assert [str(path.relative_to(tmp_path)) for path in found.files] == ["a.TXT", "b.md", "deep/c.jsonl", ".git/e.md"]
    assert [path.name for path in found.skipped] == ["d.html"]


def test_a_file_of_another_kind_is_an_error_when_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.html").write_text("x")
    with pytest.raises(OptionError, match=r"d\.html' is not valid; PATH takes folders, and files that end in \.txt"):
        find([tmp_path / "d.html"], leave_out=tmp_path)
    assert set(KINDS) == {".txt", ".md", ".markdown", ".rst", ".pdf", ".jsonl"}
