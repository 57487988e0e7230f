"""From the prompt's last logits to text: sampling, stopping, and nothing computed twice.

Knows a model, a filled buffer and token ids; knows nothing of chunks or stores. ``transformers``' own loop decodes.
The first token is taken from the logits the fused forward already gave, inside the same ``generate`` call
(``custom_generate``), so no forward is spent on it. Sampling adds Gumbel noise to the processed logits and takes the
largest, which draws from exactly the softmax distribution with a generator of the request's own: a seed gives the same
text whatever other threads do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvboost_rag.engine import compat
from kvboost_rag.engine.cache import SlotCache
from kvboost_rag.engine.model import Model
from kvboost_rag.errors import OptionError

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class GenerationOptions:
    """How to decode. ``temperature`` 0 is greedy. ``stop``: strings that end the text and never appear in it."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        _check(self.max_new_tokens, "max_new_tokens", int, 1, None, "a whole number, 1 or more")
        _check(self.temperature, "temperature", (int, float), 0, None, "a number, 0 or more")
        _check(self.top_p, "top_p", (int, float), 0, 1, "a number from 0 to 1, or None")
        _check(self.top_k, "top_k", int, 1, None, "a whole number, 1 or more, or None")
        _check(
            self.repetition_penalty,
            "repetition_penalty",
            (int, float),
            1e-6,
            None,
            "a number above 0, or None",
        )
        _check(self.seed, "seed", int, 0, None, "a whole number, 0 or more, or None")
        given: Any = self.stop
        if given is not None and not (
            isinstance(given, str | list | tuple) and all(isinstance(s, str) and s for s in self.stops)
        ):
            raise OptionError.bad_value("stop", given, "a string or a list of strings, none of them empty")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(() if self.stop is None else self.stop)


def _check(value: Any, option: str, kind: Any, low: float, high: float | None, choices: str) -> None:
    if value is None and choices.endswith("None"):
        return
    fits = isinstance(value, kind) and not isinstance(value, bool) and value >= low  # not so for NaN
    if not fits or (high is not None and not value <= high):
        raise OptionError.bad_value(option, value, choices)


class TextAssembler:
    """Turns token ids into text piece by piece, cut at the first stop string.

    Pieces are only given out once they can no longer change: not in the middle of a character, and not while they may
    be the beginning of a stop string. The pieces concatenate to the final text.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()):
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._prefix_at = self._read_at = 0
        self._held = ""
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became certain."""
        if self.stopped:
            return ""
        self._ids.extend(ids)
        # Decoding from a token back keeps spaces and joiners right without decoding everything again.
        prefix = self._decode(self._ids[self._prefix_at : self._read_at])
        text = self._decode(self._ids[self._prefix_at :])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        if len(text) > len(prefix):  # a token without text (a special one) must stay in front of the next
            self._prefix_at, self._read_at = self._read_at, len(self._ids)
        return self._release(text[len(prefix) :])

    def finish(self) -> str:
        """The rest, when no more tokens will come."""
        if self.stopped:
            return ""
        prefix = self._decode(self._ids[self._prefix_at : self._read_at])
        text = self._decode(self._ids[self._prefix_at :])
        self._prefix_at = self._read_at = len(self._ids)
        piece = self._release(text[len(prefix) :]) + self._held
        self._held = ""
        return piece

    def _release(self, text: str) -> str:
        self._held += text
        found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped = True
            piece, self._held = self._held[: min(found)], ""
            return piece
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        piece, self._held = self._held[:cut], self._held[cut:]
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class _Gumbel(LogitsProcessor):  # type: ignore[misc]
    """Argmax of logits + Gumbel noise is a draw from their softmax."""

    def __init__(self, seed: int | None):
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        uniform = torch.rand(scores.shape, generator=self._generator, dtype=torch.float64).clamp_min_(1e-300)
        return scores - torch.log(-torch.log(uniform)).to(scores.dtype).to(scores.device)  # MPS has no float64


class _EachStep(StoppingCriteria):  # type: ignore[misc]
    """Calls ``on_tokens`` with the ids that are new; generation ends when it returns True."""

    def __init__(self, num_prompt_tokens: int, on_tokens: Callable[[list[int]], bool]):
        self._seen, self._on_tokens = num_prompt_tokens, on_tokens
        self.stopped = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids[0, self._seen :].tolist()
        self._seen += len(new)
        self.stopped = self._on_tokens(new)
        return torch.tensor([self.stopped], dtype=torch.bool, device=input_ids.device)


def _processors(options: GenerationOptions) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if options.temperature == 0:
        return processors
    processors.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k is not None:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p is not None and options.top_p < 1:
        processors.append(TopPLogitsWarper(float(options.top_p)))
    processors.append(_Gumbel(options.seed))
    return processors


def decode(
    model: Model,
    ids: torch.Tensor,
    cache: SlotCache | Any,
    logits: torch.Tensor,
    options: GenerationOptions,
    on_tokens: Callable[[list[int]], bool],
) -> str:
    """Generate behind the prompt ``ids`` (num_tokens,) whose KV fills ``cache`` and whose last logits are ``logits``
    (vocab,). ``on_tokens`` gets every new id as it comes and ends generation by returning True.

    Returns why generation ended: ``"stop"`` (end token or ``on_tokens``) or ``"length"``.
    """
    own = model.module.generation_config
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else _first(own.eos_token_id),
        repetition_penalty=options.repetition_penalty or own.repetition_penalty,
    )

    def continue_from_logits(
        module: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, **kwargs: Any
    ) -> torch.Tensor:
        scores = logits_processor(input_ids, logits[None].to(input_ids.device))
        input_ids = torch.cat([input_ids, scores.argmax(dim=-1, keepdim=True)], dim=-1)
        if bool(stopping_criteria(input_ids, None).all()):
            return input_ids
        return compat.continue_sampling(module, input_ids, logits_processor, stopping_criteria, kwargs)

    prompt = ids.to(model.device)[None]
    each_step = _EachStep(prompt.shape[1], on_tokens)
    output = model.module.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=config,
        logits_processor=_processors(options),
        stopping_criteria=StoppingCriteriaList([each_step]),
        custom_generate=continue_from_logits,
        **{str(model.cache_argument): cache},
    )
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    return "stop" if each_step.stopped or int(output[0, -1]) in ends else "length"


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
