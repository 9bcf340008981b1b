"""What is agreed on, or refused, before anything starts."""
