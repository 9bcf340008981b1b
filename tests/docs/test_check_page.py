"""What docs/check.md shows is what its example prints."""

import re

from tests.docs.pages import CHECKOUT


def test_example_prints_what_the_page_shows(capsys):
    page = (CHECKOUT / "docs" / "check.md").read_text(encoding="utf-8")
    (code, shown) = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    exec(compile(code, "docs/check.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == shown
