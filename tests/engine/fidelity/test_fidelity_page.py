"""What the page of measured fidelity accepts: a value that is near enough or a refusal, the same under all conditions."""

from __future__ import annotations

import json

import pytest

from benchmarks.layouts import Layout
from tests.fidelity.architectures import LIGHT
from tests.fidelity.changes import once
from tests.fidelity.layouts import LAYOUTS
from tests.fidelity.measure import COLUMNS, PHASES, SCHEDULINGS, START, Cells, conditions
from tests.fidelity.recorded import RECORDED, section, summary, written_on
from tests.fidelity.suite import columns_of, described, suite
from tests.fidelity.table import KEPT, Page, added, column, disagreements, page, parse, render, verdict

FAR = "decode, 8 concurrent, chunked, prefix cache"
LAYOUT, OTHER = Layout(1, 1), Layout(2, 2)


def row(value: float | str, **others: float | str) -> dict[str, float | str]:
    """The same under every condition, but for FAR."""
    return dict.fromkeys(conditions(), value) | ({FAR: others["far"]} if others else {})


def measured(value: float = 5e-6, refusal: str = "MODULE is not called") -> dict[str, Cells]:
    cells: Cells = {
        "embed.output": row(0.0),
        "blocks[i].resid_pre": row(value),
        "changed: blocks[i].resid_pre": dict.fromkeys(PHASES, value),
        "raw: model.norm.output": row(value),
        "raw: model.lm_head.output": row(refusal),
    }
    return {"llama": dict(cells), "gpt2": {name: cells[name] for name in list(cells)[:4]}}


def said(one: dict[str, Cells]) -> Page:
    """The same in two layouts."""
    return {layout: {name: column(cells) for name, cells in one.items()} for layout in (LAYOUT, OTHER)}


def write(one: dict[str, Cells]) -> str:
    return render(said(one), "- everything")


def test_a_cell_is_an_error_or_a_refusal_under_all_conditions() -> None:
    assert verdict(row(1e-6, far=3e-6), "decode") == "1e-5"
    assert verdict(row(1e-6, far=3e-6), "prefill") == "1e-6"
    assert verdict(row(0.0), "prefill") == "0"
    assert verdict(row("no"), "decode") == "no"


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
    written = write(measured())
    # Two phases and the change, in both layouts.
    assert written.count("| `blocks[i].resid_pre` | 1e-5 | 1e-5 |") == 6
    assert all(f"| {name}, {condition} |" in written for name in ("TP 1", "TP 2 × PP 2") for condition in conditions())
    assert "| `model.norm.output` | 1e-5 | 1e-5 | 1e-5 | 1e-5 |" in written
    assert "| `model.lm_head.output` | R1 | R1 | R1 | R1 |" in written
    assert "- R1: MODULE is not called" in written
    assert "| TP 1 | 5e-06, 6 and 2 | 5e-06, 6 and 0 |" in written


def test_a_page_is_read_as_it_was_written() -> None:
    assert parse(write(measured())) == said(measured())
    refused = {**measured(), "gpt2": {START: {"": "no such engine"}}}
    assert parse(write(refused)) == said(refused)
    assert "- R1: no such engine" in write(refused)


@pytest.mark.parametrize("recorded", [0.0, 1e-7, 5e-6, 1e-4])
@pytest.mark.parametrize("now", [0.0, 1e-7, 5e-6, 1e-4])
def test_any_error_that_is_called_supported_agrees_with_any_other(recorded: float, now: float) -> None:
    """On another processor the same location has an error of another order of magnitude."""
    assert disagreements(said(measured(value=recorded)), said(measured(value=now))) == []


def test_an_error_that_is_not_called_supported_agrees_with_none() -> None:
    written, now = said(measured(value=1e-4)), said(measured(value=1e-4))
    now[LAYOUT]["llama"].rows["blocks[i].resid_pre"]["decode"] = "1e-3"
    now[OTHER]["gpt2"].conditions[FAR] = "2e-04"
    assert disagreements(written, now) == [
        "TP 1, llama, blocks[i].resid_pre decode: '1e-4' was measured as '1e-3'",
        f"TP 2 × PP 2, gpt2, {FAR}: '1e-04' was measured as '2e-04'",
    ]


def test_a_page_disagrees_with_another_verdict() -> None:
    written = said(measured())
    assert disagreements(written, said(measured(refusal="another message"))) != []
    refused, lost = measured(), measured()
    refused["llama"]["raw: model.norm.output"] = row("no")
    lost["gpt2"]["changed: blocks[i].resid_pre"] = dict.fromkeys(PHASES, "no")
    for one in (refused, lost):
        assert disagreements(written, said(one)) != [], "was given, and is refused"
        assert disagreements(said(one), written) != [], "was refused, and is given"
    fewer, more = measured(), measured()
    del fewer["llama"]["raw: model.norm.output"]
    more["llama"]["raw: model.other.output"] = row(0.0)
    assert disagreements(written, said(fewer)) != []
    assert disagreements(written, said(more)) != []
    assert disagreements(written, said({"llama": {START: {"": "no such engine"}}})) != []
    assert disagreements({OTHER: written[OTHER]}, {LAYOUT: written[LAYOUT]}) != []


def test_a_part_is_compared_under_its_own_conditions() -> None:
    written = said(measured())
    turn = SCHEDULINGS[2:3]
    cells: Cells = {
        name: {
            condition: value
            for condition, value in found.items()
            if name.startswith("changed") or turn[0].name in condition
        }
        for name, found in measured()["llama"].items()
    }
    assert disagreements(written, {OTHER: {"llama": column(cells, turn)}}) == []
    cells["embed.output"] = dict.fromkeys(cells["embed.output"], "no")
    assert len(disagreements(written, {OTHER: {"llama": column(cells, turn)}})) == 2  # in both phases
    with pytest.raises(AssertionError):
        column(cells)


def test_the_suite_leaves_no_layout_architecture_or_condition_out() -> None:
    jobs = suite()
    assert [job.layout for job in jobs] == LAYOUTS
    whole, parts = jobs[:2], jobs[2:]
    assert [job.layout.name for job in whole] == ["TP 1", "TP 2"]
    assert [[len(job.columns[name]) for job in whole] for name in COLUMNS] == [[2, 1]] * len(COLUMNS)
    for name in COLUMNS:
        assert {turn for job in jobs for turn in job.columns.get(name, ())} == set(SCHEDULINGS)
        assert any(name in job.columns for job in parts)
    for job in jobs[:-1]:  # the last has one column
        assert {turn for name in COLUMNS for turn in job.columns.get(name, ())} == set(SCHEDULINGS)
    light = [turn for job in whole for name in LIGHT for turn in job.columns.get(name, ())]
    assert len(light) == len(LIGHT) and set(light) == set(SCHEDULINGS)
    assert {name for job in whole for name in job.columns} == {*COLUMNS, *LIGHT}


def test_the_page_has_all_layouts_and_architectures_and_nothing_else() -> None:
    written = page().read_text()
    found = parse(written)
    assert list(found) == LAYOUTS
    assert all(list(columns) == columns_of(layout) for layout, columns in found.items())
    assert all(
        one.refused or list(one.conditions) == conditions() for columns in found.values() for one in columns.values()
    )
    assert render(found, described(), written) == written


def test_each_value_is_changed_in_the_second_layer_or_in_the_last_that_has_it() -> None:
    paths = ["embed.output", *(f"blocks.{i}.resid_pre" for i in range(3)), "blocks.0.attn.q", "blocks.2.mlp.up"]
    assert once(paths) == {"embed.output", "blocks.1.resid_pre", "blocks.0.attn.q", "blocks.2.mlp.up"}


def test_further_rows_come_beside_what_was_said() -> None:
    before, further = (column(measured(value)["llama"]) for value in (5e-6, 2e-5))
    before.rows = {name: before.rows[name] for name in ("embed.output", "blocks[i].resid_pre")}
    further.rows = {"blocks[i].attn_in": further.rows["blocks[i].resid_pre"]}
    both = added(before, further)
    assert list(both.rows) == ["embed.output", "blocks[i].resid_pre", "blocks[i].attn_in"]
    assert set(both.conditions.values()) == {"2e-05"} and both.rows["blocks[i].resid_pre"]["prefill"] == "1e-5"


def test_what_is_written_by_hand_stays() -> None:
    begin, end = KEPT
    written = write(measured())
    assert written.endswith(f"{begin}\n{end}\n")
    by_hand = written.replace(begin, f"{begin}\n## On a GPU\n\nSome text.")
    assert render(said(measured()), "- everything", by_hand) == by_hand


def test_a_recorded_measurement_says_where_it_differs_from_the_page() -> None:
    both = {layout: said(measured())[LAYOUT] for layout in LAYOUTS[:2]}
    for layout in both:
        written = written_on(render(both, "- everything"), layout)["llama"]
        now = measured(value=3e-6)["llama"]
        alike = summary(now, written)
        assert (alike["given"], alike["refused"], alike["largest"], alike["otherwise"]) == (6, 2, 3e-6, [])
        refused = summary({**now, "embed.output": row("no")}, written)
        assert refused["otherwise"] == ["embed.output in decode: no", "embed.output in prefill: no"]
        del now["blocks[i].resid_pre"]
        assert len(summary(now, written)["otherwise"]) == 2


def test_a_recorded_measurement_has_its_changes() -> None:
    """Locations that fail are named, unless none was measured, which the page says of such a run."""
    now = measured()["llama"]
    now["changed: embed.output"] = dict.fromkeys(PHASES, 5e-6)
    written = written_on(render(said({"llama": now}), "- everything"), LAYOUT)["llama"]
    assert summary(now, written)["changes"] == 4
    failed = {**now, "changed: embed.output": dict.fromkeys(PHASES, "no")}
    assert summary(failed, written)["otherwise"] == [
        f"changed: embed.output in {phase}: no" for phase in sorted(PHASES)
    ]
    none = {**failed, "changed: blocks[i].resid_pre": dict.fromkeys(PHASES, "no")}
    assert (summary(none, written)["changes"], summary(none, written)["otherwise"]) == (0, [])


def test_the_page_has_what_was_recorded_on_gpus() -> None:
    assert section() in page().read_text()
    assert "Locations alone" in section() or all(
        found["changes"] for run in json.loads(RECORDED.read_text()).values() for found in run["columns"].values()
    )
    assert all(f"| {run} |" in section() for run in json.loads(RECORDED.read_text()))
