from .answers import ask as ask
from .applying import apply as apply
from .benching import bench as bench
from .describe import doctor as doctor, methods as methods, show as show
from .inspecting import inspect_edit as inspect_edit, inspect_memory as inspect_memory, inspect_prompt as inspect_prompt
from .page import serve as serve
from .scoring import evaluate as evaluate
from .ship import diff as diff, export as export, undo as undo
from .statistics import stats as stats
from .tracing import locate as locate
from .trying import choose_layer as choose_layer
