"""Order what the search of the site finds: short answers and guides before API and decisions."""

from typing import Any

BOOSTS = {"how-do-i.md": 4.0, "decisions/": 0.2, "performance.md": 0.2, "api/": 0.6}
"""How much a page counts, by how its path begins; 1 where none does."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Give a page its boost, a setting of the theme that pages have in their front matter."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
