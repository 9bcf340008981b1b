"""Names of other libraries over our own operations."""
