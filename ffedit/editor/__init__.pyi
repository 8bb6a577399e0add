from .combine import combine as combine
from .config import (
    EditConfig as EditConfig,
    KeyConfig as KeyConfig,
    PromptConfig as PromptConfig,
    ValueConfig as ValueConfig,
)
from .edit import Edit as Edit, applied_edits as applied_edits
from .key import PromptSet as PromptSet, build_prompts as build_prompts, read_keys as read_keys
from .methods import (
    METHODS as METHODS,
    Method as Method,
    check_method as check_method,
    config_from_dict as config_from_dict,
    preset as preset,
    preset_names as preset_names,
    set_number as set_number,
    set_numbers as set_numbers,
)
from .solve import Problem as Problem, in_reach as in_reach, write as write
from .statistics import (
    collect as collect,
    load_stats as load_stats,
    merge_stats as merge_stats,
    save_stats as save_stats,
)
from .value import Value as Value, choose_values as choose_values
