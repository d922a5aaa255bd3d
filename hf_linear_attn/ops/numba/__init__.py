"""Loops on a CPU: what they are made of, and how they are called."""
