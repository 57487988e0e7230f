"""What all benchmarks share: which model, how sides are timed against each other, what goes into a result file.

Knows clocks, models and JSON; knows nothing of what is measured. Every comparison is taken in one process with its
sides alternating, and told as a ratio with its spread: single times of a shared machine mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvboost_rag import __version__, hub, sample

RESULTS = Path(__file__).parent / "results"
SEED = 17
WORDS_AT_ONCE = 4  # of texts that are cut to a number of tokens
# Architectures whose time can be measured without their weights: timing depends on shapes alone.
SHAPES: dict[str, dict[str, Any]] = {
    "shape:qwen2.5-3b": {
        "model_type": "qwen2",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "shape:tiny": {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--model",
        default="bundled",
        help=f"hub name or folder, 'bundled' (needs no network) or random weights in a shape: {', '.join(SHAPES)}",
    )
    made.add_argument("--device", default="cpu", help="where the model runs (cpu)")
    made.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    made.add_argument("--json", type=Path, metavar="PATH", help="write everything here")
    return made


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """``(model, tokenizer)`` as asked for by the options of ``parser``."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.model.startswith("shape:"):
        if arguments.model not in SHAPES:
            raise SystemExit(f"--model {arguments.model}: choose from {', '.join(SHAPES)}")
        return shaped(SHAPES[arguments.model], arguments.device, dtype), byte_tokenizer()
    loaded = hub.load(hub.bundled_model() if arguments.model == "bundled" else arguments.model, dtype=dtype)
    return loaded.model.to(arguments.device), loaded.tokenizer


def shaped(shape: Mapping[str, Any], device: str, dtype: torch.dtype) -> Any:
    """A model of that shape with random weights, the same ones each time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)
    return model.eval()


def byte_tokenizer() -> Any:
    """A tokenizer for models without words: one token a byte, a chat template, special tokens of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|user|>", "<|system|>", "<|assistant|>"]
    core = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(special + letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    made.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return made


def texts_of(tokenizer: Any, num_tokens: int, count: int) -> list[str]:
    """``count`` different texts of about ``num_tokens`` tokens each, cut from the project's passages at words.

    Where the passages end they begin again behind another first line, so no two texts are alike.
    """
    words = " ".join(sample.passages().values()).split(" ")
    texts, start = [], 0
    for number in range(count):
        taken, size = [f"Part {number}."], num_tokens
        while size > 0:
            piece = [words[(start + n) % len(words)] for n in range(WORDS_AT_ONCE)]
            start += WORDS_AT_ONCE
            taken += piece
            size -= len(tokenizer(" " + " ".join(piece), add_special_tokens=False)["input_ids"])
        texts.append(" ".join(taken).strip())
    return texts


def synchronize(device: str) -> None:
    """Wait for what was asked of an accelerator."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    elif device.startswith("mps"):
        torch.mps.synchronize()


def seconds(call: Callable[[], Any], device: str = "cpu") -> float:
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def alternate(sides: Mapping[str, Callable[[], float]], rounds: int, warmups: int = 1) -> dict[str, list[float]]:
    """Every side once a round, ``rounds`` times after ``warmups`` that do not count. A side returns its seconds."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warmups + rounds):
        for name, side in sides.items():
            value = side()
            if number >= warmups:
                taken[name].append(value)
    return taken


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, mean, least, greatest and 95th percentile."""
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "min": min(values),
        "max": max(values),
        "p95": float(np.percentile(values, 95)),
    }


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """Round by round: median of the ratios, the least and the greatest; and the ratio of the best times."""
    each = [a / b for a, b in zip(numerator, denominator, strict=True)]
    best = min(numerator) / min(denominator)
    return {"median": statistics.median(each), "min": min(each), "max": max(each), "of_best": best}


def interval(values: np.ndarray, reference: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of mean(values) / mean(reference), samples drawn together."""
    picks = np.random.default_rng(SEED).integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(values[picks].mean(1) / reference[picks].mean(1), [2.5, 97.5])
    return float(low), float(high)


def machine(device: str = "cpu") -> str:
    """What ran, in words."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()}, {platform.machine()} host"
    return f"{platform.machine()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Command, model, machine and versions, without paths of the machine."""
    command = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "command": shlex.join(["python", *command]),
        "model": Path(arguments.model).name if Path(arguments.model).is_absolute() else arguments.model,
        "dtype": arguments.dtype,
        "machine": machine(arguments.device),
        "versions": {"kvboost_rag": __version__, **versions, "python": platform.python_version()},
    }


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Write ``result``, if there is a path; whole or not at all."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1), encoding="utf-8")
    part.replace(path)


@contextmanager
def skipping(what: str) -> Iterator[None]:
    """A peer that cannot be measured here costs a line, not the run."""
    try:
        yield
    except Exception as error:
        print(f"{what}: skipped ({type(error).__name__}: {error})", file=sys.stderr)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
