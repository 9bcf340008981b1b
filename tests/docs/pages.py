"""The Python examples of the documentation, and how they run in one process.

<!-- test -->                       the block that follows is run, after those before it on its page
<!-- test: needs transformers -->   as above, where the package is installed
```python
```
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PAGES = (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md")))

_BLOCK = re.compile(
    r"(?:^<!-- test(?:: needs (?P<needs>\w+))?(?P<end>) -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S
)
_SIZE = re.compile(r"\b(devices|num_nodes|\w+_parallel_size|virtual_pipeline_size)=\d+")


@dataclass(frozen=True, slots=True)
class Example:
    """A block of Python on a page.

    line: where it begins. runs: whether it is marked to be run. needs: a package that it needs besides.
    """

    code: str
    line: int
    runs: bool
    needs: str | None

    def for_one_process(self) -> str:
        """The code with sizes of 1, lines numbered as on the page."""
        return "\n" * (self.line - 1) + _SIZE.sub(r"\1=1", self.code)


def examples(page: Path) -> Iterator[Example]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        yield Example(found["code"], line, found["end"] is not None, found["needs"])
