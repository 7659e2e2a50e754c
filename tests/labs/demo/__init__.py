"""Generated demo tasks, most of them computations over a passage, with the prompts that the demo models learnt."""

from demo.files import SPLIT_SIZES, SPLITS, generate, split_of, write_demo_tasks
from demo.prompts import CHOICES, TEMPLATE, render
from demo.tasks import TASKS
from demo.vocabulary import all_words

__all__ = [
    "CHOICES",
    "SPLITS",
    "SPLIT_SIZES",
    "TASKS",
    "TEMPLATE",
    "all_words",
    "generate",
    "render",
    "split_of",
    "write_demo_tasks",
]
