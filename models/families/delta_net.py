"""Fields of gated delta nets in config.json."""

from __future__ import annotations

from llmc.models.delta_net import DeltaNet
from llmc.models.errors import ModelError
from llmc.models.families.layer_kinds import FULL, LINEAR, read_layer_types
from llmc.models.fields import Fields
from llmc.models.standard import layer_count, read_activation

PERIOD = 4
"""Where a config does not say: one of so many layers has attention."""
MOST_TAPS = 64
_SIZES = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}
"""Names and defaults, in the order of `DeltaNet`."""


def read_delta_net(fields: Fields) -> DeltaNet | None:
    """The layers of linear attention; None if every layer has full attention."""
    period = fields.integer("full_attention_interval", PERIOD)
    usual = [LINEAR if (i + 1) % period else FULL for i in range(layer_count(fields))]
    layers = tuple(i for i, kind in enumerate(read_layer_types(fields, usual)) if kind == LINEAR)
    if not layers:
        return None
    key_heads, value_heads, key_dim, value_dim, taps = (
        fields.integer(name, default) for name, default in _SIZES.values()
    )
    net = DeltaNet(layers, key_heads, value_heads, key_dim, value_dim, taps)
    if net.value_heads % net.key_heads:
        raise ModelError(
            f"{fields.origin}: linear_num_value_heads {net.value_heads} is not a multiple of linear_num_key_heads "
            f"{net.key_heads}"
        )
    if not 2 <= net.taps <= MOST_TAPS:
        raise ModelError(f"{fields.origin}: linear_conv_kernel_dim {net.taps} is not from 2 to {MOST_TAPS}")
    if (activation := read_activation(fields)) != "silu":
        raise ModelError(f"{fields.origin}: gated delta nets with the activation {activation} are not supported")
    return net
