"""Machine code of sm_90 that reads a uniform register which nothing has written.

ptxas 12.8, which Triton 3.6 and 3.7 bring, makes such code where a product of warp groups takes an operand of 16 or 32
columns in several steps: the address of a step is computed from a register that holds something else, if anything. On
an H100 results were wrong, or a launch read where it may not. Interpretation cannot see it; the machine code shows it.
"""

import re
from collections.abc import Iterator

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;")
WRITES = re.compile(r"(U(?!TMA|BLK)|S2UR|R2UR|VOTEU|REDUX)")
"""Names of instructions that write to a uniform register."""


def unwritten(code: str) -> list[str]:
    """Return the instructions that read a uniform register which none before them writes.

    Args:
        code: A kernel as ``nvdisasm -c`` prints it. Instructions count in the order in which they stand.
    """
    written: set[int] = set()
    found = []
    for operation, operands in _instructions(code):
        target = re.match(r"UR(\d+)$", operands[0]) if WRITES.match(operation) else None
        pairs = ".64" in operation and target is not None
        reads = [number for operand in operands[bool(target) :] for number in _read(operand, operands, pairs=pairs)]
        if not written.issuperset(reads):
            if target and operation == "UMOV":
                # A copy of what is not there yet, as before a loop's first turn, does no harm until it is used.
                written.discard(int(target[1]))
                continue
            found.append(f"{operation} {', '.join(operands)}")
        if target:
            # A wide product is a pair of two single factors.
            written.update(range(int(target[1]), int(target[1]) + 1 + (pairs or "WIDE" in operation)))
    return found


def _instructions(code: str) -> Iterator[tuple[str, list[str]]]:
    for line in code.splitlines():
        instruction = INSTRUCTION.match(line)
        if instruction:
            # Commas within brackets are part of an operand.
            yield instruction[1], [x.strip() for x in re.split(r",(?![^\[]*\])", instruction[2])]


def _read(operand: str, operands: list[str], *, pairs: bool) -> Iterator[int]:
    """Yield the uniform registers that an operand reads."""
    numbers = [int(x) for x in re.findall(r"\bUR(\d+)\b", operand)]
    if numbers and operand.startswith("gdesc["):
        # Of four registers the first two describe the left operand, unless that is in registers of its own.
        first = numbers[0] + 2 * bool(re.match(r"R\d+", operands[1]))
        yield from range(first, numbers[0] + 4)
    elif numbers and "desc[" in operand:
        yield from (numbers[0], numbers[0] + 1, *numbers[1:])
    else:
        for number in numbers:
            yield from range(number, number + 1 + pairs)
