"""Callbacks of our own, and what users' callbacks need."""
