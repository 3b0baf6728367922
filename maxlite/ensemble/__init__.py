"""Ensembles: members of one or several architectures, trained together."""

from maxlite.ensemble.ensemble import Ensemble, Prediction
from maxlite.ensemble.members.lift import lift
from maxlite.ensemble.members.member import Member

__all__ = ["Ensemble", "Member", "Prediction", "lift"]
