"""How good a student is, and how that is told."""
