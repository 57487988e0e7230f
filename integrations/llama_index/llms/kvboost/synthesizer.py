"""KVBoostSynthesizer: from a question and nodes to an answer, every node whole and where the model has read it.

Knows LlamaIndex's synthesizers; which nodes fit together is told by ``packing.py``, what is reused is the engine's
business. No node is ever cut: what does not fit is left out, asked about in groups, or refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
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
from llama_index.llms.kvboost.packing import Packing, warm_inside
from llama_index.llms.kvboost.warming import content_of, engine_for

from kvboost_rag.calls import check_choice
from kvboost_rag.errors import OptionError
from kvboost_rag.prompt import INSTRUCTION, Prompt

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

    def _start(self, packing: Packing) -> list[int]:
        """Which texts to send, and whether they can be sent at all."""
        if self.overflow == "drop_lowest":
            return packing.best([None] * len(packing.texts))
        everything = list(range(len(packing.texts)))
        if self.overflow == "error":
            packing.check(everything)
        else:
            packing.check_each()
        return everything

    def _packing(self, question: str, texts: Sequence[str], options: dict[str, Any]) -> Packing:
        llm = self._llm
        engine = engine_for(llm)
        max_new_tokens = options.get("max_new_tokens", options.get("max_tokens"))
        system = self.system if self.system is not None else getattr(llm, "system_prompt", None)
        stripped = [text.strip() for text in texts]
        return Packing(
            engine=engine,
            question=question,
            texts=stripped,
            max_new_tokens=llm.metadata.num_output if max_new_tokens is None else max_new_tokens,
            context_tokens=llm.metadata.context_window,
            system=system,
            instruction=self.instruction,
            refine=self.refine,
            loose=frozenset(text for text in stripped if warm_inside(engine, text)),
        )

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        """There are none: see ``system``, ``instruction`` and ``refine``."""


def _tokens(responses: Any) -> Generator[str, None, None]:
    with closing(responses):
        for response in responses:
            yield response.delta or ""


async def _atokens(responses: Any) -> AsyncGenerator[str, None]:
    async with aclosing(responses):
        async for response in responses:
            yield response.delta or ""
