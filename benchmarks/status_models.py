"""Tiny random models of many architectures, with inputs of three sizes; nothing is downloaded.

Those of ``transformers`` are made from the default configuration of each model type, whose sizes are made
small; a type whose configuration, weights or inputs cannot be made so is left out with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .status_libraries import MODELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["Architecture", "NotBuiltError", "architectures", "built"]

BATCHES = (2, 3, 4)
LENGTHS = (8, 12, 16)
MOST_WEIGHTS = 12_000_000
"""More numbers than a tiny model has."""

SMALL = {
    32: "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim projection_dim image_size "
    "max_source_positions max_target_positions word_embed_proj_dim d_embed",
    48: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim dim_feedforward d_inner",
    2: "type_vocab_size num_experts_per_tok",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_experts num_local_experts n_routed_experts",
    8: "head_dim d_kv patch_size qk_rope_head_dim qk_nope_head_dim v_head_dim",
    16: "moe_intermediate_size num_mel_bins q_lora_rank kv_lora_rank",
    64: "vocab_size max_position_embeddings n_positions n_ctx",
    0: "pad_token_id",
    1: "bos_token_id",
}
"""Settings of configurations, by the most that they may be."""
LAYERS = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers"


class Tried(NamedTuple):
    """What a small configuration of a ``transformers`` model is made with."""

    layers: int = 1
    key_value_heads: int = 2
    use_cache: bool = True
    """Whether the model returns keys and values."""


TRIED = (Tried(), Tried(2), Tried(4), Tried(1, 4), Tried(4, use_cache=False))
"""In this order; some models need several kinds of layers, as many heads for keys and values as for queries,
or keys and values of earlier calls."""
_MOST = {name: most for most, names in SMALL.items() for name in names.split()}


class NotBuiltError(Exception):
    """A tiny model of an architecture cannot be made; the message says why."""


class TooLargeError(NotBuiltError):
    """The model has too many weights."""


class Architecture(NamedTuple):
    """What `compiled_programs.Model` takes: a model and its inputs of three sizes."""

    name: str
    make: Callable[[], torch.nn.Module]
    """Returns a new model with the same weights."""
    inputs: Callable[[int, int], dict[str, Any]]
    """From a batch size and a length."""

    def calls(self) -> list[dict[str, Any]]:
        """Return the inputs of three calls."""
        return [self.inputs(*size) for size in zip(BATCHES, LENGTHS, strict=True)]


def architectures() -> list[str]:
    """Return the names of all architectures of installed libraries, ``library.type``, one of each family first."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    modules: Counter[str] = Counter()
    order: list[tuple[float, str]] = []
    for kind in sorted(MODEL_MAPPING_NAMES):
        module = model_type_to_module_name(kind)
        order.append((modules[module], f"transformers.{kind}"))
        modules[module] += 1
    for library in _installed():  # after one of each family: they take longer
        order += [(0.5, f"{library}.{name}") for name in MODELS[library]()]
    return [name for _, name in sorted(order)]


def libraries() -> dict[str, str]:
    """Return the versions of the libraries that are installed, of those that a status depends on."""
    names = ("torch", "transformers", *_installed())
    return {name: importlib.metadata.version(name.replace("_", "-")) for name in names}


def _installed() -> list[str]:
    return [library for library in MODELS if importlib.util.find_spec(library)]


def built(name: str) -> Architecture:
    """Make a model and find inputs with which it runs.

    Args:
        name: one of `architectures`.

    Raises:
        NotBuiltError: that is not possible.
    """
    library, _, kind = name.partition(".")
    if library in MODELS:
        make, inputs = MODELS[library]()[kind]
        return Architecture(name, functools.partial(_seeded, make), inputs)
    errors: list[NotBuiltError] = []
    for tried in TRIED:
        try:
            return _built(name, functools.partial(_transformer, kind, tried))
        except TooLargeError:  # noqa: PERF203 - few are tried
            raise
        except NotBuiltError as error:
            errors.append(error)
    raise errors[0]


def _seeded(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return make()


def _built(name: str, make: Callable[[], Any]) -> Architecture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = make()
        except Exception as error:
            raise NotBuiltError(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
        count = sum(p.numel() for p in model.parameters())
        if count > MOST_WEIGHTS:
            raise TooLargeError(f"{count} weights with a small configuration")
        return Architecture(name, make, _inputs(model, model.config))


def _transformer(kind: str, tried: Tried) -> Any:
    from transformers import CONFIG_MAPPING, AutoModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = CONFIG_MAPPING[kind]()
    layers = dict.fromkeys(LAYERS.split(), tried.layers)
    _shrink(config, {**_MOST, **layers, "num_key_value_heads": tried.key_value_heads})
    if not tried.use_cache:
        config.use_cache = False
    torch.manual_seed(0)
    return AutoModel.from_config(config)


def _shrink(config: Any, most: Mapping[str, int]) -> None:
    """Make the sizes in a configuration, and in those inside it, small."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _shrink(value, most)
        elif name in most and type(value) is int and value > most[name]:
            with contextlib.suppress(Exception):  # of another type, or checked against others
                setattr(config, name, most[name])


# --- inputs ---------------------------------------------------------------------------------------


def _inputs(model: Any, config: Any) -> Callable[[int, int], dict[str, Any]]:
    """The first kind of inputs with which a model runs."""
    errors: list[str] = []
    for make in _kinds(model, config):
        error = _refused(model, make)
        if error is None:
            return make
        errors.append(error)
    raise NotBuiltError(f"no inputs are known: {errors[0]}")


def _refused(model: Any, make: Callable[[int, int], dict[str, Any]]) -> str | None:
    """Why a model does not run with some inputs; ``None``: it does."""
    try:
        with torch.no_grad():
            for size in zip(BATCHES, LENGTHS, strict=True):
                found = model(**make(*size))
    except Exception as error:  # noqa: BLE001 - of the model
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    if any(t.is_floating_point() for t in tensors_of(found)):
        return None
    return "no tensor of floats is returned"


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a result of a model."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in tensors_of(part)]
    return []


def _kinds(model: Any, config: Any) -> Iterator[Callable[[int, int], dict[str, Any]]]:
    vocabulary = _setting(config, "vocab_size", 64)

    def ids(batch: int, length: int) -> torch.Tensor:
        return torch.randint(3, max(vocabulary, 4), (batch, length))

    def text(batch: int, length: int) -> dict[str, Any]:
        return {"input_ids": ids(batch, length)}

    def translation(batch: int, length: int) -> dict[str, Any]:
        return {"input_ids": ids(batch, length), "decoder_input_ids": ids(batch, length - 2)}

    channels = _setting(config, "num_channels", 3)

    def image_of(width: int) -> Callable[[int, int], dict[str, Any]]:
        return lambda batch, _: {"pixel_values": torch.randn(batch, channels, width, width)}

    widths = [_setting(config, "image_size", 32), 64, 128, 224]
    images = [image_of(width) for width in dict.fromkeys(widths) if isinstance(width, int)]
    mels = _setting(config, "num_mel_bins", 16)

    def sound(batch: int, length: int) -> dict[str, Any]:
        return {"input_values": torch.randn(batch, 400 * length)}

    def features(batch: int, length: int) -> dict[str, Any]:
        return {"input_features": torch.randn(batch, 8 * length, mels)}

    def mel_features(batch: int, length: int) -> dict[str, Any]:
        return {"input_features": torch.randn(batch, mels, 64)} | translated(batch, length)

    def translated(batch: int, length: int) -> dict[str, Any]:
        return {"decoder_input_ids": ids(batch, length)} if config.is_encoder_decoder else {}

    by_name: dict[str, Sequence[Callable[[int, int], dict[str, Any]]]] = {
        "input_ids": (text, translation),
        "pixel_values": images,
        "input_values": (sound,),
        "input_features": (features, mel_features),
    }
    first = by_name.get(getattr(model, "main_input_name", ""), ())
    yield from first
    for one, other in itertools.product((text,), images):
        yield lambda b, n, one=one, other=other: one(b, n) | other(b, n)
    for kind in itertools.chain(*by_name.values()):
        if kind not in first:
            yield kind


def _setting(config: Any, name: str, default: int) -> Any:
    """A setting of a configuration, or of one inside it."""
    found = getattr(config, name, None)
    if found is None:
        inner = (part for part in vars(config).values() if hasattr(part, "to_dict"))
        found = next((getattr(part, name) for part in inner if hasattr(part, name)), default)
    return found
