"""What is saved beside the weights of a patched model, so that others can load the folder."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto

CODE_FILE = "modeling_linear_attention.py"
"""Written beside the weights, so that Auto classes can load the folder with ``trust_remote_code=True``."""

CODE = '''\
"""Load this folder through Transformers' Auto classes; needs `pip install hf_linear_attn`."""

import transformers

from hf_linear_attn.patching.checkpoint import linear_attention_class

'''

PREFIX = "LinearAttention"
"""Put before the class's name in a folder's config: what looks for that class in Transformers, to load the folder as a
softmax model, does not find it."""

LESS_TELLING = ("AutoModelForMaskedLM", "AutoModelForPreTraining")
"""Auto classes that encoder-decoders are registered for, too."""

GENERATED = "This model card has been automatically generated."
"""What Transformers writes into the card of a repository that has none."""

CARD = """\
---
library_name: transformers
tags:
- linear-attention
- hf_linear_attn
---

# {name} with linear attention

A softmax model whose attention layers were converted by hf_linear_attn: time grows linearly with the context, and the
generation state has a constant size. Without that package the folder loads as a softmax model again, with a report of
unexpected weights, and its answers are worthless. Load it so:

```python
from hf_linear_attn import from_pretrained

model = from_pretrained("this/folder")
```

or with `{auto}.from_pretrained("this/folder", trust_remote_code=True)`.

## How it was converted

```json
{settings}
```
"""


def register_names_in_files(name: str) -> None:
    """Let what looks by a converted class's name find what tensors of its softmax kin are called in files."""
    in_files = get_checkpoint_conversion_mapping(name)  # type: ignore[no-untyped-call]
    if in_files is not None:
        register_checkpoint_conversion_mapping(PREFIX + name, in_files, overwrite=True)


def write_companions(config: PreTrainedConfig, name: str, folder: Path) -> None:
    """Write the code file, and a model card where there is none, and name the classes in the config's ``auto_map``."""
    folder.mkdir(parents=True, exist_ok=True)
    autos = auto_classes(config, name)
    config.auto_map = {auto: f"{Path(CODE_FILE).stem}.{loaded}" for auto, loaded in autos.items()}
    classes = "".join(f"{x} = linear_attention_class(transformers.{x})\n" for x in sorted({*autos.values()}))
    (folder / CODE_FILE).write_text(CODE + classes)
    if not (folder / "README.md").exists():
        (folder / "README.md").write_text(card(config, name))


def card(config: PreTrainedConfig, name: str) -> str:
    """Return the model card of a folder, of the softmax model's class of that name."""
    settings = json.dumps(config.linear_attention, indent=2, sort_keys=True)
    auto = next((auto for auto, loaded in auto_classes(config, name).items() if loaded == name), "AutoModel")
    return CARD.format(name=name, auto=auto, settings=settings)


def replace_generated_card(config: PreTrainedConfig, name: str, folder: Path) -> None:
    """Write our card over one that Transformers made up for an upload, with its tags; one of a person stays."""
    path = folder / "README.md"
    if not path.exists() or GENERATED not in path.read_text():
        return
    ours: Any = ModelCard(card(config, name))
    theirs: Any = ModelCard.load(path)
    ours.data.tags = [*dict.fromkeys([*ours.data.tags, *(theirs.data.tags or ())])]
    ours.save(path)


def auto_classes(config: PreTrainedConfig, name: str) -> dict[str, str]:
    """Return every Auto class that loads a config, and the name of the class that it loads: ``name`` where it can.

    Those that load the class of that name come first, the most telling ones before the others.
    """
    found: dict[str, str] = {}
    for auto in modeling_auto.__all__:
        names = [cls.__name__ for cls in _registered(auto, config) if takes(cls, config)]
        if names:
            found[auto] = name if name in names else names[0]
    order = sorted(found, key=lambda auto: (found[auto] != name, auto in LESS_TELLING))
    return {auto: found[auto] for auto in order}


def takes(cls: type, config: PreTrainedConfig) -> bool:
    """Return whether a model's class is built of a config: of its own kind, or of one that it is registered for.

    InternLM3 is a config without a class of its own: Llama's are registered for it. A class of a part, like a
    multimodal model's decoder, is registered for the whole, and takes the part's config.
    """
    own = getattr(cls, "config_class", None)
    if own is None or isinstance(config, own):
        return own is not None
    registered = any(cls in _registered(auto, config) for auto in modeling_auto.__all__)
    return registered and own not in _parts(type(config))


def _registered(auto: str, config: PreTrainedConfig) -> tuple[Any, ...]:
    """Return the classes that an Auto class's mapping, if it has one, names for a config."""
    mapping: Any = getattr(getattr(modeling_auto, auto), "_model_mapping", None)
    classes = None if mapping is None else mapping.get(type(config), None)
    return tuple(classes) if isinstance(classes, (list, tuple)) else (classes,)


def _parts(config: type[PreTrainedConfig]) -> set[type]:
    """Return the classes of a config's parts, and of theirs."""
    found: set[type] = set()
    for part in config.sub_configs.values():
        found |= {part} | _parts(part)
    return found
