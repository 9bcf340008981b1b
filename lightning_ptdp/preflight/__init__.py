"""Before anything starts: ranks agree on what they run, and refuse together what cannot be run."""
