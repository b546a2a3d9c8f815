"""Schema: the messages of a proto file, built from a table: without a generated module, or a
compiler.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from maskdial.rpc.calls import CallError

_KINDS = descriptor_pb2.FieldDescriptorProto

Fields = Mapping[str, tuple[int, str]]
"""Number and type of each field by name: with a star if it is repeated, with a question mark if a
message says whether it has it."""


class Schema:
    """Messages of one package.

    Nested messages and maps stand beside the others; on the wire they are the same.

    Args:
        package: their package.
        messages: the fields of each.
        alternatives: names of the choice between a message's fields, where they exclude each other.
        enumerations: the names of the numbers from 0 on, of those that have any.

    Attributes:
        file: what a compiler would make of the proto file, without its services.
    """

    def __init__(
        self,
        package: str,
        messages: Mapping[str, Fields],
        alternatives: Mapping[str, str] | None = None,
        enumerations: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        file = self.file = descriptor_pb2.FileDescriptorProto(
            name=f"maskdial/{package}.proto", package=package, syntax="proto3"
        )
        for name, values in (enumerations or {}).items():
            counted = file.enum_type.add(name=name)
            for number, value in enumerate(values):
                counted.value.add(name=value, number=number)
        own = {**messages, **(enumerations or {})}
        for name, fields in messages.items():
            described = file.message_type.add(name=name)
            choice = (alternatives or {}).get(name)
            if choice is not None:
                described.oneof_decl.add(name=choice)
            for field_name, (number, kind) in fields.items():
                field = described.field.add(name=field_name, number=number)
                _describe(field, kind, package if kind.lstrip("*?") in own else None)
                if kind.lstrip("*?") in (enumerations or {}):
                    field.type = _KINDS.TYPE_ENUM
                if choice is not None:
                    field.oneof_index = 0
                elif kind[0] == "?":  # which proto3 writes as a choice of one
                    field.proto3_optional = True
                    field.oneof_index = len(described.oneof_decl)
                    described.oneof_decl.add(name=f"_{field_name}")
        pool = descriptor_pool.DescriptorPool()  # of its own: others may register the same names
        pool.Add(file)
        self._classes = {
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
            for name in messages
        }

    def message(self, name: str) -> Any:
        """The class of a message."""
        return self._classes[name]

    def read(self, content: bytes, name: str) -> Any:
        """A message of a kind.

        Raises:
            CallError: it is none.
        """
        try:
            return self.message(name).FromString(content)
        except Exception as error:  # protobuf's own class moves between its versions
            raise CallError(400, f"the message is no {name}: it cannot be decoded") from error


def _describe(field: Any, kind: str, package: str | None) -> None:
    """The type of a field; with a package, that of one of its messages."""
    field.label = _KINDS.LABEL_REPEATED if kind[0] == "*" else _KINDS.LABEL_OPTIONAL
    if package is not None:
        field.type = _KINDS.TYPE_MESSAGE
        field.type_name = f".{package}.{kind.lstrip('*?')}"
    else:
        field.type = _KINDS.Type.Value(f"TYPE_{kind.lstrip('*?').upper()}")
