"""Every fault that costs a process, twenty times each: what ``test_processes.py`` does once.

    PYTHONPATH=.:tests python tests/server/soak_faults.py [ROUNDS [PART...]]

Takes some twenty minutes on two cores, nearly all of it for processes to start. Prints what stays the same, and ends
with status 1 where something does not.
"""

import sys
import time
from pathlib import Path
from typing import Any

from server.serving import (
    TOLD_SECONDS,
    WATCHFUL,
    Serving,
    hang_a_worker,
    kill_a_worker,
    kill_the_server,
    stop_the_server,
)

ROOT = Path(__file__).parents[2]
PAINTER, TALKER = ROOT / "pocket" / "qwen-image-2.1", ROOT / "tests" / "neo_unify" / "golden" / "dense"
LONG = {"messages": [{"role": "user", "content": "tell me a long story"}], "max_tokens": 400, "seed": 3}
ROLES = ("generation", "understanding")


def resident_bytes(server: Serving) -> int:
    """Of the API process, which stays when others are replaced."""
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


def replace_workers(root: Path, beside: dict[str, Any] | None, rounds: int, **how: Any) -> None:
    """Workers killed and hung, in one server that lives through all of it."""
    server = Serving(root, watch=WATCHFUL, **how).wait_ready()
    expected, fds, memory = server.picture(), server.num_fds(), resident_bytes(server)
    for i in range(rounds):
        for role in ROLES:
            assert kill_a_worker(server, role, beside if role == "generation" else None) < TOLD_SECONDS
        assert hang_a_worker(server, ROLES[i % 2]) < TOLD_SECONDS
        assert server.picture() == expected
        assert server.num_fds() <= fds + 4, f"{server.num_fds()} descriptors, {fds} at first"
        assert server.metric("worker_restarts_total") == 3 * (i + 1)
        print(f"{how} round {i + 1}: fds {server.num_fds()}, bytes {resident_bytes(server) - memory:+}", flush=True)
    assert resident_bytes(server) - memory < 64 << 20
    stop_the_server(server)


def end_servers(root: Path, rounds: int, **how: Any) -> None:
    """Servers killed and stopped while they paint."""
    for i in range(rounds):
        end = (kill_the_server, stop_the_server)[i % 2]
        end(Serving(root, **how).wait_ready())
        print(f"{how} {end.__name__} {i + 1}", flush=True)


PARTS = {
    "talker": lambda rounds: replace_workers(TALKER, LONG, rounds, mode="separate"),
    "colocated": lambda rounds: replace_workers(TALKER, LONG, rounds, mode="colocate"),
    "painter": lambda rounds: replace_workers(PAINTER, None, rounds, mode="separate"),
    "ends": lambda rounds: end_servers(PAINTER, 2 * rounds, mode="separate"),
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for part in sys.argv[2:] or PARTS:
        began = time.monotonic()
        PARTS[part](rounds)
        print(f"{part}: {rounds} times, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
