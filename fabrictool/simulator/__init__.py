"""Operator costs, calibrations with their error bands, and discrete-event serving; pure.

What a study needs of it can be imported from here; `docs/reference/simulator-library.md` shows how. Names are looked up
when they are asked for: a command that simulates nothing does not load NumPy for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabrictool.simulator.calibration import Calibration, choose, shipped
    from fabrictool.simulator.cases import Case, Estimate, Prediction, estimate, predict
    from fabrictool.simulator.fitting import Observation, fit
    from fabrictool.simulator.fleet import Fleet, Outcome, ReplicaSpec, Stream, simulate
    from fabrictool.simulator.frontier import Question, Recommendation, explore
    from fabrictool.simulator.operators import Parallelism, work
    from fabrictool.simulator.report import Hardware, Report
    from fabrictool.simulator.slo import LatencyTarget
    from fabrictool.simulator.stepmodel import Drafts, Factors, Machine, StepModel
    from fabrictool.simulator.steptimes import StepTimes

__all__ = [
    "Calibration",
    "Case",
    "Drafts",
    "Estimate",
    "Factors",
    "Fleet",
    "Hardware",
    "LatencyTarget",
    "Machine",
    "Observation",
    "Outcome",
    "Parallelism",
    "Prediction",
    "Question",
    "Recommendation",
    "ReplicaSpec",
    "Report",
    "StepModel",
    "StepTimes",
    "Stream",
    "choose",
    "estimate",
    "explore",
    "fit",
    "predict",
    "shipped",
    "simulate",
    "work",
]

_HOMES = {
    "calibration": ("Calibration", "choose", "shipped"),
    "cases": ("Case", "Estimate", "Prediction", "estimate", "predict"),
    "fitting": ("Observation", "fit"),
    "fleet": ("Fleet", "Outcome", "ReplicaSpec", "Stream", "simulate"),
    "frontier": ("Question", "Recommendation", "explore"),
    "operators": ("Parallelism", "work"),
    "report": ("Hardware", "Report"),
    "slo": ("LatencyTarget",),
    "stepmodel": ("Drafts", "Factors", "Machine", "StepModel"),
    "steptimes": ("StepTimes",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
