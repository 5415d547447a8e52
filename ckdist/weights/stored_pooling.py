"""The pooling of hidden states into one vector, as sentence-transformers and GGUF files define it."""

from ckdist.errors import ModelFileError
from ckdist.models.decoder import SCORE
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.json_file import read_json_object

FOLDER_FILE = ("1_Pooling", "config.json")
LOGIT_SCORE = ("1_LogitScore", "config.json")  # of a decoder that ranks documents
FOLDER_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
GGUF_NUMBERS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}


def stored_pooling(checkpoint: Checkpoint) -> str:
    """The pooling of a model: mean, cls, last or rank. By default mean for an encoder, and last for a decoder.

    Raises:
        ModelFileError: The files define another kind of pooling.
    """
    usual = "last" if checkpoint.spec.generates else "mean"
    if checkpoint.spec.scorer is not None:
        return "cls"  # the rows of a cross-encoder are pooled already
    if any(one.name == SCORE for one in checkpoint.unread):  # of the model, or of its adapter
        return "rank"
    if checkpoint.format == "gguf":
        number = checkpoint.metadata.get(f"{checkpoint.metadata['general.architecture']}.pooling_type")
        return GGUF_NUMBERS.get(number, usual) if isinstance(number, int) else usual
    if checkpoint.spec.generates and checkpoint.folder.joinpath(*LOGIT_SCORE).exists():
        return "rank"
    path = checkpoint.folder.joinpath(*FOLDER_FILE)
    if not path.exists():
        return usual
    config = read_json_object(path)
    wanted = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(wanted) == 1 and wanted[0] in FOLDER_FLAGS:
        return FOLDER_FLAGS[wanted[0]]
    known = ", ".join(FOLDER_FLAGS)
    raise ModelFileError(f"{path} asks for {' and '.join(wanted)[:200] or 'no pooling'}; one of {known} is known")
