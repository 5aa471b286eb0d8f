"""What objects look like: as text, and as HTML in which all text of others is escaped."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

import interpose
from interpose.contract.display import Table, size
from interpose.modules.tree import tree_of
from interpose.tracing.model import Model
from interpose.v1 import service_pb2
from tests.unit.interpose.conftest import description, numbers

EVIL = "<script>alert('x')</script>&\""
TAGS = {"details", "summary", "div", "table", "tr", "td", "th", "b", "code", "p"}


class Page(HTMLParser):
    """Checks that every tag is known and closed; collects the text.

    Attributes:
        said: the text.
        folded: the number of entries that fold.
    """

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.said, self.folded, self._open = "", 0, []
        self.feed(html)
        self.close()
        assert not self._open, html

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS and not {name for name, _ in attrs} - {"style", "open"}, tag
        self.folded += tag == "details"
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.said += data


def test_a_tree_folds(model):
    page = Page(model._repr_html_())
    assert "LlamaForCausalLM" in page.said and "(0-2): 3 ×" in page.said.replace("  ", " ")
    assert "weight: float32[64, 96]" in page.said and page.folded == 5
    assert Page(model.lm_head._repr_html_()).folded == 0


def test_names_of_a_model_are_escaped():
    found = description()
    found.modules.add(path=f"model.{EVIL}", class_name=EVIL, detail=EVIL)
    page = Page(tree_of(found).to_html())
    assert page.said.count(EVIL) == 3


def result(**more):
    tokens = {
        7: interpose.Logprob(-0.1, 1, EVIL),
        8: interpose.Logprob(-3.0, 2, " there"),
    }
    return interpose.Result(EVIL, [7], "length", [1, 2], [tokens], [None, {2: interpose.Logprob(-1.0)}], **more)


def test_a_result_shows_probabilities():
    page = Page(result()._repr_html_())
    assert page.said.count(EVIL) >= 1 and "90.5 %" in page.said and "' there' 5.0 %" in page.said
    assert page.folded == 2
    assert Page(interpose.Result("x", [1])._repr_html_()).folded == 0


def test_a_long_result_is_short():
    many = interpose.Result("x", list(range(1000)), "length", list(range(3000)))
    assert len(repr(many)) < 400 and "… 980 more" in repr(many)
    many.logprobs = [{token: interpose.Logprob(-0.5)} for token in many.token_ids]
    page = Page(many._repr_html_())
    assert "… 900 more" in page.said
    assert repr(interpose.Result("x", [7], "length", [1])) == (
        "Result(text='x', token_ids=[7], finish_reason='length', prompt_token_ids=[1])"
    )


def test_remote_values_jobs_and_sessions(service, client, model):
    service.script = lambda service, trace: iter([service.saves(0, hidden=numbers(2000))])
    with model.trace("Hello", fetch=False):
        hidden = model.model.layers[1].output[0].save()
    assert "float32 [2000]" in Page(hidden._repr_html_()).said and "7.8 KiB" in Page(hidden._repr_html_()).said
    with model.trace("Hello", blocking=False) as tracer:
        x = 1
    assert tracer.job.id in Page(tracer.job._repr_html_()).said
    page = Page(tracer.job.status()._repr_html_())
    assert "running" in page.said and "5 generated" in page.said
    with client.session() as s:
        assert s.id in Page(s._repr_html_()).said
    assert "not open" in Page(client.session()._repr_html_()).said
    assert service.address in Page(client._repr_html_()).said
    rows = client.jobs()
    assert tracer.job.id in {row["id"] for row in rows} and tracer.job.id in Page(rows._repr_html_()).said
    assert tracer.job.id in repr(rows), x


def test_a_table_of_models(service, client):
    assert client.models == ("tiny-llama",) and repr(client.models) == "('tiny-llama',)"
    model = service_pb2.ModelStatus(name=EVIL, state="RUNNING", replicas=1, adapters=["calm", "loud"])
    reply = service_pb2.StatusReply(models=[model])
    service.Status = lambda request, context: reply
    client.models.ask = lambda: reply
    table = client.models()
    assert table[0]["state"] == "RUNNING" and "calm, loud" in repr(table)
    assert repr(table).splitlines()[1].split()[:2] == ["model", "state"]
    assert EVIL in Page(table._repr_html_()).said


def test_a_long_cell_of_a_table_folds():
    views = [f"blocks[i].{name}" for name in ("resid_pre", "resid_mid", "resid_post", EVIL)]
    table = Table.of("models", [{"name": "one", "views": views, "refused": dict.fromkeys(views, "why not")}])
    page = Page(table._repr_html_())
    assert page.folded == 2 and all(name in page.said and f"{name}: why not" in page.said for name in views)
    assert len(max(repr(table).splitlines(), key=len)) < 140 and "blocks[i].resid_pre" in repr(table)
    assert table[0]["views"] == views


async def test_tables_of_asyncio(service):
    async with await interpose.connect_async(service.address, progress=False) as client:
        assert client.models == ("tiny-llama",)
        assert await client.models() == () and await client.jobs() == ()


def test_an_empty_table_says_so():
    assert repr(Table.of("jobs", [])) == "jobs: none" and Page(Table.of("jobs", [])._repr_html_()).said == "jobs: none"


def test_a_jobs_result():
    made = interpose.JobResult({"hidden": numbers(3), EVIL: "x" * 1000}, [result()], None)
    page = Page(made._repr_html_())
    assert "ndarray float32 [3]" in page.said and EVIL in page.said and len(page.said) < 1000


@pytest.mark.parametrize(
    ("nbytes", "text"), [(5, "5 bytes"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes(nbytes, text):
    assert size(nbytes) == text


def test_a_description_needs_no_service():
    assert Page(Model(object(), description())._repr_html_()).folded == 5
