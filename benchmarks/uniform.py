"""Machine code of sm_90 that computes an address from a uniform register which holds something else, if anything.

ptxas 12.8, which Triton 3.6 and 3.7 bring, makes such code where a product of warp groups takes an operand of 16 or 32
columns in several steps: the address of a step comes from a register that nothing has written, or from the one that
stands for the upper half of the sum, which is zero. On an H100 results were wrong, or a launch read where it may not.
Interpretation cannot see it; the machine code shows it.
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


def halved(code: str) -> list[str]:
    """Return the sums of 64 bits whose lower and upper half are those of the same uniform register.

    Args:
        code: A kernel as ``nvdisasm -c`` prints it; one that describes no operands may add what it likes.
    """
    lower: dict[str, str] = {}
    found: list[str] = []
    if "gdesc[" not in code:
        return found
    for operation, operands in _instructions(code):
        # UIADD3 UR26, UP0, UR7, 0x2, URZ and UIADD3.X UR27, UR7, -0x7fffffe0, URZ, UP0, !UPT: UP0 is what is carried.
        if operation == "UIADD3" and re.match(r"UP\d+$", operands[1]):
            lower[operands[1]] = operands[2]
        elif operation == "UIADD3.X" and lower.get(operands[4]) == operands[1] != "URZ":
            found.append(f"{operation} {', '.join(operands)}")
        if WRITES.match(operation):
            # What is written anew is no longer what the lower half was made of.
            lower = {carry: source for carry, source in lower.items() if source != operands[0]}
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
