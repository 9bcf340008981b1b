"""A user's step: run, its logs merged, its result known on every rank."""
