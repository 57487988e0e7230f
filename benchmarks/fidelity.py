"""What full prefill says to a prompt, and how far another way of computing it strays from that.

Knows engines, token ids and logits; knows nothing of data sets, tables or how documents were read. Everything is
teacher-forced: both sides are fed the same ids. One prefill serves two continuations, what full prefill generates and
the data's answer: the cache is cut back to the prompt between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvboost_rag import KVBoost, Prompt
from kvboost_rag.engine.engine import Engine, Prefilled
from kvboost_rag.engine.repair import NoRepair, Repair
from kvboost_rag.engine.types import Segment
from kvboost_rag.verify import greedy

DIGITS = 4  # of single tokens' KL in result files


@dataclass(frozen=True)
class Truth:
    """Full prefill of one prompt. ``ids``: what it generates greedily, end tokens passed over; ``logits``: (num_tokens,
    vocab) they come from; ``num_answer``: how many of them are the answer, its end token included; ``gold``: mean
    log-probability of a token of the data's answer ``gold_ids``, None if there is none."""

    ids: tuple[int, ...]
    logits: torch.Tensor
    num_answer: int
    gold_ids: tuple[int, ...]
    gold: float | None


def truth(boost: KVBoost, prompt: Prompt, num_tokens: int, gold_ids: Sequence[int]) -> Truth:
    prefilled = boost._prefill(prompt, {"mode": "baseline"}, "quality")
    with boost.engine.lock:
        gold = gold_log_prob(boost.engine, prefilled, gold_ids)
        ids, logits = greedy(boost.engine, prefilled, num_tokens)
    ends = [at for at, each in enumerate(ids) if each in end_ids(boost)]
    return Truth(tuple(ids), logits, ends[0] + 1 if ends else len(ids), tuple(gold_ids), gold)


def end_ids(boost: KVBoost) -> set[int]:
    """Tokens that end an answer."""
    config = boost.engine.model.module.generation_config
    found = [config.eos_token_id, boost.tokenizer.eos_token_id]
    return {each for ids in found for each in (ids if isinstance(ids, list) else [ids]) if each is not None}


def rewind(prefilled: Prefilled) -> None:
    """Forget everything behind the prompt. Its own slots are as they were."""
    excess = prefilled.cache.get_seq_length() - len(prefilled.ids)
    if excess:
        prefilled.cache.crop(-excess)


def extended(engine: Engine, prefilled: Prefilled, ids: Sequence[int]) -> torch.Tensor:
    """Logits that predict ``ids`` behind the prompt; leaves the cache as it found it."""
    logits = engine.extend(prefilled, ids)
    rewind(prefilled)
    return logits


def gold_log_prob(engine: Engine, prefilled: Prefilled, ids: Sequence[int]) -> float | None:
    if not ids:
        return None
    log_probs = extended(engine, prefilled, ids).log_softmax(-1)
    return float(log_probs.gather(1, torch.tensor(ids, device=log_probs.device)[:, None]).mean())


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(full || other) per token, nats."""
    p, q = full.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def compared(engine: Engine, prefilled: Prefilled, full: Truth) -> dict[str, Any]:
    """One prompt, one way. ``identical``: greedy decoding gives the same answer, up to its end; ``work``: share of the
    prompt's tokens that was computed."""
    logits = extended(engine, prefilled, full.ids)
    gold = gold_log_prob(engine, prefilled, full.gold_ids)
    kl = divergence(full.logits, logits)
    same = full.logits.argmax(-1) == logits.argmax(-1)
    report = prefilled.report
    return {
        "kl": float(kl.mean()),
        "kl_first": float(kl[0]),
        "kl_tokens": " ".join(f"{each:.{DIGITS}g}" for each in kl.tolist()),  # a line of the file, not one each
        "same_top": float(same.float().mean()),
        "identical": float(same[: full.num_answer].all()),
        "gold": gold,
        "gold_diff": None if gold is None or full.gold is None else gold - full.gold,
        "work": report.num_computed_tokens / report.num_prompt_tokens,
    }


def measure(boost: KVBoost, prompt: Prompt, repair: Repair, full: Truth) -> dict[str, Any]:
    """Reuse, repaired by ``repair``. Raises RuntimeError if a document was not there: such a row would flatter."""
    prefilled = boost._prefill(prompt, {"repair": repair}, "quality", max(len(full.ids), len(full.gold_ids)))
    if prefilled.report.num_document_misses:
        raise RuntimeError(f"{prefilled.report.num_document_misses} documents of a prompt are not warm")
    with boost.engine.lock:
        found = compared(boost.engine, prefilled, full)
    boost.engine.model.recycle(prefilled.cache)
    return found


def joined(boost: KVBoost, prompt: Prompt, full: Truth) -> dict[str, Any]:
    """Full prefill of the prompt tokenised as one text."""
    with boost.engine.lock:
        opening = boost.tokens.opening_ids if prompt.opening else ()
        whole = [Segment((*opening, *boost.tokens.encode_template(prompt.text)))]
        return compared(boost.engine, boost.engine.prefill(whole, NoRepair(), "baseline"), full)
