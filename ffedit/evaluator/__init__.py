"""Measure an edit: efficacy, generalisation, specificity and what else moved, before and after."""

from ffedit.evaluator.evaluate import Evaluation, evaluate
from ffedit.evaluator.scores import NAMES, FactScores, Report, Scores, mean_scores

__all__ = ["NAMES", "Evaluation", "FactScores", "Report", "Scores", "evaluate", "mean_scores"]
