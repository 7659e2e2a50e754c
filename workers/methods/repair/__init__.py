"""Repair: a closed-form fit of what an edit keeps, so that layers give what the unedited model's gave."""
