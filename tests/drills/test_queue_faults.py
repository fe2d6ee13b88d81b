"""The queue server killed, wiped, cut off, frozen, read-only and full."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.drills.conftest import MakeMill, Record, scaled
from tests.drills.mill import Mill


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("database", "queue", "times"), [("sqlite", "embedded", 16), ("postgres", "log", 14), ("sqlite", "no log", 14)]
)
def test_the_queue_server_is_killed(make_mill: MakeMill, record: Record, database: str, queue: str, times: int) -> None:
    """The embedded one is started again by its supervisor, another by whoever looks after it: here the drill."""
    mill = make_mill(database, queue, seed=7)
    mill.up(workers=2)
    for _ in range(scaled(times)):
        mill.keep_busy()
        mill.pick_busy_worker()
        if mill.queue is None:
            mill.inject(lambda: os.kill(mill.queue_server_pid(), signal.SIGKILL))
        else:
            mill.inject(mill.queue.kill)
            time.sleep(mill.random.uniform(0.0, 1.5))
            mill.queue.start()
        if mill.random.random() < 0.8:  # else the next one comes before this one is overcome
            mill.wait_for_recovery()
        else:
            mill.wait(lambda: answers(mill), "the queue server's return")
    mill.wait_until_done()
    record(mill, "SIGKILL of the queue server")


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_the_queue_is_wiped(make_mill: MakeMill, record: Record, database: str) -> None:
    mill = make_mill(database, "embedded", seed=8)
    mill.up(workers=2)
    for _ in range(scaled(12)):
        mill.keep_busy()
        mill.pick_busy_worker()
        mill.inject(mill.wipe)
        mill.wait_for_recovery()
    mill.wait_until_done()
    assert mill.events()["messages_lost"]
    record(mill, "queue wiped (FLUSHALL)")


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_connections_to_the_queue_are_cut(make_mill: MakeMill, record: Record, database: str) -> None:
    """Each cut gives what the workers have in their hands out again while they still run it; three within a second."""
    mill = make_mill(database, "log", seed=9)
    mill.up(workers=2)
    for _ in range(scaled(10)):
        mill.keep_busy()
        mill.pick_busy_worker()
        mill.inject(lambda: cut(mill))
        for _ in range(2):
            time.sleep(mill.random.uniform(0.1, 0.4))
            cut(mill)
    mill.wait_until_done()
    record(mill, "connections to the queue cut, 3 x within 1 s")


def cut(mill: Mill) -> None:
    with mill.queue_client() as client:
        for kind in ("normal", "pubsub"):
            client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seconds", [5, 40])
def test_the_queue_server_is_frozen(make_mill: MakeMill, record: Record, seconds: int) -> None:
    """A black hole: connections stand, nothing answers."""
    mill = make_mill("sqlite", "log", seed=10)
    mill.up(workers=2)
    for _ in range(scaled(2) if seconds < 30 else 1):
        mill.keep_busy(6000)
        mill.pick_busy_worker()
        assert mill.queue is not None
        pid = mill.queue.pid
        mill.inject(lambda pid=pid: os.kill(pid, signal.SIGSTOP))
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        mill.wait_for_recovery()
    mill.wait_until_done()
    record(mill, f"queue server frozen for {seconds} s")


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_the_queue_server_refuses_to_write(make_mill: MakeMill, record: Record) -> None:
    """READONLY, as after a failover to a replica."""
    mill = make_mill("sqlite", "log", seed=11)
    mill.up(workers=2)
    for _ in range(scaled(2)):
        mill.keep_busy(4000)
        mill.pick_busy_worker()
        with mill.queue_client() as client:
            mill.inject(lambda client=client: client.execute_command("REPLICAOF", "127.0.0.1", "1"))
            time.sleep(6)
            client.execute_command("REPLICAOF", "NO", "ONE")
        mill.wait_for_recovery()
    mill.wait_until_done()
    assert mill.says("queue_read_only")
    record(mill, "queue server read-only for 6 s")


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_the_queue_server_has_no_memory_left(make_mill: MakeMill, record: Record) -> None:
    mill = make_mill("sqlite", "log", seed=12)
    mill.up(workers=2)
    for _ in range(scaled(2)):
        mill.keep_busy(4000)
        mill.pick_busy_worker()
        with mill.queue_client() as client:
            mill.inject(lambda client=client: client.config_set("maxmemory", "100kb"))
            time.sleep(6)
            client.config_set("maxmemory", "0")
        mill.wait_for_recovery()
    mill.wait_until_done()
    assert mill.says("queue_full")
    record(mill, "queue server out of memory for 6 s")


def answers(mill: Mill) -> bool:
    try:
        return mill.queue_server_pid() > 0
    except OSError:
        return False
    except Exception as error:
        if type(error).__module__.startswith("redis"):
            return False
        raise
