"""How a student gets its shape and its first weights."""
