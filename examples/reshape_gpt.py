"""Train a small GPT under one arrangement of ranks, and continue it under another.

    python examples/reshape_gpt.py --from tp2,pp2,dp2,zero1 --to dp4,zero3 --steps 25

1. The first arrangement trains all the steps, and saves a checkpoint half way.
2. New processes in the second arrangement load that checkpoint and train the second half.
3. The losses side by side, and drawn in a PNG where matplotlib is installed. In float32 they are
   equal up to rounding; where the arrangement is the same, they are equal.

An arrangement names what it has of pp (pipeline stages), dp (copies), sp (parts of a sequence), tp
(blocks of tensors) and zero (1, 2 or 3); `one` is a single process. With ep the model has experts,
spread over so many of the copies:

    python examples/reshape_gpt.py --from pp2,dp4,ep4 --to tp2,pp2,dp2,ep2

The model is small, and everything is cut evenly: tp is 1 or 2 (2 heads of keys and values), pp 1, 2
or 4 (4 layers), dp divides 8 (sequences of a batch) and sp 32 (their tokens); dp is a multiple of
ep, which divides the experts, 3 or more. zero3 goes neither with pp nor with experts.

The parallelism is written by hand in plain tensors (examples/gpt), so nothing but the rules in
examples/gpt/checkpoint.py tells ucpstore how they lie.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpt import checkpoint
from gpt.model import Config
from gpt.parallel import Arrangement
from gpt.train import Trainer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def train(
    arrangement: Arrangement,
    config: Config,
    dtype: str,
    url: str,
    start: int,
    stop: int,
    save_at: int | None = None,
) -> list[float]:
    """The losses of the steps behind `start`, which is loaded, to `stop`. Every rank runs this."""
    trainer = Trainer(arrangement, DTYPES[dtype], config)
    if start:
        checkpoint.load(url, trainer, start)
    losses = []
    while trainer.steps < stop:
        losses.append(trainer.step())
        if trainer.steps == save_at:
            checkpoint.save(url, trainer)
    return losses


def run(arrangement: Arrangement, *args: object) -> list[float]:
    """Call train() on as many new processes as the arrangement has ranks; the losses of rank 0.

    A real job is started by torchrun. Forking after the imports saves its seconds per start.
    """
    losses = mp.get_context("fork").SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(
        rank_main,
        (arrangement, port, losses, args),
        nprocs=arrangement.ranks,
        start_method="fork",
    )
    return losses.get()


def rank_main(rank: int, arrangement: Arrangement, port: int, losses, args) -> None:
    torch.set_num_threads(1)
    if arrangement.ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=arrangement.ranks,
        )
    found = train(arrangement, *args)
    if rank == 0:
        losses.put(found)
    if dist.is_initialized():
        dist.destroy_process_group()


def print_losses(half: int, names: tuple[str, str], through: list[float], resumed: list[float]):
    """A table of the losses; returns the largest relative difference."""
    width = max(14, *map(len, names)) + 2
    print(f"{'step':>6}{names[0]:>{width}}{names[1]:>{width}}{'difference':>14}")
    worst = 0.0
    for step, expected in enumerate(through, start=1):
        line = f"{step:>6}{expected:>{width}.7f}"
        if step > half:
            found = resumed[step - half - 1]
            difference = abs(found - expected) / abs(expected)
            worst = max(worst, difference)
            line += f"{found:>{width}.7f}{difference:>14.1e}"
        elif step == half:
            line += f"{'saved':>{width}}"
        print(line)
    print(f"largest relative difference {worst:.1e}")
    return worst


def draw(path: Path, half: int, names: tuple[str, str], through: list[float], resumed: list[float]):
    """A PNG of both curves, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no matplotlib, so nothing is drawn")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(through) + 1)
    axes.plot(steps, through, color="0.7", linewidth=5, label=f"{names[0]}, uninterrupted")
    axes.plot(steps[half:], resumed, color="C3", label=f"{names[1]}, from step {half}")
    axes.axvline(half, color="0.5", linestyle=":")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"drawn in {path}")


def parse_arrangement(text: str) -> Arrangement:
    """An argument; argparse passes on what is wrong with it only as an error of its own."""
    try:
        return Arrangement.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="first", type=parse_arrangement, default="tp2,pp2,dp2,zero1")
    parser.add_argument("--to", dest="second", type=parse_arrangement, default="dp4,zero3")
    parser.add_argument("--experts", type=int, help="in every second layer; 4 where ep is named")
    parser.add_argument("--steps", type=int, default=25, help="of which the second half is resumed")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the parameters")
    parser.add_argument("--url", default="build/reshape", help="where the store is made")
    parser.add_argument("--png", type=Path, default=Path("build/reshape_gpt.png"))
    options = parser.parse_args()
    half = options.steps // 2
    if half < 1:
        parser.error("--steps must be at least 2")
    names = (str(options.first), str(options.second))
    experts = options.experts
    if experts is None:
        experts = 4 if max(options.first.ep, options.second.ep) > 1 else 0
    config = Config(experts=experts)
    for name, asked in (("--from", options.first), ("--to", options.second)):
        try:
            config.check(asked)
        except ValueError as error:
            parser.error(f"argument {name}: {asked}: {error}")

    print(f"[1] {names[0]}, {options.first.ranks} ranks: {options.steps} steps, saving {half}")
    through = run(options.first, config, options.dtype, options.url, 0, options.steps, half)
    print(f"[2] {names[1]}, {options.second.ranks} ranks: loads {half}\n", flush=True)
    resumed = run(options.second, config, options.dtype, options.url, half, options.steps)

    worst = print_losses(half, names, through, resumed)
    options.png.parent.mkdir(parents=True, exist_ok=True)
    draw(options.png, half, names, through, resumed)
    bound = 0.0 if options.first == options.second else 1e-5
    if options.dtype == "fp32" and not worst <= bound:
        raise SystemExit(f"the runs differ by {worst:.1e}, expected at most {bound:.0e}")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
