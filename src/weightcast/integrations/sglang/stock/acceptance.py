"""Whether an offer fits a stock SGLang server: by the header of the checkpoint that it serves, or by its first update.

SGLang itself drops names that it does not know, does not notice what is missing, and may end its process over a wrong
shape. So every tensor is held against the checkpoint's header, if this host can read it: a directory, or a repository
in the local cache of the hub; nothing is downloaded. Otherwise the first complete update is the measure of the next.
"""

from __future__ import annotations

from weightcast.errors import IncompatibleWeightsError, listed
from weightcast.format.manifest import Manifest, TensorSpec
from weightcast.integrations.plugin.checkpoint_header import reference
from weightcast.serving.load_plan import compare_specs


class CheckpointAcceptance:
    """Holds offers against what a server has. `dtype` is the one that it computes in, which is taken as well."""

    def __init__(self, reference: dict[str, TensorSpec] | None, dtype: str) -> None:
        self._reference = reference
        self._dtype = dtype

    @property
    def names(self) -> frozenset[str]:
        """Those of the server's tensors that are known."""
        return frozenset(self._reference or ())

    def accept(self, manifest: Manifest) -> None:
        """Raises IncompatibleWeightsError, naming every tensor that is unknown, missing or of another form."""
        offered = [record.spec for record in manifest.tensors]
        if self._reference is None:
            self._reference = {spec.name: spec for spec in offered}
            return
        problems = compare_specs(
            offered, self._reference.values(), can_cast=lambda offered, held: offered == self._dtype
        )
        if problems:
            shown = listed(problems)
            raise IncompatibleWeightsError(f"{len(problems)} tensors do not fit this SGLang server: {shown}", problems)


def acceptance(model_path: str, dtype: str) -> CheckpointAcceptance:
    """For a server that serves this model. Warns in the log if its checkpoint can't be read here."""
    known = reference(model_path, revision=None, cache_dir=None)
    return CheckpointAcceptance(None if known is None else {spec.name: spec for spec in known}, dtype)
