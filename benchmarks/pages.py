"""Parts of a page that a benchmark writes: what stands between two marks."""

from __future__ import annotations

END = "<!-- end of table -->"


def between(page: str, begin: str, body: str) -> str:
    """Return a page with another body between a mark and `END`.

    Args:
        page: the page's text.
        begin: the mark before the body.
        body: what is to stand there.

    Raises:
        ValueError: the page does not have both marks.
    """
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"the page has no lines {begin!r} and {END!r}")
    return f"{before}{begin}\n\n{body}\n\n{END}{after}"
