"""Repair: a closed-form fit of the weights that an edit keeps to the outputs of the unedited model's layers."""
