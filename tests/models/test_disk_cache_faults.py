"""A cache on disk that is damaged, foreign, full or too small: never another answer, never a crash."""

import json
import os
import pathlib
import resource
import shlex
import subprocess
import sys

import numpy as np
import pytest

from ckdist.engine.cache_folder import HEADER
from ckdist.engine.disk_tier import NO_NAME
from ckdist.errors import ConfigError
from tests.support import launcher
from tests.support.disk_caches import answers, ask, engine_of, load, prompts
from tests.support.mounts import why_no_mounts

MODEL, BLOCK_BYTES = "llama3", 6912  # which take two pages in the file
LOADED = 144 + 48 + 96  # tokens of `prompts` that come from disk


@pytest.fixture(scope="module")
def alone():
    return ask(MODEL)[0]


@pytest.fixture
def folder(tmp_path):
    """A cache with all blocks of `prompts`."""
    ask(MODEL, tmp_path / "cache")
    return tmp_path / "cache"


def file(folder: pathlib.Path, name: str) -> pathlib.Path:
    (found,) = folder.glob(f"*/{name}")
    return found


def flip(path: pathlib.Path, at: int, mask: int = 1) -> None:
    with path.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ mask]))


def damage_data(folder):
    flip(file(folder, "rank-0-of-1.blocks"), 3 * 8192 + 777)


def damage_last_byte(folder):
    flip(file(folder, "rank-0-of-1.blocks"), BLOCK_BYTES - 1, 128)


def damage_tokens(folder):
    flip(file(folder, "rank-0-of-1.blocks.index"), 2 * HEADER.itemsize + 8 + 64 + 5)


def damage_magic(folder):
    flip(file(folder, "rank-0-of-1.blocks.index"), 0)


def damage_checksum(folder):
    flip(file(folder, "rank-0-of-1.blocks.index"), HEADER.itemsize + HEADER.fields["checksum"][1])


def damage_depth(folder):
    flip(file(folder, "rank-0-of-1.blocks.index"), HEADER.itemsize + 8 + 64 + 64 + 3, 64)


def truncate_data(folder):
    os.truncate(file(folder, "rank-0-of-1.blocks"), 5 * 8192 + 100)


def truncate_headers(folder):
    os.truncate(file(folder, "rank-0-of-1.blocks.index"), 2 * HEADER.itemsize + 100)


def remove_data(folder):
    file(folder, "rank-0-of-1.blocks").unlink()


def remove_secret(folder):
    file(folder, "secret").unlink()


def swap_slots(folder):
    """Two sound headers in each other's place."""
    path = file(folder, "rank-0-of-1.blocks.index")
    data = path.read_bytes()
    path.write_bytes(data[HEADER.itemsize : 2 * HEADER.itemsize] + data[: HEADER.itemsize] + data[512:])


def fill_with_noise(folder):
    for path in folder.glob("*/rank-*"):
        path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.parametrize(
    "damage",
    [
        damage_data, damage_last_byte, damage_tokens, damage_magic, damage_checksum, damage_depth, truncate_data,
        truncate_headers, remove_data, remove_secret, swap_slots, fill_with_noise,
    ],
)  # fmt: skip
def test_damage_is_a_miss_and_is_mended(damage, folder, alone):
    damage(folder)
    found, stats = ask(MODEL, folder)
    assert found == alone and stats["disk_loaded_tokens_total"] < LOADED and stats["disk_write_errors_total"] == 0
    found, stats = ask(MODEL, folder)
    assert found == alone and stats["disk_loaded_tokens_total"] == LOADED and stats["disk_damaged_total"] == 0


def test_a_damaged_state_is_a_miss_too(tmp_path):
    model, alone = "qwen35", ask("qwen35")[0]
    ask(model, tmp_path)
    path = file(tmp_path, "rank-0-of-1.states")
    for at in range(50, path.stat().st_size, 4096):
        flip(path, at)
    found, stats = ask(model, tmp_path)
    assert found == alone and stats["disk_damaged_total"] > 0
    found, stats = ask(model, tmp_path)
    assert found == alone and stats["disk_damaged_total"] == 0 and stats["disk_loaded_tokens_total"] > 0


def test_a_disk_that_fails_while_it_serves_is_a_miss(folder, alone, caplog):
    loaded = load(MODEL, folder)
    try:
        os.truncate(file(folder, "rank-0-of-1.blocks"), 6 * 8192)
        engine = engine_of(loaded)
        assert [answers(engine, [prompt])[0] for prompt in prompts()] == alone
        assert engine.stats()["disk_damaged_total"] > 0
    finally:
        loaded.close()
    assert sum("has damaged blocks" in record.message for record in caplog.records) == 1


def test_a_full_disk_ends_storing_with_one_line(tmp_path, alone, caplog):
    loaded = load(MODEL, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        engine = engine_of(loaded)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 8192 + 100, limits[1]))
        assert [answers(engine, [prompt])[0] for prompt in prompts()] == alone
        engine.finish_storing()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert engine.stats()["disk_write_errors_total"] > 0
        assert [answers(engine, [prompt])[0] for prompt in prompts()] == alone
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        loaded.close()
    assert sum("cannot be written (File too large)" in record.message for record in caplog.records) == 1
    found, stats = ask(MODEL, tmp_path)
    assert found == alone and stats["disk_damaged_total"] == 0


def test_a_small_cache_keeps_its_bound(tmp_path, alone):
    small, whole = tmp_path / "small", tmp_path / "whole"
    found, stats = ask(MODEL, f"{small}:{5 * (8192 + HEADER.itemsize)}")
    assert found == alone and stats["disk_blocks"] == stats["disk_blocks_most"] == 5
    assert file(small, "rank-0-of-1.blocks").stat().st_size <= 5 * 8192
    ask(
        MODEL, whole
    )  # stores the first prompt's blocks first; which ones `small` has depends on the speed of its steps
    found, stats = ask(MODEL, f"{whole}:{4 * (8192 + HEADER.itemsize)}")
    assert found == alone and stats["disk_blocks_most"] == 4 and stats["disk_loaded_tokens_total"] > 0


def test_tenants_stay_apart_over_restarts(tmp_path, alone):
    ask(MODEL, tmp_path, tenant=b"one")
    _, stats = ask(MODEL, tmp_path, tenant=b"two")
    assert stats["disk_loaded_tokens_total"] == 0
    for tenant in (b"one", b"two"):
        found, stats = ask(MODEL, tmp_path, tenant=tenant)
        assert found == alone and stats["disk_loaded_tokens_total"] == LOADED


def test_a_request_without_a_tenant_leaves_nothing(tmp_path):
    _, stats = ask(MODEL, tmp_path, tenant=None)
    assert stats["disk_blocks"] == stats["disk_loaded_tokens_total"] == 0


@pytest.mark.parametrize("fields", [{"cache_type_k": "f32"}, {"quantize": "q8_0"}])
def test_other_types_are_a_miss(fields, folder):
    found, stats = ask(MODEL, folder, **fields)
    assert found == ask(MODEL, **fields)[0] and stats["disk_loaded_tokens_total"] == 0


def test_computing_wins_where_the_disk_is_predicted_to_be_slower(folder, alone):
    loaded = load(MODEL, folder)
    try:
        loaded.disk.entry_seconds = dict.fromkeys(loaded.disk.entry_seconds, 1e3)
        engine = engine_of(loaded)
        assert [answers(engine, [prompt])[0] for prompt in prompts()] == alone
        assert engine.stats()["disk_loaded_tokens_total"] == 0
    finally:
        loaded.close()


def refused(place, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(MODEL, place)


def test_folders_that_are_not_this_users_own_are_refused(folder, tmp_path):
    own = next(folder.iterdir())
    (tmp_path / "link").symlink_to(folder)
    refused(tmp_path / "link", "symbolic link")
    refused("/proc/version", "cannot be used")
    refused(f"{folder}:1K", r"hold no entry of 8.2 KiB; give at least 8448 bytes")
    refused(f"{folder}:many", "the size many")
    secret = own / "secret"
    secret.chmod(0o644)
    refused(folder, "has mode 644")
    secret.unlink()
    secret.symlink_to(tmp_path / "elsewhere")
    refused(folder, "symbolic link")
    secret.unlink()
    os.mkfifo(secret, 0o600)
    refused(folder, "neither a file nor a folder")
    secret.unlink()
    own.chmod(0o755)
    refused(folder, "has mode 755")
    own.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(own, 12345, -1)
        refused(folder, "owner 12345")


@pytest.mark.skipif(why_no_mounts() != "", reason="mounts are for root")
def test_a_read_only_folder_is_refused_and_a_full_file_system_is_not(tmp_path, alone):
    """The first as a user's mistake; on the second the prompts that have room are there after a restart."""
    small = f"mount -t tmpfs -o size=72k tmpfs {tmp_path}"
    answer = shlex.join(
        [*launcher.STUB, sys.executable, "-m", "tests.support.programs.disk_prompts", f"{tmp_path}:1M", MODEL]
    )
    words = f"{small} && {answer} && {answer} && mount -o remount,ro {tmp_path} && {answer}"
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", words],
        capture_output=True,
        text=True,
        timeout=100,
        env=launcher.environment(),
    )
    (_, first, none, _), (_, second, loaded, stored) = [json.loads(row) for row in done.stdout.splitlines()]
    assert first == second == json.loads(json.dumps(alone)) and none == 0 and loaded > 0 and 0 < stored < 10
    assert done.stderr.count("cannot be written (No space left on device)") == 2
    assert "cannot be used: Read-only file system" in done.stderr.splitlines()[-1]


def test_a_second_job_is_told_that_the_folder_is_in_use(folder):
    loaded = load(MODEL, folder)
    try:
        refused(folder, "another job uses")
    finally:
        loaded.close()
    load(MODEL, folder).close()


@pytest.mark.timeout(60)
def test_a_block_whose_parent_is_neither_in_memory_nor_on_disk_is_not_stored(tmp_path):
    """Its store ended after its parent was evicted from both. Rank 0 tried it again without end."""
    loaded = load(MODEL, tmp_path)
    try:
        engine = engine_of(loaded)
        answers(engine, prompts()[:1])
        engine.finish_storing()
        tier = engine.tier
        child, named = next((i, n) for i, n in enumerate(tier._names) if n.depth and engine.pool.is_known(i))
        tier._index.drop(named.parent)
        tier._to_store.append((child, named.name))
        assert [copy.block for copy in tier._next_blocks(2)] == [named.before, child]
        for name in (named.name, named.parent):
            tier._index.drop(name)
        tier._to_store.append((child, named.name))
        tier._names[named.before] = NO_NAME
        assert tier._next_blocks(2) == [] and not tier._to_store
    finally:
        loaded.close()


def test_a_thousand_evictions_under_several_clients(tmp_path):
    """Memory for two of eight conversations, a disk for four: every answer is that of a client alone."""
    rng = np.random.default_rng(3)
    talks = [rng.integers(3, 180, 60).tolist() for _ in range(8)]
    loaded = load(MODEL, f"{tmp_path}:{60 * (8192 + HEADER.itemsize)}", kv_memory=40 * 8192, parallel=8)
    asked = []
    try:
        engine = engine_of(loaded)
        for _ in range(200):
            round_of = [talk + rng.integers(3, 180, int(rng.integers(1, 40))).tolist() for talk in talks]
            asked += zip(round_of, answers(engine, round_of, tokens=2), strict=True)
            engine.finish_storing()
            if engine.stats()["disk_evicted_total"] >= 1000:
                break
            talks = [(prompt if len(prompt) < 220 else prompt[:60]) for prompt in round_of]
        stats = engine.stats()
        assert stats["disk_evicted_total"] >= 1000 and stats["disk_loaded_tokens_total"] > 0, stats
    finally:
        loaded.close()
    loaded = load(MODEL)
    try:
        engine = engine_of(loaded, prefix_reuse=False)
        for prompt, found in asked[:: max(1, len(asked) // 60)]:
            assert answers(engine, [prompt], tokens=2) == [found]
    finally:
        loaded.close()
