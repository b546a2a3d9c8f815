"""What those who rewrite graphs share."""

from typing import Any

from onnx import NodeProto, helper

DOMAIN = "maskdial"
"""The domain of our operators."""


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """The values of a node's attributes by name."""
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}
