"""The experiments of the field over a served model, as blocks to read and copy.

    from interpose import verbs

    lens = verbs.logit_lens(model, "The Eiffel Tower is in")
    lens.plot("lens.png")  # needs interpose[plots]

A function takes a served model and prompts: text, or token ids. It returns a frozen dataclass of numpy arrays. `plot` of it draws
with `interpose.plots`.
"""

from interpose.verbs.attributing import Attribution, attribution
from interpose.verbs.dictionaries import SparseFeatures, sae
from interpose.verbs.finding import Finding
from interpose.verbs.heads import Attention, HeadAblation, attention, head_ablation
from interpose.verbs.jacobians import fit_jacobian_lens
from interpose.verbs.lenses import Lens, jacobian_lens, logit_lens
from interpose.verbs.monitoring import Monitoring, monitor
from interpose.verbs.patching import PatchSweep, patch_sweep
from interpose.verbs.probing import Probe, ProbeScores, probe
from interpose.verbs.steering import Steering, difference_of_means, steer
from interpose.verbs.tokens import layer_at

__all__ = [
    "Attention",
    "Attribution",
    "Finding",
    "HeadAblation",
    "Lens",
    "Monitoring",
    "PatchSweep",
    "Probe",
    "ProbeScores",
    "SparseFeatures",
    "Steering",
    "attention",
    "attribution",
    "difference_of_means",
    "fit_jacobian_lens",
    "head_ablation",
    "jacobian_lens",
    "layer_at",
    "logit_lens",
    "monitor",
    "patch_sweep",
    "probe",
    "sae",
    "steer",
]
