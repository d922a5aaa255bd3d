"""Long-context evaluation: retrieval tasks, perplexity, latency and the reports written from them."""

from hf_linear_attn.evaluation import suites as _suites  # noqa: F401, registers them
from hf_linear_attn.evaluation.report import write_report
from hf_linear_attn.evaluation.results import read_results, schema, without_times
from hf_linear_attn.evaluation.run import check_evaluation, compare, estimate_cost, evaluate
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.evaluation.suite import Suite, register_suite

__all__ = [
    "EvaluationSettings",
    "Suite",
    "check_evaluation",
    "compare",
    "estimate_cost",
    "evaluate",
    "read_results",
    "register_suite",
    "schema",
    "without_times",
    "write_report",
]
