"""Which reused tokens to recompute (paper, section 4.6). ``REPAIRS`` is the one list of strategies."""

from kvboost_rag.engine.repair.base import DeviationProbe, Repair, RepairView, Reused, check_ratio
from kvboost_rag.engine.repair.boundary import BoundaryRepair
from kvboost_rag.engine.repair.deviation import DeviationRepair
from kvboost_rag.engine.repair.full import FullRepair
from kvboost_rag.engine.repair.none import NoRepair
from kvboost_rag.engine.repair.query import QueryRepair
from kvboost_rag.errors import OptionError

REPAIRS: dict[str, type[Repair]] = {
    "none": NoRepair,
    "boundary": BoundaryRepair,
    "deviation": DeviationRepair,
    "query": QueryRepair,
    "full": FullRepair,
}


def resolve_repair(repair: str | Repair, recompute_ratio: float | None = None) -> Repair:
    """The strategy of that name (or the one given), with its ratio set if one is asked for.

    A ratio of 0 is ``none`` and one of 1 is ``full``, whatever the strategy. Raises OptionError.
    """
    if isinstance(repair, Repair):
        strategy = repair
    elif isinstance(repair, str) and repair in REPAIRS:
        strategy = REPAIRS[repair]()
    else:
        raise OptionError.bad_value("repair", repair, f"one of {', '.join(map(repr, REPAIRS))} or a Repair object")
    if recompute_ratio is None:
        return strategy
    if check_ratio(recompute_ratio) == 0:
        return NoRepair()
    if recompute_ratio == 1:
        return FullRepair()
    return strategy.with_ratio(recompute_ratio)


__all__ = [
    "REPAIRS",
    "BoundaryRepair",
    "DeviationProbe",
    "DeviationRepair",
    "FullRepair",
    "NoRepair",
    "QueryRepair",
    "Repair",
    "RepairView",
    "Reused",
    "resolve_repair",
]
