"""`ckdist launch` over two hosts (network namespaces), whose agents a template starts: numbers, ends and losses."""

import contextlib
import json
import pathlib
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from ckdist.topology import this_machine
from tests.support import launcher
from tests.support.generated import GENERATE, tokens_of_one_process
from tests.support.hosts import Hosts, Output, why_not
from tests.support.launched import launch, launched
from tests.support.paths import ROOT
from tests.support.served import wait_for
from tests.support.tiny_training import toml

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")


def agent() -> str:
    """The template of agents, which are forks."""
    return " ".join((f"{ROOT}/launch/netns-agent", "{host}", *launcher.STUB, "{command}"))


@pytest.fixture
def hosts():
    with Hosts() as hosts:
        yield hosts


def words(hosts: Hosts, *flags: str) -> tuple[str, ...]:
    """The flags that name both hosts."""
    return ("--hosts", ",".join(hosts.addresses), "--agent", agent(), *flags)


def env(hosts: Hosts) -> dict[str, str]:
    return {"CKDIST_NETNS": str(hosts.table)}


@contextlib.contextmanager
def running(hosts: Hosts, *flags: str) -> Iterator:
    with launched(*words(hosts), *flags, env=env(hosts)) as job:
        yield job


@pytest.mark.parametrize("ranks", [2, 3])
def test_same_text_as_one_process(hosts, ranks):
    before = hosts.carried()
    done = launch(*words(hosts, "-n", str(ranks), "--no-prefix"), "ckdist", *GENERATE, env=env(hosts))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == tokens_of_one_process()
    assert hosts.carried() - before > 10_000 and hosts.wait_empty(3) == []


def test_a_host_without_slots_has_a_rank_for_each_numa_node(hosts):
    """The agents count; slots of the other host stand beside that."""
    first, second = hosts.addresses
    nodes = this_machine().nodes_in_use()
    flags = ("--hosts", f"{first}:2,{second}", "--agent", agent(), "--no-prefix")
    done = launch(*flags, "bash", "-c", "echo $WORLD_SIZE $(hostname)", env=env(hosts))
    assert done.returncode == 0, done.stderr
    said = f"one rank for each NUMA node: {first}:2, {second}:{nodes}; use -n N or slots to change it"
    assert said in done.stderr and hosts.wait_empty(3) == []
    names = [f"{2 + nodes} {name}" for name in hosts.namespaces]
    assert sorted(done.stdout.splitlines()) == sorted([names[0]] * 2 + [names[1]] * nodes)


def test_a_host_that_cannot_be_asked_is_named(hosts):
    done = launch("--hosts", f"{hosts.addresses[0]},nowhere", "--agent", agent(), "echo", env=env(hosts))
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "host nowhere cannot be reached" in done.stderr and "or nowhere:N" in done.stderr


def test_ranks_of_a_hostfile_and_their_environment(hosts, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(f"# two hosts\n{hosts.addresses[0]} slots=1\n{hosts.addresses[1]}:2\n")
    shell = "echo $RANK $LOCAL_RANK $(hostname) $CKDIST_TOLD $GIVEN; echo err >&2; exit $((RANK == 2 ? 5 : 0))"
    flags = ("--hostfile", str(hostfile), "--agent", agent(), "-x", "GIVEN=a b")
    done = launch(*flags, "bash", "-c", shell, env={**env(hosts), "CKDIST_TOLD": "yes"})
    first, second = hosts.namespaces
    assert sorted(done.stdout.splitlines()) == [
        f"[0] 0 0 {first} yes a b", f"[1] 1 0 {second} yes a b", f"[2] 2 1 {second} yes a b"
    ]  # fmt: skip
    assert done.returncode == 5
    assert f"ckdist: rank 2 of 3 on {hosts.addresses[1]} ended with code 5" in done.stderr.splitlines()


def test_the_example_of_a_training_over_a_hostfile(hosts, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in hosts.addresses))
    words = (sys.executable, str(ROOT / "examples/train_ddp.py"), "--steps", "3", "--output", str(tmp_path / "out"))
    done = launch("--hostfile", str(hostfile), "--agent", agent(), "--no-prefix", *words, env=env(hosts))
    assert done.returncode == 0 and done.stdout.startswith("step 3 on 2 ranks: loss "), done.stderr


def test_words_of_the_command_follow_a_template_without_it(hosts):
    done = launch(
        *("-n", "2", "--hosts", ",".join(hosts.namespaces), "--agent", "ip netns exec {host}"),
        *("bash", "-c", "ip -br -4 addr | grep -o 10.77.[0-9.]*"),
    )
    assert sorted(line.split()[-1] for line in done.stdout.splitlines()) == sorted(hosts.addresses), done.stderr


def test_a_host_that_cannot_be_reached(hosts):
    flags = ("-n", "2", "--hosts", f"{hosts.addresses[0]},nowhere", "--agent", agent())
    done = launch(*flags, "--restarts", "1", "echo", "x", env=env(hosts))
    assert done.returncode == 1 and done.stdout == ""
    first, last = done.stderr.splitlines()
    reason = (
        f"host nowhere cannot be reached, {ROOT}/launch/netns-agent ended with code 255: netns-agent: {hosts.table} "
    )
    assert first == f"ckdist: {reason}has no host nowhere; all ranks start again in 1 s (restart 1 of 1)"
    assert last.endswith("has no host nowhere, after 1 restarts")
    fewer = launch(*flags, "--min-ranks", "1", "echo", "x", env=env(hosts))
    assert fewer.returncode == 0 and fewer.stdout == "[0] x\n" and "continuing with 1 of 2 ranks" in fewer.stderr


def test_no_rank_outlives_a_killed_supervisor(hosts):
    with running(hosts, "-n", "2", "sleep", "100") as job:
        wait_for(lambda: len(hosts.ranks_named("sleep")) == 2)
        job.send_signal(signal.SIGKILL)
        wait_for(lambda: not hosts.processes(), 10)


def test_a_host_that_was_there_is_waited_for(hosts):
    """That costs no restart beside the one that its loss has cost."""
    table = hosts.table.read_text()
    shell = f"echo began; [ -e {hosts.directory}/back ] || sleep 100"
    with running(hosts, "-n", "2", "--restarts", "1", "bash", "-c", shell) as job:
        output = Output(job)
        output.wait_for("began", 2)
        hosts.table.write_text(table.splitlines(keepends=True)[0])
        agents(hosts, 1)[0].kill()
        output.wait_for(f"{hosts.addresses[1]} cannot be reached, .*; retrying every 5 s for 10 minutes")
        pathlib.Path(hosts.directory, "back").touch()
        hosts.table.write_text(table)
        assert output.wait(20) == [0], output.text()
    assert "restart 1 of 1" in output.text() and output.text().count("cannot be reached") == 1


def test_packed_weights_outlive_a_rank(hosts):
    """On both hosts, whose agents stay."""
    generate = " ".join(("ckdist", *GENERATE, "-v")).replace("def main(", "'def main('")
    first = f"{hosts.directory}/first"
    shell = f"{generate} || exit; [ $RANK = 0 ] || [ -e {first} ] || {{ touch {first}; kill -9 $$; }}"
    flags = words(hosts, "-n", "2", "--restarts", "1", "--no-prefix")
    done = launch(*flags, "bash", "-c", shell, env=env(hosts))
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line)["token_ids"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert texts == [tokens_of_one_process()] * 2
    assert done.stderr.count("GB of packed weights were kept from the last start") == 2, done.stderr


def test_a_spare_takes_the_ranks_of_a_lost_host(hosts):
    """The spare is the first host again, by its name in the table."""
    first, second = hosts.addresses
    hosts.table.write_text(hosts.table.read_text() + f"spare {hosts.namespaces[0]}\n")
    flags = ("--hosts", f"{first},{second},spare", "--spares", "1", "--agent", agent(), "--restarts", "1")
    shell = f"echo $(hostname) $WORLD_SIZE; [ -e {hosts.directory}/back ] || sleep 100"
    with launched(*flags, "bash", "-c", shell, env=env(hosts)) as job:
        output = Output(job)
        output.wait_for(f"{hosts.namespaces[1]} 2")
        pathlib.Path(hosts.directory, "back").touch()
        hosts.table.write_text(hosts.table.read_text().replace(f"{second} ", "gone "))
        agents(hosts, 1)[0].kill()
        assert output.wait(30) == [0], output.text()
    text = output.text()
    assert "has no host " in text and "; spare takes its ranks" in text
    assert text.count(f"{hosts.namespaces[0]} 2") == 3, text


def agents(hosts: Hosts, host: int) -> list[psutil.Process]:
    """The launcher's agent on a host."""
    return [p for p in hosts.processes(host) if p.name()[:6] == "python" and "ckdist.launcher.agent" in p.cmdline()[-1]]


def test_a_training_goes_on_with_fewer_ranks(hosts, tmp_path):
    """One host goes for good: its agent is killed, and nothing can be started there any more."""
    path = toml(tmp_path, per_device_train_batch_size=3, max_steps=600, save_steps=50, logging_steps=50)
    with running(hosts, "-n", "2", "--restarts", "2", "--min-ranks", "1", "ckdist", "train", str(path)) as job:
        wait_for(lambda: list((tmp_path / "out").glob("checkpoint-*")), 60)
        hosts.table.write_text(f"{hosts.addresses[0]} {hosts.namespaces[0]}\n")
        agents(hosts, 1)[0].kill()
        said = job.stdout.read()
        assert job.wait(60) == 0, said
    assert f"host {hosts.addresses[1]} was lost" in said and "continuing with 1 of 2 ranks" in said, said
    kept = "1 of 2 replicas go on: each computes up to 2 batches of a step, not 1, so a step keeps its 6 rows"
    assert kept in said and "other settings" not in said, said
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
