"""What the strategy does to a user's loaders."""
