"""Ensembles: many members, of one architecture or of many, trained at once."""

from maxlite.ensemble.combine import Prediction
from maxlite.ensemble.ensemble import Ensemble
from maxlite.ensemble.program import Member
from maxlite.ensemble.strategies import STRATEGIES

__all__ = ["STRATEGIES", "Ensemble", "Member", "Prediction"]
