"""The page about tiers has every reason for which a text is no plan, and its example blocks run in the tiers that it names."""

from __future__ import annotations

import re

import pytest
import torch

from executor.plan.eligible import regions
from executor.plan.explain import Explanation, explain_region
from executor.plan.refuse import Refused
from tests.unit.executor.plan.bench import Request, context, unit
from tests.unit.executor.plan.test_cases import names
from tests.unit.executor.plan.tiers_page import PAGE, page_with, table

EXAMPLE = re.compile(r"^```python\n# (plan|block)(?:, line (\d+))?: [^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = EXAMPLE.findall(PAGE.read_text())


def test_the_table_has_the_reasons_of_the_code() -> None:
    page = PAGE.read_text()
    assert page_with(table(), page) == page, "run python -m tests.unit.executor.plan.tiers_page"


def explained(text: str) -> Explanation:
    request = Request(text, names(0) | {"torch": torch, "kept": []}, 0)
    try:
        [region] = regions(unit(text))
    except Refused as refused:
        return Explanation(0, "block", at=refused.line)
    request.begin()
    return explain_region(region, request.names, frozenset(), 1, context())


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_is_what_the_page_says(number: int) -> None:
    tier, line, text = EXAMPLES[number]
    found = explained(text.replace("model.model.", "model."))
    assert (found.tier, found.at) == (tier, int(line or 0) - 1 if line else 0), found


def test_there_are_examples() -> None:
    assert {tier for tier, _, _ in EXAMPLES} == {"plan", "block"}
