"""KVBoostSynthesizer: from a question and nodes to an answer, every node whole and where the model has read it.

Knows LlamaIndex's synthesizers and how many nodes fit; what is reused is the engine's business. No node is ever cut:
what does not fit is left out, asked about in groups, or refused.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

import llama_index.core.instrumentation as instrument
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.schema import NodeWithScore
from llama_index.core.settings import Settings
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index.llms.kvboost.warming import check_choice, content_of, engine_for

from kvboost_rag.errors import OptionError, PromptTooLongError
from kvboost_rag.prompt import INSTRUCTION, Piece, Prompt

dispatcher = instrument.get_dispatcher(__name__)

OVERFLOWS = ("drop_lowest", "refine_groups", "error")
REFINE = (
    "{question}\n\nAn answer from other passages was: {answer}\n"
    "Give a better answer if the passages above help; else repeat it."
)


class KVBoostSynthesizer(BaseSynthesizer):
    """Answers from whole nodes, in the order they come, each a document of its own in the prompt.

    For ``index.as_query_engine(response_synthesizer=...)``. ``llm``: a ``KVBoostLLM``; ``Settings.llm`` if not given.
    ``system``: the system message, or ``llm.system_prompt``, or the template's own; ``instruction``: what stands before
    the nodes. ``options``: those of the LLM's calls (``max_new_tokens``, ``temperature``, ``repair``, ...); a call of
    ``synthesize`` or ``get_response`` may override them.

    ``overflow``: what becomes of nodes that do not fit the model's context together, answer included.
    ``"drop_lowest"``: those with the lowest scores are left out, and a warning says how many; without scores the last
    ones; first of all those that would not fit alone. They are not among the response's ``source_nodes``.
    ``"refine_groups"``: groups of nodes are asked about one after the other, each but the first with the answer so far
    (shortened if a node would not fit beside it). ``"error"``: PromptTooLongError, with the numbers.

    Raises OptionError; calls raise PromptTooLongError where no node would fit at all, or with ``"refine_groups"`` one
    of them, before any work.
    """

    def __init__(
        self,
        llm: Any = None,
        *,
        system: str | None = None,
        instruction: str = INSTRUCTION,
        overflow: str = "drop_lowest",
        refine: str = REFINE,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        empty_response: str | None = None,
        **options: Any,
    ):
        """``refine``: the question to all groups but the first, with ``{question}`` and ``{answer}`` in it."""
        check_choice("overflow", overflow, OVERFLOWS)
        if "{question}" not in refine or "{answer}" not in refine:
            raise OptionError.bad_value("refine", refine, "a text with {question} and {answer} in it")
        llm = Settings.llm if llm is None else llm
        engine_for(llm)
        if not hasattr(llm, "complete_prompt"):
            raise OptionError.bad_value("llm", type(llm).__name__, "a KVBoostLLM")

        tokenizer = llm.tokenizer_fn  # or the helpers load another model's
        super().__init__(
            llm=llm,
            callback_manager=callback_manager,
            prompt_helper=PromptHelper.from_llm_metadata(llm.metadata, tokenizer=tokenizer),
            chat_prompt_helper=ChatPromptHelper.from_llm_metadata(llm.metadata, tokenizer=tokenizer),
            streaming=streaming,
            empty_response=empty_response,
        )
        self.system, self.instruction, self.overflow, self.refine = system, instruction, overflow, refine
        self.options = options

    @property
    def header(self) -> Prompt:
        """What prompts begin with: for ``header=`` of a KVBoostWarmTransform or KVBoostNodePostprocessor."""
        return self._packing("x", ["x"], {}).prompt([0])

    def synthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        nodes = self._fitting(query, nodes, response_kwargs)
        return super().synthesize(query, nodes, additional_source_nodes, **response_kwargs)

    async def asynthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        nodes = await asyncio.to_thread(self._fitting, query, nodes, response_kwargs)
        return await super().asynthesize(query, nodes, additional_source_nodes, **response_kwargs)

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """``text_chunks``: whole nodes; ``response_kwargs``: options of the LLM's call. Knows no scores."""
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        options = self._options(response_kwargs)
        packing = self._packing(query_str, text_chunks, options)
        left = self._start(packing)
        answer: str | None = None
        while True:
            prompt, left = packing.next_group(left, answer)
            if not left:
                break
            answer = self._llm.complete_prompt(prompt, **options).text
        if self._streaming:
            response: RESPONSE_TEXT_TYPE = _tokens(self._llm.stream_complete_prompt(prompt, **options))
        else:
            response = self._llm.complete_prompt(prompt, **options).text
        dispatcher.event(GetResponseEndEvent())
        return response

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """As ``get_response``; what it counts and looks up is done in another thread."""
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        options = self._options(response_kwargs)
        packing = await asyncio.to_thread(self._packing, query_str, text_chunks, options)
        left = await asyncio.to_thread(self._start, packing)
        answer: str | None = None
        while True:
            prompt, left = await asyncio.to_thread(packing.next_group, left, answer)
            if not left:
                break
            answer = (await self._llm.acomplete_prompt(prompt, **options)).text
        if self._streaming:
            response: RESPONSE_TEXT_TYPE = _atokens(await self._llm.astream_complete_prompt(prompt, **options))
        else:
            response = (await self._llm.acomplete_prompt(prompt, **options)).text
        dispatcher.event(GetResponseEndEvent())
        return response

    def _fitting(
        self, query: QueryTextType, nodes: list[NodeWithScore], response_kwargs: dict[str, Any]
    ) -> list[NodeWithScore]:
        """Here and not in ``get_response``, which knows no scores and could not tell what the sources are."""
        if self.overflow != "drop_lowest" or not nodes:
            return nodes
        question = query if isinstance(query, str) else query.query_str
        packing = self._packing(question, [content_of(n.node) for n in nodes], self._options(response_kwargs))
        return [nodes[i] for i in packing.best([n.score for n in nodes])]

    def _options(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call's options over the constructor's; ``max_tokens`` and ``max_new_tokens`` are one."""
        limits = {"max_tokens", "max_new_tokens"}
        own = {k: v for k, v in self.options.items() if k not in limits or not limits & call.keys()}
        return own | call

    def _start(self, packing: _Packing) -> list[int]:
        """Which texts to send, and whether they can be sent at all."""
        if self.overflow == "drop_lowest":
            return packing.best([None] * len(packing.texts))
        everything = list(range(len(packing.texts)))
        if self.overflow == "error":
            packing.check(everything)
        else:
            packing.check_each()
        return everything

    def _packing(self, question: str, texts: Sequence[str], options: dict[str, Any]) -> _Packing:
        llm = self._llm
        engine = engine_for(llm)
        max_new_tokens = options.get("max_new_tokens", options.get("max_tokens"))
        system = self.system if self.system is not None else getattr(llm, "system_prompt", None)
        stripped = [text.strip() for text in texts]
        return _Packing(
            engine=engine,
            question=question,
            texts=stripped,
            max_new_tokens=llm.metadata.num_output if max_new_tokens is None else max_new_tokens,
            context_tokens=llm.metadata.context_window,
            system=system,
            instruction=self.instruction,
            refine=self.refine,
            loose=frozenset(text for text in stripped if _warm_inside(engine, text)),
        )

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        """There are none: see ``system``, ``instruction`` and ``refine``."""


@dataclass(frozen=True)
class _Packing:
    """One question and its texts: which of them go together into one prompt. Texts are named by their positions.

    ``loose``: texts that are not warm themselves, but end with one that is; it is found where it stands.
    """

    engine: Any
    question: str
    texts: Sequence[str]
    max_new_tokens: int
    context_tokens: int
    system: str | None
    instruction: str
    refine: str
    loose: frozenset[str]

    def prompt(self, chosen: Sequence[int], answer: str | None = None) -> Prompt:
        """The engine's prompt with these texts in this order; with ``answer``, one that refines it."""
        question = self.question if answer is None else self.refine.format(question=self.question, answer=answer)
        built = self.engine.prompt([self.texts[i] for i in chosen], question, self.system, self.instruction)
        pieces = (Piece(p.text) if p.kind == "document" and p.text in self.loose else p for p in built.pieces)
        return Prompt(tuple(pieces), built.opening)

    def num_tokens(self, chosen: Sequence[int], answer: str | None = None) -> int:
        return int(self.engine.count_tokens(self.prompt(chosen, answer)))

    def fits(self, chosen: Sequence[int], answer: str | None = None) -> bool:
        return self.num_tokens(chosen, answer) + self.max_new_tokens <= self.context_tokens

    def check(self, chosen: Sequence[int], answer: str | None = None) -> None:
        """Raises PromptTooLongError if these texts do not fit together."""
        num_tokens = self.num_tokens(chosen, answer)
        if num_tokens + self.max_new_tokens > self.context_tokens:
            what = f"the prompt with {len(chosen)} of {len(self.texts)} nodes"
            raise PromptTooLongError(num_tokens, self.max_new_tokens, self.context_tokens, what)

    def check_each(self) -> None:
        """Raises PromptTooLongError if a text does not fit alone, where several prompts are needed."""
        everything = list(range(len(self.texts)))
        if not self.fits(everything):
            for i in everything:
                self.check([i], "" if i else None)
            self.check(everything[:1])

    def best(self, scores: Sequence[float | None]) -> list[int]:
        """All texts, or those left when the ones with the lowest scores are gone, as few as need be. Warns.

        Raises PromptTooLongError if none is left.
        """
        everything = list(range(len(self.texts)))
        if self.fits(everything):
            return everything
        worst_first = sorted(everything, key=lambda i: (_rank(scores[i]), -i))
        left = [i for i in everything if self.fits([i])]
        going = [i for i in worst_first if i in left]
        while left and not self.fits(left):
            left.remove(going.pop(0))
        if not left:
            self.check(worst_first[-1:])
        warnings.warn(
            f"{len(everything) - len(left)} of {len(everything)} nodes were left out, those with the lowest scores and "
            f"those too long by themselves: the prompt with all of them has {self.num_tokens(everything)} tokens and "
            f"{self.max_new_tokens} new ones were asked for, but the model's context holds "
            f"{self.context_tokens}.",
            UserWarning,
            stacklevel=2,
        )
        return left

    def next_group(self, left: Sequence[int], answer: str | None) -> tuple[Prompt, list[int]]:
        """A prompt with as many texts of ``left`` as fit, at least one if there is one; and what is left then."""
        size = len(left)
        while size > 1 and not self.fits(left[:size], answer):
            size -= 1
        while answer and not self.fits(left[:size], answer):
            answer = answer[: len(answer) // 2]
        return self.prompt(left[:size], answer), list(left[size:])


def _rank(score: float | None) -> float:
    return float("-inf") if score is None else score


def _warm_inside(engine: Any, text: str) -> bool:
    """Whether ``text`` is cold, but ends with one that is warm: without its metadata lines, as LangChain has it."""
    return bool(text) and not engine.is_warm(text) and engine.segments(Prompt((Piece(text),)))[-1].document


def _tokens(responses: Any) -> Generator[str, None, None]:
    with closing(responses):
        for response in responses:
            yield response.delta or ""


async def _atokens(responses: Any) -> AsyncGenerator[str, None]:
    async with aclosing(responses):
        async for response in responses:
            yield response.delta or ""
