"""One batch on one rank."""
