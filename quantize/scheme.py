"""The schemes of all formats, by exact name."""

from __future__ import annotations

from dataclasses import replace

from llmc.quantize.formats.base import WHOLE_ROW, QuantizeError, WeightFormat
from llmc.quantize.formats.registry import SCHEMES
from llmc.quantize.formats.scheme import Scheme


def get_scheme(name: str) -> Scheme:
    """The scheme called `name`. Raises QuantizeError naming the known ones."""
    if name not in SCHEMES:
        raise QuantizeError(f"quantization scheme {name!r} is unknown: use {', '.join(SCHEMES)}")
    return SCHEMES[name]


def stored_scheme(format: WeightFormat, *, int8_inputs: bool) -> Scheme:
    """The scheme for a weight that a checkpoint stores in `format`, named after the closest known scheme."""
    act_bits = 8 if int8_inputs else 16
    alike = [scheme for scheme in SCHEMES.values() if (scheme.weight.bits, scheme.act_bits) == (format.bits, act_bits)]
    if not alike:
        # No method rounds to this width: the name states the width, the rest is as for 8 bits.
        return replace(get_scheme(f"w8a{act_bits}"), name=f"w{format.bits}a{act_bits}", weight=format)
    own = [scheme for scheme in alike if scheme.weight.resembles(format)]
    return replace((own or alike)[0], weight=format)


def recorded_scheme(name: str, format: WeightFormat) -> Scheme:
    """The scheme `name` for a weight in `format`: a known scheme, or one that only stored weights have. Raises
    QuantizeError naming the known ones."""
    if name not in SCHEMES and (stored := stored_scheme(format, int8_inputs=False)).name == name:
        return stored
    return replace(get_scheme(name), weight=format)


def regrouped(name: str, group_size: int | None, asymmetric: bool | None) -> Scheme:
    """The scheme `name` with other groups; None keeps the current value. Raises QuantizeError."""
    scheme = get_scheme(name)
    if group_size is None and asymmetric is None:
        return scheme
    if not scheme.weight.is_regrouped:
        what = "--group-size" if group_size is not None else "--symmetric and --asymmetric"
        others = " or ".join(other.name for other in SCHEMES.values() if other.weight.is_regrouped)
        has = "one scale an output channel" if scheme.weight.group_size == WHOLE_ROW else scheme.weight.describe()
        raise QuantizeError(f"{what} cannot be combined with {name}, which has {has}; leave it out or use {others}")
    return scheme.with_weight(group_size, asymmetric)
