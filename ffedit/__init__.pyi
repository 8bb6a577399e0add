from .algebra.key_moments import KeyMoments as KeyMoments
from .algebra.low_rank import LowRank as LowRank
from .api import collect_stats as collect_stats, edit as edit, load as load
from .benchmark import BenchReport as BenchReport, bench as bench
from .editor.combine import combine as combine
from .editor.config import (
    EditConfig as EditConfig,
    KeyConfig as KeyConfig,
    PromptConfig as PromptConfig,
    ValueConfig as ValueConfig,
)
from .editor.edit import Edit as Edit
from .editor.job import Job as Job, Method as Method, Problem as Problem
from .editor.methods import add_method as add_method
from .editor.statistics_files import load_stats as load_stats, save_stats as save_stats
from .errors import (
    CheckError as CheckError,
    EditError as EditError,
    FactError as FactError,
    FFEditError as FFEditError,
    ModelError as ModelError,
)
from .evaluator import (
    Explanation as Explanation,
    Questions as Questions,
    Report as Report,
    Responses as Responses,
    Scores as Scores,
    formulas as formulas,
    metric as metric,
)
from .evaluator.evaluate import evaluate as evaluate
from .evaluator.explain import explain as explain
from .exporter import Exported as Exported, export as export, undo as undo
from .exporter.diff import Diff as Diff, diff as diff
from .facts.fact import Fact as Fact, Probe as Probe
from .facts.reading import read_facts as read_facts, sift_facts as sift_facts
from .inference.corpus import Corpus as Corpus
from .inspector import (
    MemoryIndex as MemoryIndex,
    inspect_edit as inspect_edit,
    inspect_memory as inspect_memory,
    inspect_prompt as inspect_prompt,
)
from .layer_choice.calibrate import LayerChoice as LayerChoice, LayerScore as LayerScore, choose_layer as choose_layer
from .layer_choice.site_map import SiteMap as SiteMap, site_map as site_map
from .locator import Trace as Trace, TraceSet as TraceSet, locate as locate, locate_all as locate_all
from .model.editable import Editable as Editable
from .model.memory import Address as Address, KeyValueMemory as KeyValueMemory
from .version import __version__ as __version__
