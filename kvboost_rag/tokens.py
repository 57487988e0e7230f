"""Text to token ids and back, for one tokenizer, from many threads.

Knows a tokenizer; knows nothing of prompts, chunks or models. Whether special-token strings inside a text become
special tokens is a switch *on* a tokenizer, and padding or truncation set by someone else are too. So this class works
on private copies whose switches are set once: one reads ``<|im_end|>`` as the token it names (templates), the other as
ordinary characters (documents, questions: they cannot close the user's turn).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from kvboost_rag.engine.generate import TextAssembler


class Tokens:
    """The two ways of encoding, and decoding without special tokens."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._trusted: Tokenizer | None = None
        self._plain: Tokenizer | None = None
        if isinstance(backend, Tokenizer):
            serialized = backend.to_str()
            self._trusted, self._plain = _copy(serialized), _copy(serialized)
            self._plain.encode_special_tokens = True
            serialized = self._trusted.to_str()  # without what someone else has set on the tokenizer
        else:
            serialized = f"{type(tokenizer).__name__} {sorted(tokenizer.get_vocab().items())}"
        self._lock = threading.Lock()
        self.fingerprint = hashlib.sha256(serialized.encode()).digest()
        self.opening_ids = self._opening_ids()

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of untrusted text: special-token strings stay text."""
        if self._plain is not None:
            return tuple(self._plain.encode(text, add_special_tokens=False).ids)
        return self._slow(text, split_special_tokens=True)

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Ids of trusted text: special-token strings become the tokens they name."""
        if self._trusted is not None:
            return tuple(self._trusted.encode(text, add_special_tokens=False).ids)
        return self._slow(text, split_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        if self._trusted is not None:
            text: str = self._trusted.decode(list(ids), skip_special_tokens=True)
            return text
        with self._lock:
            slow: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return slow

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each of ``ids`` reads as, special tokens by their names. They concatenate to the text; of a character
        made of several tokens the last one has it, the others are empty."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        names = {id: token.content for id, token in added.items() if token.special}
        assembler = TextAssembler(self.decode)
        found = [assembler.finish() + names[id] if id in names else assembler.push([id]) for id in ids]
        if found:
            found[-1] += assembler.finish()
        return found

    def starts_with_opening(self, text: str) -> bool:
        """Whether ``text`` spells out the BOS token itself."""
        bos = self.tokenizer.bos_token
        return bool(bos) and text.startswith(bos)

    def _slow(self, text: str, split_special_tokens: bool) -> tuple[int, ...]:
        with self._lock:
            return tuple(
                self.tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens).input_ids
            )

    def _opening_ids(self) -> tuple[int, ...]:
        """What this tokenizer puts in front of every text: a BOS, or nothing."""
        probe = "a"
        if self._trusted is not None:
            plain = self._trusted.encode(probe, add_special_tokens=False).ids
            full = self._trusted.encode(probe).ids
        else:
            plain = self.tokenizer(probe, add_special_tokens=False).input_ids
            full = self.tokenizer(probe).input_ids
        at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
        return tuple(full[:at])


def _copy(serialized: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(serialized)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
