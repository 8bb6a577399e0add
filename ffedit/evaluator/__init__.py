"""Evaluation of an edit: efficacy, generalisation, specificity and side effects, before and after."""

from ffedit.algebra.bootstrap import Interval
from ffedit.evaluator.drift import GenericText
from ffedit.evaluator.evaluate import FULL, Evaluation, evaluate, reference_weights
from ffedit.evaluator.intervals import interval, paired
from ffedit.evaluator.left_out import LeftOut, left_out
from ffedit.evaluator.prompts import questions
from ffedit.evaluator.scores import NAMES, FactScores, Report, Scores, mean_scores

__all__ = [
    "FULL",
    "NAMES",
    "Evaluation",
    "FactScores",
    "GenericText",
    "Interval",
    "LeftOut",
    "Report",
    "Scores",
    "evaluate",
    "interval",
    "left_out",
    "mean_scores",
    "paired",
    "questions",
    "reference_weights",
]
