"""Alternating training: which parameters each phase trains, when, and with which optimizer."""

from maxlite.phases.alternation import Alternation
from maxlite.phases.phase import Phase
from maxlite.phases.phase_schedule import Plateau, Threshold

__all__ = ["Alternation", "Phase", "Plateau", "Threshold"]
