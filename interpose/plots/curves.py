"""Pictures that are bars and curves, with error bars over several prompts or folds."""

from __future__ import annotations

from typing import Any

import numpy as np

from interpose.plots import figures
from interpose.verbs.attributing import BIASES, EMBEDDING, Attribution
from interpose.verbs.dictionaries import SparseFeatures
from interpose.verbs.monitoring import Monitoring
from interpose.verbs.probing import Probe
from interpose.verbs.steering import Steering
from interpose.verbs.tokens import escaped

CHARACTERS = 100  # of a continuation that fit a line of the picture
FEATURES = 24  # shown at most
ERRORS = "Error bars: the standard error over"


def error_of(values: np.ndarray, axis: int) -> Any:
    """Return the mean's standard error along an axis, of any shape; None for one repeat."""
    repeats = values.shape[axis]
    return values.std(axis, ddof=1) / np.sqrt(repeats) if repeats > 1 else None


def attribution(found: Attribution, path: Any = None) -> Any:
    """Draw the shares as bars: the embedding, two for each layer, and the biases."""
    layers = sum(name.startswith("MLP") for name in found.names)
    mean, error = found.shares.mean(0), error_of(found.shares, 0)
    figure = figures.figure(min(5.0 + 0.3 * layers, 11.0), 4.4)
    axis = figure.subplots()
    left = np.arange(layers)

    def bars(at: Any, chosen: Any, width: float, **style: Any) -> None:
        axis.bar(at, mean[chosen], width, yerr=None if error is None else error[chosen], capsize=1.5, **style)

    bars(left - 0.2, slice(1, 1 + 2 * layers, 2), 0.4, label="attention", color="tab:blue")
    bars(left + 0.2, slice(2, 1 + 2 * layers, 2), 0.4, label="MLP", color="tab:orange")
    bars([-1.5], slice(0, 1), 0.6, color="tab:gray")
    at = figures.every(layers, figure.get_figwidth() / (layers + 4), 0.3)
    ticks, labels = [-1.5, *at], [EMBEDDING, *map(str, at)]
    if found.names[-1] == BIASES and np.any(found.shares[:, -1]):
        bars([layers + 0.5], slice(-1, None), 0.6, color="tab:gray")
        ticks, labels = [*ticks, layers + 0.5], [*labels, "biases"]
    axis.set_xticks(ticks, labels, fontsize=8)
    for label in axis.get_xticklabels():
        label.set_rotation(90 if label.get_text() in (EMBEDDING, "biases") else 0)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel("layer")
    axis.set_ylabel("share of the logit difference")
    axis.legend(fontsize=8, loc="upper right")
    if len(found.prompts) == 1:
        first, second = figures.labels(found.answer_texts[0])
        axis.set_title(f"what says “{first}” rather than “{second}”", loc="left", fontsize=11)
        caption = (
            f"Prompt: “{figures.prose(found.tokens[0])}”. {mean.sum():.3f} in all; the model's own logits differ by "
        )
        caption += f"{found.difference[0]:.3f}."
    else:
        axis.set_title("what says the one token rather than the other", loc="left", fontsize=11)
        caption = f"Bars: the mean. {ERRORS} {len(found.prompts)} prompts."
    return figures.finish(figure, caption, path)


def steer(found: Steering, path: Any = None, *, prompt: int = 0) -> Any:
    """Draw the logits that moved most over the strength, and what the model said."""
    figure = figures.figure(8.5, 6.6)
    curves, words = figure.subplots(2, 1, height_ratios=(1.5, 1))
    for token, text in zip(found.moved, found.moved_texts, strict=True):
        scores = found.logits[:, :, token]
        curves.errorbar(
            found.strengths, scores.mean(1), yerr=error_of(scores, 1), marker="o", capsize=2, label=figures.shown(text)
        )
    curves.set_xlabel("strength")
    curves.set_ylabel("logit of the next token")
    curves.set_title("the logits that move most", loc="left", fontsize=11)
    figure.legend(prop={"family": "monospace", "size": 8}, loc="outside right upper")
    words.axis("off")
    words.set_title(f"“{figures.prose(found.tokens[prompt])} …”", loc="left", fontsize=11)
    for row, (strength, said) in enumerate(zip(found.strengths, found.texts, strict=True)):
        line = f"{strength:+5.1f}  {escaped(said[prompt])}"
        line = (line if len(line) <= CHARACTERS else line[: CHARACTERS - 1] + "…").replace("$", r"\$")
        words.text(0.0, 1 - (row + 0.6) / len(found.strengths), line, family="monospace", fontsize=8, va="center")
    caption = f"The direction was added after layer {found.layer}, at every token and in every step."
    if len(found.prompts) > 1:
        caption += f" Curves: the mean. {ERRORS} {len(found.prompts)} prompts."
    return figures.finish(figure, caption, path)


def probe(found: Probe, path: Any = None) -> Any:
    """Draw the accuracy over several layers, and the scores of both classes in the best layer."""
    several = len(found.layers) > 1
    figure = figures.figure(10 if several else 7, 4)
    *first, axis = figure.subplots(1, 2 if several else 1, squeeze=False)[0]
    mean = found.accuracy.mean(1)
    for curve in first:
        curve.errorbar(found.layers, mean, yerr=error_of(found.accuracy, 1), marker="o", markersize=4, capsize=2)
        common = max((found.labels == 1).mean(), (found.labels == -1).mean())
        curve.axhline(common, color="tab:gray", linestyle="--", linewidth=1, label="the commoner label alone")
        curve.set_xlabel("layer")
        curve.xaxis.get_major_locator().set_params(integer=True)
        curve.set_ylabel("accuracy, held out")
        curve.legend(fontsize=8)
    best = found.best
    bins = np.linspace(found.scores[best].min(), found.scores[best].max(), 41)
    for label, name in zip((-1, 1), found.classes, strict=True):
        axis.hist(found.scores[best][found.labels == label], bins=bins, alpha=0.6, label=figures.shown(str(name), 24))
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel("the probe's score, held out")
    axis.set_ylabel("examples")
    axis.set_title(f"layer {found.layers[best]}: {mean[best]:.1%} right on prompts not seen", loc="left", fontsize=11)
    axis.legend(fontsize=8)
    caption = f"{len(found.labels)} activations of the residual stream."
    return figures.finish(figure, f"{caption} {ERRORS} {found.accuracy.shape[1]} folds." if several else caption, path)


def sae(found: SparseFeatures, path: Any = None) -> Any:
    """Draw the most active features, and the logits that move without one of them."""
    top = np.argsort(found.activations.max(0))[::-1][:FEATURES]
    cells = figures.Cells.fit(len(top), len(found.ids), within=(7.0, 5.0), least=4.0)
    figure = figures.figure(cells.size[0] + 5.6, 6.4)
    grid, bars = figure.subplots(1, 2, width_ratios=(cells.size[0] + 1.0, 3.0))
    rows, columns = [str(feature) for feature in top], figures.labels(found.tokens)
    table, title = found.activations.T[top], "most active features"
    image = figures.heat_map(grid, table, rows, columns, title, cells=cells, ylabel="feature", diverging=False)
    figure.colorbar(image, ax=grid, label="activation")
    moved = list(found.moved)[::-1]
    colours = ["tab:red" if found.change[token] > 0 else "tab:blue" for token in moved]
    bars.barh(range(len(moved)), found.change[moved], color=colours)
    bars.set_yticks(range(len(moved)), figures.labels(found.moved_texts)[::-1], family="monospace")
    bars.set_xlabel("change of the logit")
    bars.set_ylabel("next token")
    bars.set_title(f"without feature {found.feature}", loc="left", fontsize=11)
    return figures.finish(figure, f"The residual stream after layer {found.layer}, through the dictionary.", path)


def monitor(found: Monitoring, path: Any = None, *, stopped: Monitoring | None = None) -> Any:
    """Draw both readings over the tokens.

    Args:
        found: the generation that is drawn.
        path: the file to write; None: none is written.
        stopped: the same generation with an alarm, whose end is marked.
    """
    alarm = found.alarm if stopped is None else stopped.alarm
    figure = figures.figure(11, 6)
    probe_axis, entropy = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
    steps, labels = np.arange(len(found.ids)), figures.labels(found.tokens)
    probe_axis.plot(steps, found.readings, color="tab:blue", marker="o", markersize=4, label="reading")
    if alarm is not None:
        over = found.readings > alarm
        probe_axis.plot(steps[over], found.readings[over], "o", color="tab:red", label="over the alarm")
        probe_axis.axhline(alarm, color="tab:red", linestyle="--", linewidth=1, label="alarm")
    if stopped is not None and len(stopped.ids) < len(found.ids):
        end = len(stopped.ids) - 0.5
        probe_axis.axvspan(end, len(labels) - 0.5, color="0.9", label="never generated with the alarm on")
    probe_axis.set_xlim(-0.5, len(labels) - 0.5)
    probe_axis.set_ylabel("projection on the probe")
    probe_axis.set_title(f"“{figures.prose(found.prompt_tokens)} …”", loc="left", fontsize=11)
    probe_axis.margins(y=0.2)
    probe_axis.legend(loc="upper left", ncols=4, fontsize=8)
    entropy.bar(steps, found.entropies, color="tab:gray")
    entropy.set_ylabel("entropy (nats)")
    entropy.set_xlabel("generated token")
    entropy.set_xticks(steps, labels, rotation=90, family="monospace", fontsize=8)
    caption = f"Residual stream after layer {found.layer} at the newest token, and what the next token is drawn from."
    return figures.finish(figure, caption, path)
