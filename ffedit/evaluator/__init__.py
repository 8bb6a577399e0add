"""Evaluation of an edit: efficacy, generalisation, specificity and side effects, before and after."""

from ffedit.algebra.bootstrap import Interval
from ffedit.evaluator.drift import GenericText
from ffedit.evaluator.evaluate import Evaluation, evaluate, reference_weights
from ffedit.evaluator.intervals import interval, paired
from ffedit.evaluator.metrics import METRICS, Metric, metric
from ffedit.evaluator.prompts import questions
from ffedit.evaluator.scores import NAMES, FactScores, LeftOut, Report, Scores, left_out, mean_scores
from ffedit.evaluator.verdict import Verdict

__all__ = [
    "METRICS",
    "NAMES",
    "Evaluation",
    "FactScores",
    "GenericText",
    "Interval",
    "LeftOut",
    "Metric",
    "Report",
    "Scores",
    "Verdict",
    "evaluate",
    "interval",
    "left_out",
    "mean_scores",
    "metric",
    "paired",
    "questions",
    "reference_weights",
]
