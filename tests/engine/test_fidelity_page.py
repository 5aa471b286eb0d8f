"""What the page of measured fidelity accepts: a value that is near enough or a refusal, the same under all conditions."""

from __future__ import annotations

import json

import pytest

from tests.fidelity.measure import PHASES, Cells, conditions
from tests.fidelity.recorded import RECORDED, section, summary, written_on
from tests.fidelity.table import KEPT, Measured, differences, page, render, verdict

FAR = "decode, 8 concurrent, chunked, prefix cache"


def row(value: float | str, **others: float | str) -> dict[str, float | str]:
    """The same under every condition, but for FAR."""
    return dict.fromkeys(conditions(), value) | ({FAR: others["far"]} if others else {})


def measured(value: float = 5e-6, refusal: str = "MODULE is not called") -> Measured:
    cells: Cells = {
        "embed.output": row(0.0),
        "blocks[i].resid_pre": row(value),
        "changed: blocks[i].resid_pre": dict.fromkeys(PHASES, value),
        "raw: model.norm.output": row(value),
        "raw: model.lm_head.output": row(refusal),
    }
    fewer = {name: cells[name] for name in list(cells)[:4]}
    return {ranks: {"llama": dict(cells), "gpt2": dict(fewer)} for ranks in (1, 2)}


def test_a_cell_is_an_error_or_a_refusal_under_all_conditions() -> None:
    assert verdict(row(1e-6, far=3e-6), "decode") == 3e-6
    assert verdict(row(1e-6, far=3e-6), "prefill") == 1e-6
    assert verdict(row("no"), "decode") == "no"
    assert verdict(None, "decode") is None


@pytest.mark.parametrize("far", [2e-4, "refused here only"])
def test_one_condition_that_differs_is_no_verdict(far: float | str) -> None:
    with pytest.raises(AssertionError):
        verdict(row(1e-6, far=far), "decode")


def test_a_condition_that_was_not_measured_is_no_verdict() -> None:
    missing = row(1e-6)
    del missing[FAR]
    with pytest.raises(AssertionError):
        verdict(missing, "prefill")


def test_the_page_has_every_location_condition_and_message() -> None:
    page = render(measured())
    assert (
        page.count("| `blocks[i].resid_pre` | 1e-5 | 1e-5 |") == 6
    )  # two phases and the change, with one rank and two
    assert all(
        f"{ranks}, {condition}" in page
        for ranks in ("one rank", "2 tensor-parallel ranks")
        for condition in conditions()
    )
    assert "| `model.norm.output` | 1e-5 | 1e-5 | 1e-5 | 1e-5 |" in page
    assert "| `model.lm_head.output` | R1 | R1 | R1 | R1 |" in page
    assert "- R1: MODULE is not called" in page


def test_a_page_agrees_with_smaller_and_little_larger_errors_only() -> None:
    page = render(measured())
    assert differences(page, render(measured(value=1e-7))) == []
    assert differences(page, render(measured(value=4e-5))) == []
    assert differences(render(measured(value=1e-7)), render(measured(value=4e-5))) != []
    assert differences(page, render(measured(refusal="another message"))) != []
    lost = measured()
    lost[2]["gpt2"]["changed: blocks[i].resid_pre"] = dict.fromkeys(PHASES, "no")
    assert differences(page, render(lost)) != []
    fewer = measured()
    del fewer[2]["llama"]["raw: model.norm.output"]
    assert differences(page, render(fewer)) != []


def test_what_is_written_by_hand_stays() -> None:
    begin, end = KEPT
    page = render(measured())
    assert page.endswith(f"{begin}\n{end}\n")
    by_hand = page.replace(begin, f"{begin}\n## On a GPU\n\nSome text.")
    again = render(measured(), by_hand)
    assert again == by_hand
    assert differences(by_hand, again) == []


def test_a_recorded_measurement_says_where_it_differs_from_the_page() -> None:
    page = render(measured())
    for ranks in (1, 2):
        written = written_on(page, ranks)["llama"]
        now = measured(value=3e-6)[ranks]["llama"]
        alike = summary(now, written)
        assert (alike["given"], alike["refused"], alike["largest"], alike["otherwise"]) == (6, 2, 3e-6, [])
        refused = summary({**now, "embed.output": row("no")}, written)
        assert refused["otherwise"] == ["embed.output in decode: no", "embed.output in prefill: no"]
        del now["blocks[i].resid_pre"]
        assert len(summary(now, written)["otherwise"]) == 2


def test_the_page_has_what_was_recorded_on_gpus() -> None:
    assert section() in page().read_text()
    assert all(f"| {run} |" in section() for run in json.loads(RECORDED.read_text()))
