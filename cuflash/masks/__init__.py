"""Block masks: how they are made, kept and prepared on a GPU."""
