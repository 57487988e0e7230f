"""The one place prompts are built: documents and a question, chat messages, or a raw string become pieces.

Knows text and chat templates; knows nothing of caches, models or what was warmed. Every piece is tokenised on its own
and the prompt's ids are the concatenation: a document has the same ids wherever it stands. Separators are pieces of
their own, outside the documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvboost_rag.errors import OptionError

Kind = Literal["template", "text", "document"]

INSTRUCTION = "Answer the question using only the passages below.\n\n"
SEPARATOR = "\n\n"
QUESTION = "\n\nQuestion: {question}\nAnswer in one short sentence."


@dataclass(frozen=True)
class Piece:
    """Text that is tokenised on its own.

    ``template`` is trusted: special-token strings in it become special tokens. ``text`` and ``document`` are not.
    A ``document`` is one chunk; its text has no white space at either end.
    """

    text: str
    kind: Kind = "text"


@dataclass(frozen=True)
class Prompt:
    """Pieces in order. ``opening``: begin with the tokenizer's BOS (raw completions; templates write their own)."""

    pieces: tuple[Piece, ...]
    opening: bool = False

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def documents(self) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind == "document"]

    def header(self) -> tuple[Piece, ...]:
        """The pieces before the first document."""
        at = next((i for i, piece in enumerate(self.pieces) if piece.kind == "document"), len(self.pieces))
        return self.pieces[:at]


def document_piece(text: object, position: int = 0) -> Piece | None:
    """The piece of a document, or None if it is blank. Raises TypeError if it is no string."""
    if not isinstance(text, str):
        raise TypeError(f"documents are strings, but document {position} is {type(text).__name__}: {text!r:.80}")
    stripped = text.strip()
    return Piece(stripped, "document") if stripped else None


def document_pieces(documents: Sequence[str]) -> list[Piece]:
    """The documents' pieces with separators between them; blank documents are left out."""
    if isinstance(documents, str):
        raise OptionError.bad_value("documents", documents[:40], "a list of strings; for one document: [text]")
    pieces: list[Piece] = []
    for position, document in enumerate(documents):
        piece = document_piece(document, position)
        if piece is not None:
            pieces += [piece] if not pieces else [Piece(SEPARATOR), piece]
    return pieces


def completion(text: str) -> Prompt:
    """A raw completion: the string as it is. Special-token strings in it count, as everywhere in transformers."""
    return Prompt((Piece(text, "template"),), opening=True) if text else Prompt((), opening=True)


def rag(
    chat_format: ChatFormat,
    documents: Sequence[str],
    question: str = "",
    system: str | None = None,
    instruction: str = INSTRUCTION,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> Prompt:
    """Instruction, documents in order, question: as the user's turn of a chat, behind the messages of ``earlier``."""
    if not isinstance(question, str):
        raise TypeError(f"question is a string, not {type(question).__name__}")
    content = [Piece(instruction), *document_pieces(documents)]
    if question.strip():
        content.append(Piece(QUESTION.format(question=question.strip())))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    return chat_format.render([*messages, *earlier, {"role": "user", "content": content}])


class ChatFormat:
    """A tokenizer's chat template, applied so that contents stay pieces of their own.

    The template is rendered around place holders, which are then replaced by the contents: what the template wrote is
    trusted, what the contents say is not. Templates also look into contents (trim them, drop old reasoning), so each
    content is put through the template once by itself, and its pieces are cut down to what came out.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """The prompt of a chat, ready for the assistant's turn, or in the middle of it if that message comes last.

        ``messages``: mappings with ``role`` and ``content``, a string or a sequence of Pieces (or of content blocks
        ``{"type": "text", "text": ...}``). Neighbours of the same role are joined; a system message the template
        refuses goes in front of the first user message. Raises OptionError for messages of another form.
        """
        turns = _merged([(_role(message), _content(message)) for message in messages])
        if not turns:
            raise OptionError.bad_value("messages", list(messages), "at least one message with role and content")
        if not self.has_template:
            return _plain_chat(turns)
        try:
            return self._render(turns)
        except Exception as error:  # whatever a template raises
            folded = _system_folded(turns)
            if folded is None:
                raise _refused(error) from error
        try:
            return self._render(folded)
        except Exception as error:
            raise _refused(error) from error

    def _render(self, turns: list[Turn]) -> Prompt:
        texts = ["".join(piece.text for piece in content) for _, content in turns]
        marks = _marks(texts)
        roles = [role for role, _ in turns]
        rendered = self._apply(roles, marks)
        places = [rendered.find(mark) for mark in marks]
        if places != sorted(places) or any(rendered.count(mark) != 1 for mark in marks):
            raise ValueError("it drops, repeats or reorders messages, so their parts cannot be told apart")
        pieces: list[Piece] = []
        at = 0
        for index, (mark, place) in enumerate(zip(marks, places, strict=True)):
            alone = self._apply(roles, [*marks[:index], texts[index], *marks[index + 1 :]])
            content = _as_rendered(turns[index][1], texts[index], rendered, place, place + len(mark), alone)
            pieces += [Piece(rendered[at:place], "template"), *content]
            at = place + len(mark)
        if roles[-1] != "assistant":  # else the turn stays open: the model goes on with what it is said to have begun
            pieces.append(Piece(rendered[at:], "template"))
        return Prompt(tuple(piece for piece in pieces if piece.text))

    def _apply(self, roles: Sequence[str], contents: Sequence[str]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)],
            tokenize=False,
            add_generation_prompt=roles[-1] != "assistant",
        )
        return text


Turn = tuple[str, list[Piece]]


def _marks(texts: Sequence[str]) -> list[str]:
    """A place holder for each text, none of which occurs in any of them."""
    salt = 0
    while any(f"\ue000{salt}." in text for text in texts):
        salt += 1
    return [f"\ue000{salt}.{index}\ue001" for index in range(len(texts))]


def _as_rendered(content: list[Piece], text: str, rendered: str, start: int, end: int, alone: str) -> list[Piece]:
    """``content`` cut down to what the template leaves of it.

    ``rendered`` holds the place holder at [start, end); ``alone`` is the same with the real ``text`` in its place.
    """
    head, tail = rendered[:start], rendered[end:]
    if len(alone) < len(head) + len(tail) or not alone.startswith(head) or not alone.endswith(tail):
        return content  # the template wrote something else around it: keep what was said
    left = alone[len(head) : len(alone) - len(tail)]
    at = text.find(left)
    if at < 0:
        return [Piece(left)]
    return _slice(content, at, at + len(left))


def _slice(content: list[Piece], start: int, end: int) -> list[Piece]:
    """The pieces' characters [start, end)."""
    kept, position = [], 0
    for piece in content:
        part = piece.text[max(0, start - position) : max(0, end - position)]
        kept.append(Piece(part, piece.kind))
        position += len(piece.text)
    return [piece for piece in kept if piece.text]


def _system_folded(turns: list[Turn]) -> list[Turn] | None:
    """The system message in front of the first user message, for templates without that role; None if it cannot be."""
    if turns[0][0] != "system":
        return None
    _, system = turns[0]
    rest = list(turns[1:])
    at = next((i for i, (role, _) in enumerate(rest) if role == "user"), None)
    if at is None:
        return None
    rest[at] = ("user", [*system, Piece(SEPARATOR), *rest[at][1]])
    return _merged(rest)


def _refused(error: Exception) -> OptionError:
    return OptionError(f"the model's chat template refuses these messages: {error}; send a plain string instead")


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise OptionError.bad_value("message", message, "a mapping with 'role' (a string) and 'content'")
    return role


def _content(message: Mapping[str, Any]) -> list[Piece]:
    content = message.get("content", "")
    if isinstance(content, str):
        return [Piece(content)]
    if not isinstance(content, Sequence):
        raise OptionError.bad_value("content", content, "a string or a list of text blocks")
    return [_block(block) for block in content]


def _block(block: object) -> Piece:
    if isinstance(block, Piece):
        return block
    if isinstance(block, str):
        return Piece(block)
    if isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return Piece(block["text"])
    raise OptionError.bad_value(
        "content block", block, "a string or {'type': 'text', 'text': ...}; only text is served"
    )


def _merged(turns: list[Turn]) -> list[Turn]:
    """Neighbours of the same role become one turn: templates insist on alternation."""
    merged: list[Turn] = []
    for role, content in turns:
        if merged and merged[-1][0] == role:
            merged[-1] = (role, [*merged[-1][1], Piece(SEPARATOR), *content])
        else:
            merged.append((role, list(content)))
    return merged


def _plain_chat(turns: list[Turn]) -> Prompt:
    """A chat for a base model that has no template."""
    pieces: list[Piece] = []
    for role, content in turns:
        label = "" if role == "system" else f"{role.capitalize()}: "
        pieces += [Piece(label), *content, Piece(SEPARATOR)]
    if turns[-1][0] == "assistant":
        pieces.pop()  # the turn stays open
    else:
        pieces.append(Piece("Assistant:"))
    return Prompt(tuple(piece for piece in pieces if piece.text), opening=True)
