"""The model that all request models derive from."""

from __future__ import annotations

from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import CoreSchema


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _whole_list(value: Any) -> Any:
    """A list, or a list of lists as prompts are, with whole-numbered floats converted to ints."""
    if type(value) is not list or not value:
        return value
    kinds = set(map(type, value))
    if list in kinds:
        return [_whole_list(item) for item in value]
    return [_whole(item) for item in value] if float in kinds else value


class ApiModel(BaseModel):
    """Types are taken as they are: "1" is not a number and 1 is not text; but 1.0 is 1, as JSON Schema has it."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @classmethod
    def add_rules(cls, schema: dict[str, Any]) -> None:
        """Writes into the JSON schema what `check` refuses and no field's type tells."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        cls.add_rules(handler.resolve_ref_schema(schema))
        return schema

    @field_validator("*", mode="wrap")
    @classmethod
    def _whole_numbers(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Floats go to fields of floats, too; a list is looked through only where it has some."""
        if type(value) is float:
            try:
                return handler(value)
            except ValidationError:
                return handler(_whole(value))
        return handler(_whole_list(value))
