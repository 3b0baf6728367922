"""Ensembles: many members, of one architecture or of many, trained at once."""

from maxlite.ensemble.ensemble import Ensemble
from maxlite.ensemble.ensemble_metrics import Prediction
from maxlite.ensemble.member_program import Member
from maxlite.ensemble.strategies import STRATEGIES

__all__ = ["STRATEGIES", "Ensemble", "Member", "Prediction"]
