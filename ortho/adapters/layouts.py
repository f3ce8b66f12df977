"""Which rows of which linear layers make the queries and keys of a head: the table of known layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")  # what layers call K
COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head")  # H
KV_COUNTS = ("num_key_value_heads", "num_kv_heads")  # and G, where layers or their configurations give it

Sizes = tuple[int, int, int]  # (H, G, K)


@dataclass(frozen=True)
class Source:
    """The linear layer `name`, and what its outputs are: `holds` has "q", "k", "v" in their order.

    Each of these parts has its heads side by side. With `by_head`, the parts of each head of keys are side by side
    instead: its H/G heads of queries, its keys and its values.
    """

    name: str
    holds: str
    by_head: bool = False

    def __post_init__(self) -> None:
        if not self.holds or len(set(self.holds)) != len(self.holds) or set(self.holds) - set("qkv"):
            raise ValueError(f'holds: expected some of "q", "k" and "v", each once, got {self.holds!r}')

    def rows(self, part: str, head: int, sizes: Sizes) -> range:
        """The outputs that make this head of queries, "q", or of keys, "k"."""
        H, G, K = sizes
        shares = {name: H // G if name == "q" else 1 for name in self.holds}  # heads of a part for each head of keys
        before = sum(shares[name] for name in self.holds[: self.holds.index(part)])
        if self.by_head:
            group, within = divmod(head, shares[part])
            first = group * sum(shares.values()) + before + within
        else:
            first = before * G + head
        return range(first * K, (first + 1) * K)

    def heads(self, H: int, G: int) -> int:
        """The number of heads in its outputs: queries, keys and values together."""
        return sum(H if part == "q" else G for part in self.holds)


@dataclass(frozen=True)
class Layout:
    """Where a layer's queries and keys come from: one linear layer, if `k` is None, or two.

    Sizes that are not given are read from the layer or its configuration. `classes` are the names of the classes that
    have this layout, by default any. `beside` are the names of linear layers that make queries and keys of positions,
    in this order; they stay as they are.
    """

    q: Source
    k: Source | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    classes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def source(self, part: str) -> Source:
        """Where "q" or "k" comes from."""
        return self.q if part == "q" or self.k is None else self.k

    def names(self) -> list[str]:
        """The linear layers, each once."""
        return list(dict.fromkeys(self.source(part).name for part in "qk"))

    def sizes(self, module: nn.Module, outputs: dict[str, int]) -> Sizes | None:
        """(H, G, K) of a layer with these numbers of outputs; None if they do not fit the sizes that it states."""
        owners = module, stated(module, "config")
        said = [next((n for owner in owners for n in _integers(owner, names)), None) for names in (COUNTS, KV_COUNTS)]
        H, G = self.num_heads or said[0], self.num_kv_heads or said[1]
        K = next(iter(_integers(module, WIDTHS)), None)
        q, k = self.source("q"), self.source("k")
        if len(q.holds) == 1 and (K or H):
            K = K or outputs[q.name] // (H or 1)
            H = H or outputs[q.name] // K
        if not H:
            return None
        if len(k.holds) == 1 and K:
            G = G or outputs[k.name] // K
        G = G or H
        K = K or outputs[q.name] // q.heads(H, G)
        fits = K and H % G == 0 and all(outputs[source.name] == source.heads(H, G) * K for source in (q, k))
        return (H, G, K) if fits else None


def stated(owner: Any, name: str) -> Any:
    """An attribute; None if there is none, or if reading it raises, as in configurations that differ by layer."""
    try:
        return getattr(owner, name, None)
    except Exception:  # of whatever kind: the owner is other people's
        return None


def _integers(owner: Any, names: Sequence[str]) -> list[int]:
    """The owner's attributes of these names that are positive integers."""
    return [size for name in names if isinstance(size := stated(owner, name), int) and size > 0]


def _fused(name: str, *classes: str, by_head: bool = False) -> Layout:
    return Layout(Source(name, "qkv", by_head), classes=classes)


def _apart(q: str, k: str, **kwargs: Any) -> Layout:
    return Layout(Source(q, "q"), Source(k, "k"), **kwargs)


LAYOUTS = (  # the first that fits a layer is used
    _apart("q_proj", "k_proj"),  # Llama and its kin, OPT, BART, CLIP, ViT
    _apart("query", "key"),  # BERT, RoBERTa
    _apart("q_lin", "k_lin"),  # DistilBERT
    _apart("q", "k"),  # T5
    _apart("query_proj", "key_proj", classes=("DisentangledSelfAttention",), beside=("pos_query_proj", "pos_key_proj")),
    Layout(Source("q_attn", "q"), Source("c_attn", "kv"), classes=("GPT2Attention",)),  # cross-attention to an encoder
    _fused("c_attn", "GPT2Attention", "DecisionTransformerGPT2Attention"),
    _fused("qkv", "Attention", "WindowAttention"),  # timm
    _fused("qkv", "BlipAttention", "SamVisionAttention", "SamVisionSdpaAttention", "VisionAttention"),
    _fused("qkv_proj", "Phi3Attention"),
    _fused("Wqkv", "ModernBertAttention", "MptAttention"),
    _fused(
        "query_key_value", "GPTNeoXAttention", "FalconAttention", "BloomAttention", "PersimmonAttention", by_head=True
    ),
    _fused("in_proj", "DisentangledSelfAttention", by_head=True),  # DeBERTa
)
