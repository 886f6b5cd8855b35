"""Write the generated tables into the README: `make table`."""

import re
from pathlib import Path

from lengthwise.encodings.catalogue import table

README = Path(__file__).parents[1] / "README.md"


def filled(text: str, name: str, content: str) -> str:
    """The text with what stands between <!-- name --> and <!-- /name --> replaced."""
    return re.sub(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", rf"\g<1>{content}\n\g<2>", text, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(), "encodings", table()))
