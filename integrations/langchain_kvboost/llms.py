"""KVBoostLLM: a LangChain completion model over a KVBoost engine.

Knows LangChain's prompts and generations; how text becomes ids, and what is reused, is the engine's business. A prompt
arrives as one string: documents that were warmed are found in it. It is completed as it stands, without a chat
template; for a model made for chats use ``ChatKVBoost``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import Field

from langchain_kvboost.base import OverEngine


class KVBoostLLM(OverEngine, BaseLLM):
    """Complete text with a local Hugging Face model that reuses the KV of every warmed document.

    Several prompts of one call (``batch``, ``generate``) run together: those that share a prefix hold it once.
    ``batch_size``: at most so many at a time. The prompt is never part of the text.
    """

    batch_size: int = Field(default=8, ge=1)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        results = self.engine.generate_many(
            prompts, max_batch_size=self.batch_size, progress=False, **self._options(stop, kwargs)
        )
        return self._result(results)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self._options(stop, kwargs)
        if len(prompts) == 1:  # this one ends at once when its task is cancelled
            return self._result([await self.engine.agenerate(prompts[0], **options)])
        return self._result(
            await self.engine.agenerate_many(prompts, max_batch_size=self.batch_size, progress=False, **options)
        )

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with self.engine.stream(prompt, **self._options(stop, kwargs)) as stream:
            for piece in stream:
                chunk = GenerationChunk(text=piece)
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            yield GenerationChunk(text="", generation_info=self._metadata(stream.result))

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        async with self.engine.astream(prompt, **self._options(stop, kwargs)) as stream:
            async for piece in stream:
                chunk = GenerationChunk(text=piece)
                if run_manager:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            yield GenerationChunk(text="", generation_info=self._metadata(stream.result))

    def _result(self, results: list[Any]) -> LLMResult:
        usage = {
            "prompt_tokens": sum(r.report.num_prompt_tokens for r in results),
            "completion_tokens": sum(r.report.num_new_tokens for r in results),
        }
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return LLMResult(
            generations=[[Generation(text=r.text, generation_info=self._metadata(r))] for r in results],
            llm_output={"token_usage": usage, "model_name": self.model},
        )
