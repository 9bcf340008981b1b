"""Interfaces of other libraries, built on our own operations."""
