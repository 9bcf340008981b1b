"""The whole model's state from the ranks' parts, and back."""
