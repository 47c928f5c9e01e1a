"""Kill one of three ranks during training, and resume on two with the same losses.

    python examples/resume/kill_and_resume.py

Three agents of torchrun stand for three machines. During training, one agent and its rank are
killed with SIGKILL. The other agents start two new ranks, which partition the graph and resume from
the last checkpoint. The script compares the loss of every step with an uninterrupted training in
one process.
"""

import argparse
import os
import signal
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from command_line import hindrance, image, positive
from history import History, Run, differences, table
from processes import Failure, Processes

TRAIN = Path(__file__).with_name("train.py")
LIMIT = 1e-9  # limit of the relative difference between losses

# Agents drop an agent that is silent for `keep_alive_max_attempt` intervals, by default 15 s. With
# the minimum of `--nnodes`, they wait `last_call_timeout` for more agents, by default 30 s.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=3"


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def start_agents(processes: Processes, *training: str) -> list[str]:
    """Start one agent per machine; the first serves the store of the rendezvous."""
    endpoint = f"127.0.0.1:{free_port()}"
    names = ["agent 0", "agent 1", "agent 2"]
    for name in names:
        serves = str(name == names[0]).lower()
        processes.start(
            name,
            *["-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1"],
            *["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"],
            *["--rdzv-id=resume", f"--rdzv-conf=is_host={serves},{RENDEZVOUS}"],
            *["--local-addr=127.0.0.1", "--shutdown-timeout=5"],
            *training,
            # Otherwise the agent of rank 0 serves the store of the ranks, and new ranks look
            # for the store there after that agent has ended.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
    return names


def kill(processes: Processes, agent: str, run: Run) -> None:
    """Kill an agent and its rank, as if a machine failed."""
    try:  # the rank first: while its agent runs, no other process gets its process id
        os.kill(run.children[processes.pid(agent)], signal.SIGKILL)
    except ProcessLookupError:
        raise Failure("training was over before its time; take more --steps") from None
    processes.kill(agent)


def demonstrate(options: argparse.Namespace, folder: Path) -> bool:
    began = time.monotonic()
    numbers = {"--steps": options.steps, "--every": options.every, "--side": options.side}
    common = [str(word) for pair in numbers.items() for word in pair]
    common += ["--async"] * options.async_
    history, alone = History(folder / "three.jsonl"), History(folder / "one.jsonl")

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  {text}", flush=True)

    def training(log: History) -> list[str]:
        checkpoint = log.path.with_suffix(".checkpoint")
        return [str(TRAIN), str(checkpoint), "--history", str(log.path), *common]

    def run_to_interrupt() -> Run | None:
        """Run three ranks until halfway to the third checkpoint, or until its save begins."""
        run, step = history.last(), options.every * 5 // 2
        if run is None or run.ranks < 3:
            return None
        made = run.losses if options.moment == "step" else run.saves
        return run if made and max(made) >= step else None

    def run_on_two() -> Run | None:
        run = history.last()
        return run if run and run.ranks == 2 else None

    with Processes(folder, began + options.within) as processes:
        agents = start_agents(processes, *training(history))
        say("three agents started")
        interrupted = processes.wait_for(run_to_interrupt)
        kill(processes, agents[-1], interrupted)
        say(f"killed {agents[-1]} and its rank in the middle of a {options.moment}")
        processes.start("one process", *training(alone))
        resumed = processes.wait_for(run_on_two)
        say(f"two ranks go on from step {resumed.start}")
        processes.wait_for_end()
        say("training is over")

    (uninterrupted,), runs = alone.runs(), history.runs()
    print(f"\n{table(uninterrupted, runs)}\n")
    worst = max(differences(uninterrupted, runs))
    print(f"greatest relative difference: {worst:.1e} (allowed {LIMIT:.0e})")
    interrupted, resumed = runs[-2:]
    for run in (uninterrupted, resumed):
        print(f"on {run.ranks} ranks: {run.cost}")
    known = resumed.start in interrupted.saves[-2:]  # the last checkpoint may be incomplete
    whole = list(resumed.losses) == list(range(resumed.start, options.steps))
    if not (known and whole):
        print(f"saves before steps {interrupted.saves}; steps after that: {[*resumed.losses]}")
    from picture import draw  # the import of matplotlib would delay the agents

    draw(options.picture, uninterrupted, runs)
    print(f"picture: {options.picture}")
    good = known and whole and worst <= LIMIT
    print("one answer" if good else "NOT one answer")
    return good


def main(arguments: list[str] | None = None) -> int:
    # not common.Parser, which imports torch: this process is not a rank
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole = {"type": positive, "metavar": "N"}
    parser.add_argument(
        "--smoke", action="store_true", help="run in seconds: --steps 60, --every 10, --side 20"
    )
    parser.add_argument(
        "--moment",
        choices=["step", "save"],
        default="step",
        help="kill a rank during a training step or a save (%(default)s)",
    )
    parser.add_argument("--steps", default=150, help="training steps (%(default)s)", **whole)
    parser.add_argument(
        "--every", default=20, help="training steps between checkpoints (%(default)s)", **whole
    )
    parser.add_argument(
        "--side",
        default=60,
        type=partial(positive, least=4),
        metavar="N",
        help="nodes along a side (%(default)s)",
    )
    parser.add_argument(
        "--async",
        dest="async_",
        action="store_true",
        help="save checkpoints while training continues",
    )
    parser.add_argument("--within", default=240, help="timeout in seconds (%(default)s)", **whole)
    parser.add_argument(
        "--picture",
        type=image,
        default=Path("out/resume.png"),
        metavar="FILE",
        help="file of the picture (%(default)s)",
    )
    if parser.parse_args(arguments).smoke:
        parser.set_defaults(steps=60, every=10, side=20)
    options = parser.parse_args(arguments)
    if options.steps <= 3 * options.every:
        parser.error(f"argument --steps: need more than three times --every, got {options.steps}")
    if problem := hindrance(options.picture):
        parser.error(problem)
    with tempfile.TemporaryDirectory(prefix="varcomm-resume-") as folder:
        try:
            return 0 if demonstrate(options, Path(folder)) else 1
        except Failure as failure:
            print(failure, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
