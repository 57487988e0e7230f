"""``kvboost-rag bench``: what reuse changes and saves, measured on a store's own passages.

Knows how prompts are drawn; measuring is ``KVBoost.verify``'s.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvboost_rag import sample
from kvboost_rag.cli import printing
from kvboost_rag.cli.choices import Chosen, Common, choose
from kvboost_rag.cli.corpus import Corpus, Settings, is_store
from kvboost_rag.cli.session import Session, check_searchable, load, opened
from kvboost_rag.errors import KVBoostError, OptionError
from kvboost_rag.kvboost import KVBoost

OWN_QUESTION = 'What do the passages say about "{words}"?'
QUOTED_WORDS = 8
COLUMNS = ("question", "full prefill", "reuse", "full / reuse", "KL", "same token")


@dataclass(frozen=True)
class Plan:
    """``questions``: a file with one a line, answered from what is retrieved for each; None for groups of passages
    drawn by ``seed``, each asked about one of them."""

    questions: Path | None = None
    num: int = 4
    k: int = 4
    seed: int = 0
    reuse: dict[str, Any] = field(default_factory=dict)


class Drawn(NamedTuple):
    """One prompt to be."""

    question: str
    sources: list[str]
    texts: list[str]


def run(common: Common, plan: Plan) -> dict[str, Any]:
    """Measure. Uses the sample corpus where there is no store. Raises KVBoostError."""
    asked = read_questions(plan.questions) if plan.questions is not None else []
    if is_store(common.store):
        corpus = Corpus.open(common.store)
        check_searchable(corpus, choose(common, corpus.settings))
        with opened(common, corpus, **plan.reuse) as session:
            drawn = drawn_from(session, asked, plan)
            return named(session.chosen, common.store, plan) | measured(session.engine, drawn)
    if asked:
        raise KVBoostError(f"there is no store in {common.store} to answer from: make one with kvboost-rag warm PATH")
    printing.note(f"no store in {common.store}: the sample corpus is used")
    chosen = choose(common, Settings())
    with load(common, chosen, **plan.reuse) as engine:
        return named(chosen, "sample corpus", plan) | measured(engine, drawn_from_sample(plan))


def named(chosen: Chosen, corpus: object, plan: Plan) -> dict[str, Any]:
    return {"model": chosen.model, "corpus": str(corpus), "k": plan.k}


def read_questions(path: Path) -> list[str]:
    """One a line. Raises OptionError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError.bad_value(
            "questions", str(path), f"a UTF-8 text file, one question a line ({error})"
        ) from error
    questions = [line.strip() for line in lines if line.strip()]
    if not questions:
        raise OptionError.bad_value("questions", str(path), "a file with at least one question")
    return questions


def drawn_from(session: Session, asked: Sequence[str], plan: Plan) -> list[Drawn]:
    """For each question what is retrieved, or groups of passages as they are drawn."""
    if asked:
        found = [(question, session.search(question, plan.k)) for question in asked[: plan.num]]
        return [Drawn(question, [p.source for p in ps], [p.text for p in ps]) for question, ps in found]
    sources = {passage.text: passage.source for passage in reversed(session.corpus.passages)}
    groups = groups_of(sorted(sources), plan)
    return [Drawn(about(own), [sources[text] for text in texts], texts) for own, texts in groups]


def drawn_from_sample(plan: Plan) -> list[Drawn]:
    """Each of the sample's questions with its own passage and others, in any order."""
    passages, draw = sample.passages(), random.Random(plan.seed)
    questions = sample.questions()
    found = []
    for item in draw.sample(questions, min(plan.num, len(questions))):
        others = [name for name in passages if name != item.passage]
        names = [item.passage, *draw.sample(others, min(plan.k, len(passages)) - 1)]
        draw.shuffle(names)
        found.append(Drawn(item.question, names, [passages[name] for name in names]))
    return found


def groups_of(texts: Sequence[str], plan: Plan) -> list[tuple[str, list[str]]]:
    """A text to ask about, each in its turn, and a group that it is in, at any place."""
    draw = random.Random(plan.seed)
    if len(texts) < plan.k:
        printing.note(f"note: the store has {len(texts)} passages, fewer than --k {plan.k}")
    turns = draw.sample(texts, len(texts))
    groups = []
    for number in range(plan.num):
        own = turns[number % len(turns)]
        group = [own, *draw.sample([text for text in turns if text != own], min(plan.k, len(turns)) - 1)]
        draw.shuffle(group)
        groups.append((own, group))
    return groups


def about(text: str) -> str:
    return OWN_QUESTION.format(words=" ".join(text.split()[:QUOTED_WORDS]))


def measured(engine: KVBoost, drawn: Sequence[Drawn]) -> dict[str, Any]:
    """Full prefill and reuse on each prompt, documents in memory, after a prompt that is not counted."""
    texts = list(dict.fromkeys(text for each in drawn for text in each.texts))
    report = engine.warm(texts, progress=False)
    if report.num_warmed:
        printing.note(f"read: {report}")
    engine.prefetch(texts).result()
    prompts = [engine.prompt(documents=each.texts, question=each.question) for each in drawn]
    engine.generate(prompts[0], max_new_tokens=1)
    rows = []
    for each, prompt in zip(drawn, printing.track(prompts, "measuring"), strict=True):
        verified = engine.verify([prompt])
        repair = verified.repair
        rows.append(row(each, verified.comparisons[0]))
    return {"repair": repair, "prompts": rows, "mean": mean(rows)}


def row(drawn: Drawn, comparison: Any) -> dict[str, Any]:
    return {
        "question": drawn.question,
        "sources": drawn.sources,
        "full_seconds": comparison.full_seconds,
        "reuse_seconds": comparison.reuse_seconds,
        "ratio": comparison.speedup,
        "kl": comparison.kl,
        "same_token": comparison.agreement,
        "report": comparison.report.to_dict(),
    }


def mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = ("full_seconds", "reuse_seconds", "ratio", "kl", "same_token")
    return {name: sum(each[name] for each in rows) / len(rows) for name in names}


def show(found: Mapping[str, Any]) -> None:
    title = f"{found['model']}, {found['corpus']}, {found['k']} passages a prompt, repair {found['repair']}"
    rows = [[each["question"], *_numbers(each)] for each in found["prompts"]]
    printing.table(title, COLUMNS, rows, ["mean", *_numbers(found["mean"])])


def _numbers(each: Mapping[str, Any]) -> list[str]:
    return [
        f"{each['full_seconds'] * 1e3:.0f} ms",
        f"{each['reuse_seconds'] * 1e3:.0f} ms",
        f"{each['ratio']:.1f}",
        f"{each['kl']:.4f}",
        f"{each['same_token']:.0%}",
    ]
