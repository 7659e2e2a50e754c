"""Generated demo tasks, most of them computations over a passage, with the prompts that the demo models learnt."""
