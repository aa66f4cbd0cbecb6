"""Every setting of a run with its help text and bounds, and the recipe files that set them."""

from common.config.model_task import ModelConfig, TaskConfig, WarmupConfig
from common.config.objective_learner import (
    AGGREGATIONS,
    BASELINES,
    CORRECTIONS,
    GrpoConfig,
    LearnerConfig,
)
from common.config.rollout_mismatch import MismatchConfig, RolloutConfig
from common.config.run import Config

__all__ = [
    "AGGREGATIONS",
    "BASELINES",
    "CORRECTIONS",
    "Config",
    "GrpoConfig",
    "LearnerConfig",
    "MismatchConfig",
    "ModelConfig",
    "RolloutConfig",
    "TaskConfig",
    "WarmupConfig",
]
