"""Files of strangers that are no files: nothing waits for a writer, and no device is read."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckdist
from ckdist.errors import CkdistError, ConfigError, ModelFileError
from ckdist.regular_file import open_regular, read_regular
from ckdist.text_file import read_text_file
from ckdist.tokens.confined import load_vocabulary
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.train.data.documents import read_documents
from ckdist.weights.adapter_file import load_adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.model_files import ModelFile
from ckdist.weights.stored_pooling import stored_pooling

BUNDLED = Path(ckdist.__file__).parent / "models" / "bundled"


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def device(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    return path


def folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()
    return path


def listener(path):
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
    return path


@pytest.mark.parametrize("make", [fifo, device, folder])
@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors", "1_Pooling/config.json", "additional_chat_templates/rag.jinja",
    ],
)  # fmt: skip
def test_no_file_of_a_model_folder_is_waited_for(tmp_path, name, make):
    model = tmp_path / "model"
    shutil.copytree(BUNDLED, model)
    (model / name).parent.mkdir(exist_ok=True)
    make(model / name)
    with pytest.raises(ModelFileError) as error:
        load_tokenizer(model)
        stored_pooling(open_checkpoint(model))
    assert Path(name).name in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_that_is_a_fifo_is_refused_by_the_confined_process(tmp_path):
    shutil.copytree(BUNDLED, tmp_path / "model")
    fifo(tmp_path / "model" / "tokenizer.json")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json cannot be read: it is a FIFO, not a regular file"):
        load_vocabulary(tmp_path / "model")


def test_a_tokenizer_that_is_a_device_is_refused_before_memory_is_filled(tmp_path):
    shutil.copytree(BUNDLED, tmp_path / "model")
    device(tmp_path / "model" / "tokenizer.json")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json cannot be read: it is a device, not a regular file"):
        load_vocabulary(tmp_path / "model")


def test_ranks_that_compare_their_files_wait_for_none(tmp_path):
    with pytest.raises(ModelFileError, match="it is a FIFO, not a regular file"):
        ModelFile("tokenizer.json", fifo(tmp_path / "tokenizer.json")).digests(np.zeros(1, np.int64))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_no_file_of_an_adapter_is_waited_for(tmp_path, name):
    (tmp_path / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}')
    fifo(tmp_path / name)
    with pytest.raises(CkdistError, match=name.replace(".", r"\.")):
        load_adapter(tmp_path, open_checkpoint(BUNDLED).spec)


def test_training_data_is_not_waited_for(tmp_path):
    for ending in ("txt", "jsonl"):
        path = fifo(tmp_path / f"data.{ending}")
        with pytest.raises(ConfigError, match="it is a FIFO, not a regular file"):
            list(read_documents(path, "text"))


@pytest.mark.parametrize("make, kind", [(fifo, "a FIFO"), (device, "a device"), (folder, "a folder"), (listener, "")])
def test_what_is_no_regular_file_is_named(tmp_path, make, kind):
    with pytest.raises(OSError, match=f"it is {kind}, not" if kind else "No such device"):
        open_regular(make(tmp_path / "file"))


def test_the_size_is_checked_before_reading(tmp_path):
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match=f"it has {1 << 40} bytes, more than the 1024 allowed"):
        read_regular(path, 1024)


def test_a_text_file_of_the_command_line_may_be_a_pipe(tmp_path):
    program = "import sys; from ckdist.text_file import read_text_file as r; print(r(sys.argv[1], 'it', 99))"
    command = f'{sys.executable} -c "{program}" <(sleep 0.2; echo piped)'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "piped", done.stderr
    assert read_text_file(str(fifo(tmp_path / "pipe")), "it", 99) == ""
