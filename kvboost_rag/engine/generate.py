"""From the prompt's last logits to text: sampling, stopping, and nothing computed twice.

Knows a model, a filled buffer and token ids; knows nothing of chunks or stores. ``transformers``' own loop decodes.
The first token is taken from the logits the fused forward already gave, inside the same ``generate`` call
(``custom_generate``), so no forward is spent on it. Sampling adds Gumbel noise to the processed logits and takes the
largest, which draws from exactly the softmax distribution with a generator of the request's own: a seed gives the same
text whatever other threads do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
from kvboost_rag.engine.model import Model
from kvboost_rag.errors import OptionError

Decode = Callable[[Sequence[int]], str]
OnTokens = Callable[[int, list[int]], bool]


@dataclass(frozen=True)
class GenerationOptions:
    """How to decode. ``temperature`` 0 is greedy. ``stop``: strings that end the text and never appear in it;
    ``stop_ids``: tokens that do, besides the model's own end tokens."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_ids: Sequence[int] = ()

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
        ids: Any = self.stop_ids
        if not isinstance(ids, list | tuple) or not all(type(each) is int and each >= 0 for each in ids):
            raise OptionError.bad_value("stop_ids", ids, "a list of token ids")

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

    def __init__(self, decode: Decode, stop: Sequence[str] = (), stop_ids: Collection[int] = ()):
        self._decode, self._stop, self._stop_ids = decode, tuple(stop), frozenset(stop_ids)
        self._ids: list[int] = []
        self._prefix_at = self._read_at = 0
        self._held = ""
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became certain."""
        if self.stopped:
            return ""
        if self._stop_ids.intersection(ids):
            before = next(at for at, each in enumerate(ids) if each in self._stop_ids)
            piece = self.push(ids[:before]) + self.finish()
            self.stopped = True
            return piece
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
    """Argmax of logits + Gumbel noise is a draw from their softmax. Each row has a generator of its own."""

    def __init__(self, seed: int | None, num_rows: int):
        self._generators = [torch.Generator() for _ in range(num_rows)]
        for generator in self._generators:
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = [torch.rand(scores.shape[1], generator=g, dtype=torch.float64) for g in self._generators]
        noise = -torch.log(-torch.log(torch.stack(rows).clamp_min_(1e-300)))
        return scores + noise.to(scores.dtype).to(scores.device)  # MPS has no float64


class _EachStep(StoppingCriteria):  # type: ignore[misc]
    """Calls ``on_tokens`` with a row and its new ids; the row ends when it returns True or with an end token."""

    def __init__(self, num_rows: int, width: int, ends: Collection[int], on_tokens: OnTokens):
        self._seen, self._ends, self._on_tokens = width, ends, on_tokens
        self.stopped = [False] * num_rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids[:, self._seen :].tolist()
        self._seen = input_ids.shape[1]
        for row, ids in enumerate(new):
            if not self.stopped[row]:
                asked_to_stop = self._on_tokens(row, ids)
                self.stopped[row] = asked_to_stop or ids[-1] in self._ends
        return torch.tensor(self.stopped, dtype=torch.bool, device=input_ids.device)


def _processors(options: GenerationOptions, num_rows: int) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if options.temperature == 0:
        return processors
    processors.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k is not None:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p is not None and options.top_p < 1:
        processors.append(TopPLogitsWarper(float(options.top_p)))
    processors.append(_Gumbel(options.seed, num_rows))
    return processors


def decode(
    model: Model,
    prompts: Sequence[torch.Tensor],
    cache: Any,
    logits: torch.Tensor,
    options: GenerationOptions,
    on_tokens: OnTokens,
    width: int | None = None,
) -> list[str]:
    """Generate behind ``prompts``, (num_tokens,) each, whose KV fills ``cache`` and whose last logits are ``logits``
    (rows, vocab). ``on_tokens`` gets a row and its new ids as they come and ends that row by returning True.

    ``width``: as how many tokens the cache counts every prompt; the longest if not given. Returns why each row ended:
    ``"stop"`` (end token or ``on_tokens``) or ``"length"``.
    """
    own = model.module.generation_config
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else ends[0],
        repetition_penalty=options.repetition_penalty or own.repetition_penalty,
    )

    def continue_from_logits(
        module: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, **kwargs: Any
    ) -> torch.Tensor:
        scores = logits_processor(input_ids, logits.to(input_ids.device))
        input_ids = torch.cat([input_ids, scores.argmax(dim=-1, keepdim=True)], dim=-1)
        if bool(stopping_criteria(input_ids, None).all()):
            return input_ids
        longer = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        return compat.continue_sampling(module, input_ids, longer, logits_processor, stopping_criteria, kwargs)

    width = width or max(len(ids) for ids in prompts)
    # padded with a token of the row itself, so that a repetition penalty sees the tokens it would see without
    rows = torch.stack([torch.cat([ids[:1].expand(width - len(ids)), ids]) for ids in prompts]).to(model.device)
    mask = torch.stack([(torch.arange(width) >= width - len(ids)).long() for ids in prompts]).to(model.device)
    each_step = _EachStep(len(prompts), width, set(ends), on_tokens)
    model.module.generate(
        input_ids=rows,
        attention_mask=mask,
        generation_config=config,
        logits_processor=_processors(options, len(prompts)),
        stopping_criteria=StoppingCriteriaList([each_step]),
        custom_generate=continue_from_logits,
        **{str(model.cache_argument): cache},
    )
    return ["stop" if stopped else "length" for stopped in each_step.stopped]
