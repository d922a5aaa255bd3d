"""Contexts longer than one device: texts split over ranks, which exchange states in place of keys."""

from hf_linear_attn.parallel.context import ContextParallel, context_parallel, whole_texts
from hf_linear_attn.parallel.cost import Sent, bytes_sent
from hf_linear_attn.parallel.ranks import Processes, Ranks

__all__ = ["ContextParallel", "Processes", "Ranks", "Sent", "bytes_sent", "context_parallel", "whole_texts"]
