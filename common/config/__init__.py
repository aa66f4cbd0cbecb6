"""Every setting of a run with its help text and bounds, and the recipe files that set them."""

from common.config.settings import (
    AGGREGATIONS,
    Config,
    GrpoConfig,
    LearnerConfig,
    MismatchConfig,
    ModelConfig,
    RolloutConfig,
    TaskConfig,
    WarmupConfig,
)

__all__ = [
    "AGGREGATIONS",
    "Config",
    "GrpoConfig",
    "LearnerConfig",
    "MismatchConfig",
    "ModelConfig",
    "RolloutConfig",
    "TaskConfig",
    "WarmupConfig",
]
