"""What the server tells about its packed cache."""
from typing import Any
def describe(backend: Any) -> dict[str, Any]:
    return {"pool": "packed"}
