"""slidedp: full-parameter fine-tuning on one machine whose devices share one copy of the states."""

from slidedp._slidedp import __version__
from slidedp.arguments import TrainingArguments
from slidedp.trainer import StepResult, Trainer

__all__ = ["StepResult", "Trainer", "TrainingArguments", "__version__"]
