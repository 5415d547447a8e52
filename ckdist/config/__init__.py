"""What the commands can be told: one frozen dataclass per command, the single source of flags, defaults, ranges and
help.

A field carries its flags, help and range in `field(metadata=...)`, written by `option`; `ckdist.cli.arguments` turns
fields into a command line and back. Ranges are checked when a configuration is made, so Python callers get the same
errors. Nothing here looks at the machine or at a model. Flags are named as in llama-server and llama-bench where the
meaning is the same.
"""

from ckdist.config.bench import (
    BenchConfig,
)
from ckdist.config.commands import (
    CompletionCommand,
    DoctorConfig,
    ExportCommand,
    ListCommand,
    PullCommand,
    TrainCommand,
)
from ckdist.config.engine import (
    CACHE_TYPES,
    MODEL_HELP,
    NAMES_HELP,
    QUANTIZE_TYPES,
    EngineConfig,
)
from ckdist.config.launch import (
    LaunchCommand,
)
from ckdist.config.options import (
    BYTE_UNITS,
    byte_size,
    check_field,
    escaped,
    integer,
    integer_list,
    integer_or_auto,
    option,
    present_names,
    real,
)
from ckdist.config.perplexity import (
    PerplexityConfig,
)
from ckdist.config.plan import (
    PlanConfig,
)
from ckdist.config.sampling import (
    DRY_BREAKERS,
    SAMPLERS,
    ChatConfig,
    GenerateConfig,
    SamplingConfig,
    sampler_list,
)
from ckdist.config.serve import (
    ServeConfig,
)
from ckdist.config.simulate import (
    SimulateConfig,
)

__all__ = [
    "BYTE_UNITS",
    "CACHE_TYPES",
    "DRY_BREAKERS",
    "MODEL_HELP",
    "NAMES_HELP",
    "QUANTIZE_TYPES",
    "SAMPLERS",
    "BenchConfig",
    "ChatConfig",
    "CompletionCommand",
    "DoctorConfig",
    "EngineConfig",
    "ExportCommand",
    "GenerateConfig",
    "LaunchCommand",
    "ListCommand",
    "PerplexityConfig",
    "PlanConfig",
    "PullCommand",
    "SamplingConfig",
    "ServeConfig",
    "SimulateConfig",
    "TrainCommand",
    "byte_size",
    "check_field",
    "escaped",
    "integer",
    "integer_list",
    "integer_or_auto",
    "option",
    "present_names",
    "real",
    "sampler_list",
]
