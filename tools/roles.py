"""Show roles of docstrings, as in ``:func:`patch_model```, as plain code in the site's reference."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):(?=`)")


class Roles(griffe.Extension):
    """What MkDocs reads docstrings through."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Leave a role's code, and take away its name."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub("", obj.docstring.value)
