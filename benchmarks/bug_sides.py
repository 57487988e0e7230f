"""The conditions that are compared, and how one sample is put to each of them.

Knows prompts, engines and what is recorded of a call; knows nothing of files, resuming or means. Engines share one
model; conditions that differ only in the options of a call share an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bugs
import common
import torch
from bug_summary import BASELINE, Record
from bugs import LETTERS, Group, Question

from kvboost_rag import KVBoost, Prompt
from kvboost_rag.prompt import Piece

SYSTEM = "You are a careful reviewer of Python code."
INSTRUCTION = "Read this code. Some of its lines have bugs.\n\n"
PREAMBLE = "Review {number}, asked for by team {team} on day {day} of the year.\n\n"
QUESTION = "\n\n{question}\n\nReply with one letter: A, B, C or D.\nAnswer:"
LAYOUTS = ("leading", "preamble")
PASSING_BYTES = "2GB"  # of an engine that begins empty: the engine's default budget, as in the paper


@dataclass(frozen=True)
class Condition:
    """Which engine is asked, and with which options of a call."""

    engine: str
    options: Mapping[str, Any]


CONDITIONS = {
    BASELINE: Condition("baseline", {"mode": "baseline"}),
    "PREFIX_CACHE": Condition("prefix", {"mode": "prefix"}),
    "CHUNK_REUSE": Condition("reuse", {"mode": "reuse"}),
    "INGESTED": Condition("ingested", {"mode": "reuse"}),
    "INGESTED_NONE": Condition("ingested", {"mode": "reuse", "repair": "none"}),
    "INGESTED_FIRST": Condition("first", {"mode": "reuse"}),
}
WARMED = ("ingested", "first")  # engines that read everything before the first question
VERSIONS = {"ingested": 1, "first": 2}  # of each document that they keep


class Side:
    """An engine, and the logits its last call began with."""

    def __init__(self, boost: KVBoost):
        self.boost, self.logits = boost, torch.empty(0)
        prefill = boost.engine.prefill

        def listened(*arguments: Any, **options: Any) -> Any:
            prefilled = prefill(*arguments, **options)
            self.logits = prefilled.logits
            return prefilled

        boost.engine.prefill = listened  # type: ignore[method-assign]


def render(boost: KVBoost, document: str, question: Question, number: int, layout: str = "leading") -> Prompt:
    """The prompt of one sample."""
    content = [Piece(INSTRUCTION), Piece(document, "document")]
    if layout == "preamble":
        content.insert(1, Piece(PREAMBLE.format(number=number + 1000, team=number % 7 + 2, day=number * 37 % 365 + 1)))
    content.append(Piece(QUESTION.format(question=bugs.question_text(question))))
    return boost.chat_format.render([{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}])


def letter_ids(boost: KVBoost) -> list[list[int]]:
    """For each letter the tokens that say it, with and without a space in front."""
    spelled = [[boost.tokens.encode(before + letter) for before in ("", " ")] for letter in LETTERS]
    return [[ids[0] for ids in each if len(ids) == 1] for each in spelled]


def ask(
    side: Side, prompt: Prompt, options: Mapping[str, Any], letters: list[list[int]]
) -> tuple[Record, torch.Tensor]:
    """One sample in one condition: what is recorded, and the logits of the first token."""
    report = side.boost.generate(prompt, max_new_tokens=1, **options).report
    logits = side.logits.float().cpu()
    log_probs = logits.log_softmax(-1)
    scores = [max(float(log_probs[token]) for token in ids) for ids in letters]
    kinds = ("num_exact_tokens", "num_approximate_tokens", "num_repaired_tokens", "num_live_tokens")
    record = {
        "scores": [round(score, 4) for score in scores],
        "letter": LETTERS[scores.index(max(scores))],
        "says_letter": any(int(logits.argmax()) in ids for ids in letters),
        "ttft_seconds": round(report.ttft_seconds, 6),
        "reuse_ratio": round(report.reuse_ratio, 6),
        **{kind: getattr(report, kind) for kind in kinds},
        "num_notes": len(report.notes),
    }
    return record, logits


def divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL(full || other), nats."""
    p, q = full.log_softmax(-1), other.log_softmax(-1)
    return max(0.0, float((p.exp() * (p - q)).sum()))


class Runner:
    """One engine per store over one model, asked in turn."""

    def __init__(self, model: Any, tokenizer: Any, names: Sequence[str], cache: str, layout: str = "leading"):
        self.conditions = {name: CONDITIONS[name] for name in names}
        budgets = {c.engine: cache if c.engine in WARMED else PASSING_BYTES for c in self.conditions.values()}
        self.sides = {
            engine: Side(KVBoost(model, tokenizer, max_cache_bytes=budget)) for engine, budget in budgets.items()
        }
        self.any = next(iter(self.sides.values())).boost
        self.letters, self.layout = letter_ids(self.any), layout
        self.warming: list[dict[str, Any]] = []
        self.store_bytes = dict.fromkeys(self.conditions, 0)

    def count_tokens(self, text: str) -> int:
        return len(self.any.tokens.encode(text))

    def warm_up(self) -> None:
        """Every condition once, on a text of no sample; then all engines are emptied."""
        text, *_ = common.texts_of(self.any.tokenizer, 400, 1)
        question = Question("line", "Which one?", tuple(LETTERS), "A")
        for condition in self.conditions.values():
            prompt = render(self.any, text, question, 0, self.layout)
            ask(self.sides[condition.engine], prompt, condition.options, self.letters)
        for side in self.sides.values():
            side.boost.clear()

    def shelves(self, groups: Sequence[Group]) -> Iterator[list[Group]]:
        """The groups in order, as many at a time as the budget holds warm."""
        left = list(groups)
        while left:
            number = len(left)
            for engine in self._warmed():
                fitting = self.sides[engine].boost.estimate([group.document for group in left]).num_fitting
                number = min(number, max(1, fitting // VERSIONS[engine]))
            yield left[:number]
            left = left[number:]

    def ingest(self, shelf: Sequence[Group]) -> None:
        """Warm the documents of a shelf. ``first`` knows what its prompts begin with, and keeps a second version of
        each document straight behind that."""
        texts = [group.document for group in shelf]
        for engine in self._warmed():
            boost = self.sides[engine].boost
            boost.clear()
            beginning = render(boost, texts[0], shelf[0].questions[0], 0, self.layout)
            known: dict[str, Any] = {"header": beginning, "first": True} if engine == "first" else {}
            report = boost.warm(texts, progress=False, **known)
            common.log(f"{engine}: {report}")
            self.warming.append({"engine": engine, "num_tokens": report.num_tokens, "seconds": report.seconds})

    def _warmed(self) -> list[str]:
        return [engine for engine in WARMED if engine in self.sides]

    def sample(self, group: Group, index: int, number: int) -> Record:
        """The question ``index`` of a group, in every condition; ``number`` of the sample says which one begins."""
        question = group.questions[index]
        names = list(self.conditions)
        turned = names[number % len(names) :] + names[: number % len(names)]
        sides: dict[str, Record] = {}
        logits: dict[str, torch.Tensor] = {}
        prompt = render(self.any, group.document, question, number, self.layout)
        for name in turned:
            condition = self.conditions[name]
            sides[name], logits[name] = ask(self.sides[condition.engine], prompt, condition.options, self.letters)
            used = self.sides[condition.engine].boost.stats().used_bytes
            self.store_bytes[name] = max(self.store_bytes[name], used)
        for name in names if BASELINE in names else []:
            sides[name]["agrees"] = sides[name]["letter"] == sides[BASELINE]["letter"]
            sides[name]["same_top"] = bool(logits[name].argmax() == logits[BASELINE].argmax())
            sides[name]["kl"] = round(divergence(logits[BASELINE], logits[name]), 9)
        return {
            "number": number,
            "group": group.number,
            "first": index == 0,
            "bucket": group.bucket,
            "kind": question.kind,
            "answer": question.answer,
            "num_document_tokens": group.num_tokens,
            "num_prompt_tokens": self.any.count_tokens(prompt),
            "began": turned[0],
            "sides": {name: sides[name] for name in names},
        }

    def close(self) -> None:
        for side in self.sides.values():
            side.boost.close()
