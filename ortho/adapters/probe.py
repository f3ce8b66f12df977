"""Show by calls that a layer is what its names say: its scores are products of these queries and keys, head by head.

A copy of the layer gets random weights and is called with inputs of the model's own. Each head's rows of queries are
multiplied by a number of its own, and its rows of keys divided by it: no score, and so no output, may change, however
the layer goes on with the scores. This fails where the rows make something else, where further weights take part in
queries or keys, and where heads are mixed before the scores.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ortho._typing import Tensor
from ortho.adapters.finding import AttentionLayer
from ortho.adapters.layouts import stated
from ortho.adapters.rows import StopRows, thaw

Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call

N = 5  # tokens of a call
_KEPT = 1e-4  # of the change by queries alone: far above a layer's own rounding, also if its softmax is in float32
_OTHERS = ("encoder_hidden_states", "key_value_states")  # arguments by which layers attend to another sequence
_CACHES = ("past_key_value", "past_key_values", "layer_past", "past_states")
_ADDED = ("rel_pos", "q_bias", "k_bias", "position_bias")  # weights that are added to queries, keys or scores


class Prober:
    """Probes the layers of a model, each kind of layer once; `inputs` are those of a call of the model, if given."""

    def __init__(self, model: nn.Module, layers: Sequence[AttentionLayer], inputs: Any = None) -> None:
        self.model, self.layers, self.inputs = model, layers, inputs
        self._calls: dict[str, Call] | None = None
        self._found: dict[Any, str | None] = {}

    def problem(self, layer: AttentionLayer, stop_gradient: bool) -> str | None:
        """What was expected of a layer by its name and is not so; None if all is well."""
        if layer.layout is None:
            return None
        shapes = tuple((name, p.shape) for name, p in layer.module.named_parameters())
        key = type(layer.module), layer.layout, layer.num_heads, layer.num_kv_heads, shapes
        if key not in self._found:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self._found[key] = self._probe(layer, stop_gradient)
        return self._found[key]

    def _probe(self, layer: AttentionLayer, stop_gradient: bool) -> str | None:
        reason = "none"
        for call, dtype in product(self._possible(layer), (torch.float64, torch.float32)):
            try:
                return _checked(layer, call, stop_gradient, dtype)
            except Exception as error:  # of whatever kind: the layer is other people's
                reason = f"{type(error).__name__} ({error!s:.80})".replace("\n", " ")
        return f"a call that shows what it computes (`inputs=`, a call of the model that reaches it), got {reason}"

    def _possible(self, layer: AttentionLayer) -> Iterable[Call]:
        """Calls of a layer: with one sequence, or two; or as in a call of the model, given or made up."""
        if self.inputs is None:
            part = layer.parts()[0]
            x = torch.randn(2, N, part.value().shape[1 - part.axis])
            yield (x,), {}
            takes = inspect.signature(layer.module.forward).parameters
            yield from (((x,), {name: x.flip(0)}) for name in _OTHERS if name in takes)
        if self._calls is None:
            given = _made_up(self.model) if self.inputs is None else [self.inputs]
            self._calls = _recorded(self.model, self.layers, given)
        if layer.name in self._calls:
            yield self._calls[layer.name]


def _checked(layer: AttentionLayer, call: Call, stop_gradient: bool, dtype: torch.dtype) -> str | None:
    module = _randomised(layer.module, dtype)
    args, kwargs = tree_map(partial(_as, dtype), call)
    kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}

    def output() -> Tensor:
        found = tree_leaves(module(*args, **kwargs))
        return next(x for x in found if isinstance(x, Tensor) and x.is_floating_point()).nan_to_num()

    with torch.no_grad():
        want, changes = output(), []
        for parts in ("qk", "q", "k"):
            state = copy.deepcopy(module.state_dict())
            _scale(layer, module, parts)
            changes.append((output() - want).abs().max().item())
            module.load_state_dict(state)
    both, *alone = changes
    assert layer.layout is not None
    names = ", ".join(layer.layout.names())
    if min(alone) < _KEPT * want.abs().max().item():
        return f"outputs that depend on the queries and keys of {names}"
    if not both < _KEPT * min(alone):
        return f"scores that are products of the queries and keys of {names} alone, head by head"
    if stop_gradient and not _stops(layer, module, output):
        return f"calls of {names} (it reads their weights itself), for stop_gradient=True"
    return None


def _scale(layer: AttentionLayer, module: nn.Module, parts: str) -> None:
    """Multiply the queries of each head by a number, or divide its keys by it, or both."""
    H, G, layout = layer.num_heads, layer.num_kv_heads, layer.layout
    assert layout is not None
    numbers = [(-1) ** g * (1.25 + g / (2 * G)) for g in range(G)]  # a norm hides a factor, but no sign
    factors = {"q": [numbers[h * G // H] for h in range(H)], "k": [1 / number for number in numbers]}
    for part in parts:
        source, beside = layout.source(part), dict(zip("qk", layout.beside, strict=False)).get(part, "")
        own = [p for p in layer.parts(module) if p.owner is getattr(module, source.name)]
        tensors = [p.value().movedim(p.axis, 0) for p in own] + list(getattr(module, beside, nn.Module()).parameters())
        for rows, factor in zip(layer.rows(source, part), factors[part], strict=True):
            for tensor in tensors:
                tensor[rows] *= factor


def _stops(layer: AttentionLayer, module: nn.Module, output: Callable[[], Tensor]) -> bool:
    """Whether weights of queries and keys get no gradient if it stops at the outputs of their linear layers."""
    module.requires_grad_()
    weights = [part for part in layer.parts(module) if part.name == "weight"]
    for part in weights:
        part.owner.register_forward_hook(StopRows(part.runs()))
    given: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(output().sum(), [part.value() for part in weights], **given)
    rows = [torch.tensor([row for own in part.rows.values() for row in own]) for part in weights]
    return not any(g.index_select(p.axis, i).any() for g, p, i in zip(gradients, weights, rows, strict=True))


def _randomised(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on the CPU, for inference, with random matrices and the plainest norms; what is added by
    position is 0."""
    made: Any = copy.deepcopy(module)
    meta = any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))
    made = (made.to_empty(device="cpu") if meta else made.to("cpu")).to(dtype).eval()
    thaw(made)
    for name, parameter in made.named_parameters():
        owner, _, own = name.rpartition(".")
        weight = getattr(made.get_submodule(owner), "weight", None)
        if own.startswith(_ADDED) or (own == "bias" and weight is not None and weight.dim() == 1):
            parameter.data.zero_()
        elif parameter.dim() > 1 or own == "bias":
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data.fill_(1.0)
    return made


def _as(dtype: torch.dtype, x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if x.is_meta:
        x = torch.randn(x.shape) if x.is_floating_point() else torch.ones(x.shape, dtype=x.dtype)
    return x.detach().cpu().to(dtype) if x.is_floating_point() else x.cpu()


def _recorded(model: nn.Module, layers: Sequence[AttentionLayer], inputs: Iterable[Any]) -> dict[str, Call]:
    """The first call of each layer in a call of the model, by the first inputs that it takes."""
    calls: dict[str, Call] = {}
    names = {layer.module: layer.name for layer in layers}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(names[module], (args, kwargs))

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in names]
    training = [module for module in model.modules() if module.training]
    try:
        for given in inputs:
            try:
                with torch.no_grad():
                    model.eval()(**given) if isinstance(given, Mapping) else model.eval()(*given)
                break
            except Exception:  # other inputs may do
                continue
    finally:
        for module in training:
            module.training = True
        for handle in handles:
            handle.remove()
    return calls


def _made_up(model: Any) -> Iterable[dict[str, Any]]:
    """Inputs for a model of transformers, by what it takes and what its configuration says."""
    config, main = stated(model, "config"), stated(model, "main_input_name")
    if config is None or main is None:
        return
    takes, weight = inspect.signature(model.forward).parameters, next(model.parameters())
    said = [stated(of, n) for n in ("image_size", "num_channels") for of in (stated(config, "vision_config"), config)]
    size, channels = said[0] or said[1] or 32, said[2] or said[3] or 3
    sides = (size, size) if isinstance(size, int) else tuple(size)
    tokens = torch.tensor([[5, 6, 7, 8, 9]] * 2, device=weight.device)
    made: dict[str, Any] = {"input_ids": tokens, "pixel_values": torch.randn(2, channels, *sides).to(weight)}
    made |= {"input_values": torch.randn(2, 2000).to(weight), "use_cache": False}
    if stated(config, "is_encoder_decoder"):
        made["decoder_input_ids"] = tokens
    if stated(config, "add_cross_attention"):
        made["encoder_hidden_states"] = torch.randn(2, N, config.hidden_size).to(weight)
    for names in (made, set(made) - ({"input_ids", "pixel_values"} - {main})):
        yield {name: made[name] for name in made if name in names and name in takes}
