"""Recomputes every approximately reused token: the slow truth the other strategies are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvboost_rag.engine.repair.base import Repair, RepairView


@dataclass(frozen=True)
class FullRepair(Repair):
    name: ClassVar[str] = "full"
    wanted: ClassVar[bool] = True

    def select(self, view: RepairView) -> torch.Tensor:
        return view.positions()
