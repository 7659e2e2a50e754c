"""Generated demo tasks: text tasks over a small invented world, with the prompts that the demo model was trained on."""

from demo.files import SPLIT_SIZES, SPLITS, generate, split_of, write_demo_tasks
from demo.prompts import CHOICES, TEMPLATES, render
from demo.tasks import TASKS
from demo.vocabulary import all_words
from demo.world import WORLD_SEED, World

__all__ = [
    "CHOICES",
    "SPLITS",
    "SPLIT_SIZES",
    "TASKS",
    "TEMPLATES",
    "WORLD_SEED",
    "World",
    "all_words",
    "generate",
    "render",
    "split_of",
    "write_demo_tasks",
]
