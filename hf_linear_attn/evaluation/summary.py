"""What the figures say, in sentences."""

from hf_linear_attn.evaluation.suite import suites
from hf_linear_attn.evaluation.view import Results

KNOWN_EXTRAS = {
    "linear_branch_off_nats": "Switching the linear branch off costs {value:.3g} nats per token beyond the window.",
}


def summarise(results: Results) -> dict[str, list[str]]:
    """Return the sentences of a report: `quality`, and `speed` for whatever depends on a clock."""
    quality = [sentence for suite in suites() for sentence in suite.quality(results)]
    speed = [sentence for suite in suites() for sentence in suite.speed(results)]
    return {"quality": [*quality, *_extras(results)], "speed": speed}


def _extras(results: Results) -> list[str]:
    found = []
    for name, value in results["extras"].items():
        if name in KNOWN_EXTRAS and isinstance(value, int | float):
            found.append(KNOWN_EXTRAS[name].format(value=value))
        elif name.startswith("note "):
            found.append(str(value))
    return found
