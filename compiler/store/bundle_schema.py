"""The schema of bundle.json; the manifests in it are checked by the manifest schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from llmc.manifest_schema import Closed, Components, Count, Hash, Open, Text, WeightFormat

MAX_TABLES_BYTES = 1 << 28
MAX_CODE_BYTES = 1 << 30

_Dim = Annotated[int, Field(ge=1, le=1 << 32)]
_TableName = Annotated[str, Field(pattern=r"^costs/[0-9a-f]{16}-[0-9a-f]{16}\.json\z")]


class Request(Closed):
    """A weight: its logical shape and storage."""

    name: Text
    shape: Annotated[list[_Dim], Field(min_length=1, max_length=4)]
    dtype: Literal["f32", "bf16", "f16", "u8"]
    packed: bool
    format: WeightFormat | None
    parts: Literal[1, 2]
    columns: Annotated[int, Field(ge=0, le=1 << 20)] = 0

    @model_validator(mode="after")
    def _can_be_packed(self) -> Request:
        if self.packed and (len(self.shape) != 2 or self.shape[0] % self.parts):
            raise ValueError(f"shape {self.shape}, which cannot be packed in {self.parts} parts")
        if (self.format is not None) != (self.dtype == "u8") or (self.dtype == "u8" and not self.packed):
            raise ValueError(f"dtype {self.dtype}, which its format does not fit")
        return self


class Sums(Closed):
    tables: Hash = Field(alias="graphs.bin")
    code: Hash = Field(alias="kernels.so")


class Sizes(Closed):
    tables: Annotated[int, Field(ge=1, le=MAX_TABLES_BYTES, alias="graphs.bin")]
    code: Annotated[int, Field(ge=1, le=MAX_CODE_BYTES, alias="kernels.so")]


class Variant(Closed):
    manifest: dict[str, Any]
    requests: Annotated[list[Request], Field(min_length=1, max_length=1 << 20)]
    sha256: Sums
    bytes: Sizes


class Architecture(Open):
    """The displayed part of a model's architecture; all of it is compared with a checkpoint's."""

    model_type: Text
    num_layers: Count
    hidden_size: Count
    vocab_size: Count


class Index(Open):
    llmc_bundle: Literal[1]
    llmc_version: Text
    fingerprint: Hash
    architecture: Annotated[Components, Field(min_length=1)]
    variants: Annotated[list[Variant], Field(min_length=1, max_length=64)]
    costs: Annotated[list[_TableName], Field(max_length=1024)]
