"""The Python examples of a page, with what they need."""

from __future__ import annotations

import re

BLOCK = re.compile(r"(?:<!-- (?P<need>\w+) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
