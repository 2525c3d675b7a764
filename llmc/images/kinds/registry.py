"""All kinds of images."""

from __future__ import annotations

from llmc.images.form import ImageForm, ImageFormError
from llmc.images.kinds.idefics3 import Idefics3
from llmc.images.kinds.kind import Kind
from llmc.images.kinds.pixtral import Pixtral
from llmc.images.kinds.qwen import Qwen
from llmc.shown import shown

_ALL: tuple[type[Kind], ...] = (Idefics3, Pixtral, Qwen)
KINDS: dict[str, type[Kind]] = {kind.NAME: kind for kind in _ALL}
"""By name."""
BY_MODEL_TYPE: dict[str, type[Kind]] = {model_type: kind for kind in _ALL for model_type in kind.MODEL_TYPES}
"""By config.json's model_type."""


def kind_of(form: ImageForm) -> Kind:
    """The kind of a form. Raises ImageFormError for one that this llmc does not know."""
    if form.kind not in KINDS:
        raise ImageFormError(f"images of the kind {shown(form.kind)} are of a newer llmc: update this one")
    return KINDS[form.kind](form)
