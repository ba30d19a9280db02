"""What mkdocs does to a page before it is rendered: labels of code blocks are for the tests, and go."""

import re


def on_page_markdown(markdown, **_):
    """Return a page whose blocks ```python LABEL begin with ```python alone, which is all that mkdocs knows."""
    return re.sub(r"^```python [^\n]*$", "```python", markdown, flags=re.MULTILINE)
