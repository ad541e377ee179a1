"""The teacher's side of the loss on disk: written once, read in every later run."""
