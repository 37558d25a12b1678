"""Sessions of a real model in a store, in a process of its own: a job on standard input, what was found on standard
output, both as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llamakv.cli.config import prepare_engine

prepare_engine()

from llamakv.ops.chat import open_chat  # noqa: E402
from llamakv.ops.fork import ForkRequest, SaveTarget, fork_session  # noqa: E402
from llamakv.ops.prompts import Prompt  # noqa: E402
from llamakv.ops.requests import ChatRequest, ModelRequest, Reporter, SamplingOptions, SaveRequest  # noqa: E402
from llamakv.ops.save import save_prefix  # noqa: E402
from llamakv.ops.sessions import resolve_for_writing  # noqa: E402
from llamakv.store.session_file import read_session  # noqa: E402


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder and below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def forks(job: dict) -> dict:
    """A prefix of ``n`` tokens, and ``branches`` of ``own`` tokens each, kept in a store."""
    root = Path(job["store"])
    model = ModelRequest(path=Path(job["model"]), cache_dir=Path(job["cache"]))
    path = resolve_for_writing(root, "prefix")
    text = job["text"]
    request = SaveRequest(model=model, path=path, text=text, raw=True, name="prefix")
    saved = save_prefix(request, Reporter()).saved.info
    n_before = bytes_in(root)
    prompts = [Prompt(id=i, text=f" Number {i}", where=str(i)) for i in range(job["branches"])]
    batch = ForkRequest(
        model=model,
        path=path,
        prompts=prompts,
        n_parallel=16,
        sampling=SamplingOptions(temperature=0.9, max_tokens=job["own"], seed=1),
        save_as=lambda branch: SaveTarget(
            path=resolve_for_writing(root, f"branch-{branch.index}"), name=f"branch-{branch.index}"
        ),
    )
    fork_session(batch, Reporter(), on_result=lambda result: None, on_progress=lambda progress: None)
    branches = [read_session(root / f"branch-{i}.bin") for i in range(job["branches"])]
    n_prefix = len(saved.record.tokens)
    own = sum(s.n_stored for info in branches for s in info.sections if s.p0 >= n_prefix - 1)
    return {
        "tokens": n_prefix,
        "own_tokens": [len(info.record.tokens) - n_prefix for info in branches],
        "prefix_bytes": n_before,
        "own_bytes": own,
        "store_bytes": bytes_in(root),
        "index_bytes": sum(path.stat().st_size for path in root.glob("*.bin")),
    }


def turns(job: dict) -> dict:
    """The same conversation saved after every turn, and once at its end."""
    sizes = {}
    for name, every in (("each", True), ("once", False)):
        root = Path(job["store"]) / name
        path = resolve_for_writing(root, "talk")
        request = ChatRequest(
            model=ModelRequest(path=Path(job["model"]), cache_dir=Path(job["cache"])),
            sampling=SamplingOptions(temperature=0.0, max_tokens=job["max_tokens"]),
            save=path if every else None,
            name="talk",
        )
        with open_chat(request, Reporter()) as conversation:
            for number in range(job["turns"]):
                conversation.send(f"Question number {number}, please.", Reporter())
            if not every:
                conversation.save(path, Reporter(), name="talk")
            sizes[name] = bytes_in(root)
            sizes[f"{name}_tokens"] = conversation.stats().n_tokens
            sizes[f"{name}_sections"] = len(read_session(path).sections)
    return sizes


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps({"forks": forks, "turns": turns}[asked["do"]](asked)))
