"""A server that answers from passages and sends the text while it is written. Needs `fastapi` and `uvicorn`.

    python examples/06_streaming_server.py [MODEL]
    curl -N localhost:8000/ask --json '{"question": "Which village was the first to grow blue barley?"}'

MODEL is a hub name or a folder; left out, the bundled small model is used, which needs no network. Another port than
8000: set PORT. A client that goes away ends the work for it at the next token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence

import _bundled
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from kvboost_rag import KVBoost, hub, sample


class Question(BaseModel):
    question: str


def build_app(engine: KVBoost, search: Callable[[str], Sequence[str]]) -> FastAPI:
    """``search`` finds passages for a question. The engine answers one after the other, in threads of its own."""
    app = FastAPI()

    @app.post("/ask")
    def ask(asked: Question) -> StreamingResponse:
        prompt = engine.prompt(documents=search(asked.question), question=asked.question)

        async def pieces() -> AsyncIterator[str]:
            async with engine.astream(prompt, max_new_tokens=64) as stream:  # closed when the client goes away
                async for piece in stream:
                    yield piece

        return StreamingResponse(pieces(), media_type="text/plain")

    return app


def main(model: str | None = None) -> None:
    import uvicorn

    passages = list(sample.passages().values())[6:12]
    with KVBoost.from_pretrained(model or hub.bundled_model()) as engine:
        print(engine.warm(passages))
        uvicorn.run(build_app(engine, _bundled.search_in(passages)), port=int(os.environ.get("PORT", "8000")))


if __name__ == "__main__":
    main(*sys.argv[1:2])
