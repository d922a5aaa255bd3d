"""What a command is to a shell: its exit status, and one line where it cannot go on."""

import errno
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hf_linear_attn.errors import HFLinearAttnError, TrainingError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
"""Exit statuses: what ran has failed; what was asked cannot be done; Ctrl-C."""

WITHOUT_OVERWRITE = "The same command without --overwrite goes on where it was."
"""What is said after Ctrl-C of a run that began anew."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@contextmanager
def shell(program: str, *, interrupted: str = "The same command goes on where it was.") -> Iterator[None]:
    """Run a command as a shell expects it: status 0, 1, 2 or 130, and one line for whatever is not a bug.

    Status 2 is for what a user can correct: an argument, or a file or folder that it names. Status 1 is for what failed
    while it ran; a bug has that status too, and keeps its traceback. Ctrl-C has 130.

    Args:
        program: Its name, which the line begins with.
        interrupted: What the line says after Ctrl-C, unless the ``KeyboardInterrupt`` itself says something.
    """
    try:
        yield
    except TrainingError as error:
        _end(program, str(error), FAILED, error)
    except HFLinearAttnError as error:
        _end(program, str(error), REFUSED, error)
    except KeyboardInterrupt as error:
        _end(program, f"stopped. {str(error) or interrupted}".strip(), INTERRUPTED, error)
    except BrokenPipeError as error:
        # The reader, such as `head`, has gone; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(FAILED) from error
    except OSError as error:
        if error.errno not in _FULL:
            raise
        then = f"; {interrupted[:1].lower()}{interrupted[1:]}" if interrupted else ", and run it again."
        _end(program, f"{error}. Make room{then}", FAILED, error)


def _end(program: str, message: str, status: int, error: BaseException) -> None:
    # Other libraries' messages, which ours may quote, have several lines; a progress bar leaves its own unfinished.
    start = "\n" if status == INTERRUPTED and sys.stderr.isatty() else ""
    sys.stderr.write(f"{start}{program}: {' '.join(message.split())}\n")
    raise SystemExit(status) from error


def command(*words: str) -> str:
    """Return a command of this package for copying: words that a shell would take apart are quoted."""
    return shlex.join(["hf-linear-attn", *words])


def next_step(text: str) -> None:
    """Say what to do next, on stderr: what a command prints on stdout is its result alone."""
    sys.stderr.write(f"Next: {text}\n")
