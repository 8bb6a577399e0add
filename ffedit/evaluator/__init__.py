"""Measure an edit: efficacy, generalisation, specificity and what else moved, before and after."""

from ffedit.bootstrap import Interval
from ffedit.evaluator.evaluate import Evaluation, evaluate, reference_weights
from ffedit.evaluator.generic import GenericText
from ffedit.evaluator.intervals import interval, paired
from ffedit.evaluator.scores import NAMES, FactScores, Report, Scores, mean_scores

__all__ = [
    "NAMES",
    "Evaluation",
    "FactScores",
    "GenericText",
    "Interval",
    "Report",
    "Scores",
    "evaluate",
    "interval",
    "mean_scores",
    "paired",
    "reference_weights",
]
