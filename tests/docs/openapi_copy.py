"""Owns the copy of the OpenAPI document: `python -m tests.docs.openapi_copy` writes docs/reference/openapi.json.

Must not need a server: the document does not depend on one.
"""

import json
from pathlib import Path

from services.api.access.tokens import TokenAccess
from services.api.app import create_app

COPY = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"


def current() -> str:
    """The document as text."""
    return json.dumps(create_app(None, TokenAccess({})).openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    COPY.write_text(current())
