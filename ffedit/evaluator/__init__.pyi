from . import formulas as formulas
from .drift import GenericText as GenericText
from .evaluate import Evaluation as Evaluation, reference_weights as reference_weights
from .explain import Explanation as Explanation, WrongAnswer as WrongAnswer
from .metrics import METRICS as METRICS, Metric as Metric, Responses as Responses, metric as metric
from .prompts import Questions as Questions, questions as questions
from .report import Report as Report
from .scores import (
    NAMES as NAMES,
    FactScores as FactScores,
    LeftOut as LeftOut,
    Scores as Scores,
    headline_scores as headline_scores,
    left_out as left_out,
    mean_scores as mean_scores,
)
from .verdict import Verdict as Verdict
