"""Two processes that train small models with frozen queries and keys: what test_distributed.py starts.

Each process is given its rank, a file to meet at, and a folder to write a loss and states to.
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ortho import EncoderDecoder, HybridAttention, LanguageModel, freeze_qk, to_standard

WORDS, D, H, N = 11, 16, 2, 6
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def language_model():
    heads = {"learned": 1, "frozen": 1, "stopped": 1, "structured": 1, "induction": 1, "linear": 1}
    sizes = {"max_length": N, "layer": HybridAttention, "heads": heads}
    return LanguageModel(WORDS, 24, 6, 2, **sizes)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=D, n_layer=2, n_head=H, n_positions=N, **drops, **ends))
    return freeze_qk(model)


MODELS = {"ortho": language_model, "gpt2": gpt2}


def logits(model, tokens):
    found = model(tokens)
    return found if torch.is_tensor(found) else found.logits


def sharded(model, policy):
    for block in model.blocks if hasattr(model, "blocks") else model.transformer.h:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def frozen_of(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def check(kind, name, rank):
    """Train for two steps. The states of both ranks are then equal; what is frozen has not moved from rank 0's draw; a
    gathered state loads into an unsharded model, and back; and the unsharded model computes the same."""
    torch.manual_seed(rank)  # ranks draw different weights
    model = MODELS[name]()
    first = [copy.deepcopy(model.state_dict())]
    dist.broadcast_object_list(first, src=0)
    frozen, policy = frozen_of(model), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if kind == "ddp":
        own = model
        model = DistributedDataParallel(model)
    else:
        own = sharded(model, policy if kind == "fsdp-mixed" else MixedPrecisionPolicy())
        set_model_state_dict(
            own, copy.deepcopy(first[0]), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
    tokens = torch.randint(WORDS, (2, N), generator=torch.Generator().manual_seed(rank))
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(
            logits(model, tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    state = get_model_state_dict(own, options=StateDictOptions(full_state_dict=True))
    gathered = [state if rank == 0 or kind == "ddp" else None]
    if kind == "ddp":
        every = [None, None]
        dist.all_gather_object(every, state)
        assert all(torch.equal(every[0][key], every[1][key]) for key in state)
    dist.broadcast_object_list(gathered, src=0)
    state = gathered[0]
    assert frozen and frozen <= state.keys()
    for key, value in state.items():
        assert torch.equal(value, first[0][key]) == (key in frozen), key
    alone = MODELS[name]()
    alone.load_state_dict(state)
    if kind != "ddp":
        set_model_state_dict(own, alone.state_dict(), options=StateDictOptions(full_state_dict=True))
    with torch.no_grad():
        rounding = 2**-4 if kind == "fsdp-mixed" else 1e-5  # bfloat16 rounds by 2^-8; sums of 24 terms in two blocks
        torch.testing.assert_close(logits(model, tokens).float(), logits(alone, tokens), rtol=rounding, atol=rounding)
        torch.testing.assert_close(logits(to_standard(alone), tokens), logits(alone, tokens), rtol=1e-5, atol=1e-5)


def check_generation():
    """Sharded models write what the whole ones write: each step goes through `forward`, before which weights meet."""
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (2, N - 2))
    pair, one = EncoderDecoder(WORDS, D, H, 1, max_length=N), language_model()
    calls = ((pair, {"start": 0, "stop": 1}), (one, {"count": 2, "temperature": 0.0}))
    written = [model.generate(tokens, **how) for model, how in calls]
    for block in (*pair.encoder, *pair.decoder, *one.blocks, pair, one):
        fully_shard(block)
    for (model, how), whole in zip(calls, written, strict=True):
        assert torch.equal(model.generate(tokens, **how), whole)


def main():
    rank, meeting = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    init_device_mesh("cpu", (2,))
    for name in MODELS:
        if name == "gpt2" and "without-transformers" in sys.argv:
            continue
        for kind in ("ddp", "fsdp", "fsdp-mixed"):
            check(kind, name, rank)
            print(rank, name, kind, "holds", flush=True)
    check_generation()
    print(rank, "generation holds", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
