"""The values that travel through the engine.

Knows shapes and intervals; knows nothing of models, stores or text. Intervals are half-open, in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

TIERS = ("", "none", "memory", "disk")  # where KV may come from, the slowest last


class Fidelity(StrEnum):
    """How faithful a chunk's KV is to a cold prefill of the prompt it is used in (paper, section 4.2)."""

    EXACT = "exact"  # same tokens, same everything before them
    APPROXIMATE = "approximate"  # same tokens, other neighbours or another position
    MISS = "miss"


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt that was tokenised on its own. A document is one chunk, text is cut into FIXED ones.

    A long document may come in several segments, a chunk each, that follow one another: ``part`` 0, 1, 2 ...
    """

    ids: tuple[int, ...]
    document: bool = False
    part: int = 0


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a prompt."""

    ids: tuple[int, ...]
    start: int
    document: bool = False
    part: int = 0  # of its document

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class ChunkKeys:
    """The two identities of a chunk (paper, equations 4 and 5)."""

    prefix: bytes
    content: bytes


@dataclass(frozen=True)
class KV:
    """Keys and values of consecutive tokens, all layers.

    ``keys`` and ``values``: (layers, kv_heads, tokens, head_dim). Keys carry the rotation of the positions
    ``[position, position + tokens)``; or none at all if ``position`` is None.
    """

    codec: ClassVar[str] = "raw"  # as what a codec keeps, it is its own packing
    keys: torch.Tensor
    values: torch.Tensor
    position: int | None

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class Source(IntEnum):
    """Where the KV of one token of a prompt came from."""

    LIVE = 0  # computed: there was nothing to reuse
    EXACT = 1  # reused as it is
    MOVED = 2  # reused approximately: other neighbours, mostly another position
    REPAIRED = 3  # found approximately, and computed again


@dataclass(frozen=True)
class Trace:
    """A prompt token by token. ``ids``: (num_tokens,) int64; ``sources``: (num_tokens,) uint8, each a ``Source``;
    ``attention``: (num_tokens,) float32, what the repair chose by, or None where it did not ask."""

    ids: npt.NDArray[np.int64]
    sources: npt.NDArray[np.uint8]
    attention: npt.NDArray[np.float32] | None = None


@dataclass
class DocumentReport:
    """What happened to one document of a prompt. ``fidelity``: that of its worst part."""

    num_tokens: int
    start: int
    fidelity: Fidelity
    num_repaired_tokens: int = 0
    tier: str = ""  # where the KV came from; empty on a miss

    @property
    def hit(self) -> bool:
        return self.fidelity is not Fidelity.MISS

    def add_part(self, part: DocumentReport) -> None:
        """Count ``part``, which follows in the prompt, as of this document."""
        order = list(Fidelity)
        self.num_tokens += part.num_tokens
        self.num_repaired_tokens += part.num_repaired_tokens
        self.fidelity = max(self.fidelity, part.fidelity, key=order.index)
        self.tier = max(self.tier, part.tier, key=TIERS.index)


@dataclass
class Report:
    """Where the prompt's tokens came from and where the time went.

    ``num_prompt_tokens`` = exact + approximate + repaired + live: the four are disjoint. Seconds are wall clock;
    ``ttft_seconds`` runs from the call to the first token, lookup and repair included. ``full_prefill_seconds``: what
    a full prefill of this prompt would take by the forwards seen so far, 0 before enough were seen.
    """

    mode: str = "reuse"
    repair: str = "none"
    num_prompt_tokens: int = 0
    num_exact_tokens: int = 0
    num_approximate_tokens: int = 0
    num_repaired_tokens: int = 0
    num_live_tokens: int = 0
    num_stored_tokens: int = 0
    num_new_tokens: int = 0
    documents: list[DocumentReport] = field(default_factory=list)
    moved_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    ttft_seconds: float = 0.0
    full_prefill_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    trace: Trace | None = field(default=None, repr=False, compare=False)

    @property
    def counts(self) -> dict[Source, int]:
        """Tokens by where their KV came from."""
        return {
            Source.EXACT: self.num_exact_tokens,
            Source.MOVED: self.num_approximate_tokens,
            Source.REPAIRED: self.num_repaired_tokens,
            Source.LIVE: self.num_live_tokens,
        }

    @property
    def num_reused_tokens(self) -> int:
        """Tokens whose stored KV was used as it is."""
        return self.num_exact_tokens + self.num_approximate_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.num_repaired_tokens + self.num_live_tokens

    @property
    def num_document_hits(self) -> int:
        return sum(document.hit for document in self.documents)

    @property
    def num_document_misses(self) -> int:
        return len(self.documents) - self.num_document_hits

    @property
    def reuse_ratio(self) -> float:
        """Share of the prompt's tokens that was not computed (paper, section 6.1), 0 to 1."""
        return self.num_reused_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything but the trace, as plain numbers, strings, lists and dicts."""
        plain = asdict(replace(self, trace=None))
        del plain["trace"]
        return plain | {"num_document_hits": self.num_document_hits, "reuse_ratio": self.reuse_ratio}

    def __str__(self) -> str:
        return (
            f"{self.num_prompt_tokens} prompt tokens: {self.num_exact_tokens} reused exactly, "
            f"{self.num_approximate_tokens} reused after moving, {self.num_repaired_tokens} repaired, "
            f"{self.num_live_tokens} live; documents hit {self.num_document_hits}/{len(self.documents)}; "
            f"TTFT {self.ttft_seconds * 1e3:.0f} ms"
        )


def total_tokens(segments: Sequence[Segment]) -> int:
    return sum(len(segment.ids) for segment in segments)
