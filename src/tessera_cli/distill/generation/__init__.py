"""What teacher and student write for training, in the serving engine."""
