"""``transformers serve`` for a converted folder: ``python -m hf_linear_attn.serving.transformers FOLDER [options]``.

That server looks in Transformers for the class that a folder names. Here the class of the folder is put there first, so
that nothing in the folder has to run. Everything else is Transformers' own; it needs ``transformers[serving]``.
"""

import sys
from collections.abc import Sequence

from transformers import AutoConfig

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError, BackendError, CheckpointError
from hf_linear_attn.folder import check_folder
from hf_linear_attn.patching.checkpoint import class_of
from hf_linear_attn.patching.convert import linear_attention_class
from hf_linear_attn.shell import shell

PROGRAM = "hf_linear_attn.serving.transformers"


def offer(folder: str) -> None:
    """Put the class that a converted folder names into Transformers, in this process.

    Raises:
        CheckpointError: If the folder holds no converted model, or one of a newer version.
    """
    settings = check_folder(folder, "folder").get("linear_attention")
    if settings is None:
        raise CheckpointError(
            "folder", "hold a converted model", folder, "Serve a softmax model with `transformers serve` itself."
        )
    LinearAttentionConfig.from_dict(settings)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    cls = linear_attention_class(class_of(config))
    # Some releases put another object in the place of Transformers when a class is first asked for.
    setattr(sys.modules["transformers"], config.architectures[0], cls)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a folder; arguments are the folder and those of ``transformers serve``."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with shell(f"python -m {PROGRAM}"):
        if not argv or argv[0].startswith("-"):
            raise ArgumentError("folder", "be named first", argv[:1], "Its options are those of `transformers serve`.")
        # Before the server is imported, for it keeps what it then finds in the place of Transformers.
        offer(argv[0])
        try:
            import fastapi  # noqa: F401
            from transformers.cli.transformers import app
        except ImportError as error:
            raise BackendError(
                "environment", "have what `transformers serve` needs", str(error), "pip install transformers[serving]."
            ) from error
    app(["serve", *argv])


if __name__ == "__main__":
    main()
