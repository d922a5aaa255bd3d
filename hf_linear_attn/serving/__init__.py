"""Converted models in servers of others."""
