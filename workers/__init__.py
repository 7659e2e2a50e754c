"""Workers: they load models, apply edits, score and export them."""
