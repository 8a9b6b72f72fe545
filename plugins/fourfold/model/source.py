"""Where a model comes from: its folder, its config with the task's changes, its tokenizer; what cannot be trained is
refused here, before any process group."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fourfold.schema import ModelConfig

# The Llama kind: decoder-only, dense, one embedding, layers at model.model.layers, a linear head. Each is tested.
SUPPORTED = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
DOWNLOADED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "*.bin.index.json"]
NO_WEIGHTS = [pattern for pattern in DOWNLOADED if "safetensors" not in pattern]


def resolve_folder(model: ModelConfig, *, weights: bool = True) -> Path:
    """Local folder of `model.path`: a folder, the tiny model made on the spot, or the hub's snapshot in HF_HOME, with or
    without its weights.

    Raises ValueError naming the absolute path tried if it is neither a folder nor to be had from the hub.
    """
    local = Path(model.path).expanduser()
    if model.create == "tiny_llama":
        from fourfold.model.tiny import create_tiny_llama

        create_tiny_llama(local)
    elif model.create is not None:
        raise ValueError(f"model.create={model.create!r} is not known: use tiny_llama, or null for an existing model.")
    if local.is_dir():
        return local
    return _download(model, tried=local, patterns=DOWNLOADED if weights else NO_WEIGHTS)


def read_config(folder: Path, *, model: ModelConfig) -> Any:
    """transformers config of the folder with rope scaling and maximum length as the task wants them.

    Raises ValueError if the folder is no Hugging Face model or the model is not of the supported kind.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder.absolute()} has no config.json: model.path must be a Hugging Face model folder or a hub id."
        )
    try:
        raw = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder.absolute() / 'config.json'} is not JSON ({error}).") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{folder.absolute() / 'config.json'} is no JSON object, but a {type(raw).__name__}.")
    _refuse_other_kinds(raw, folder=folder)
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # of many kinds
        why = " ".join(str(error).split())
        raise ValueError(f"{folder.absolute() / 'config.json'} is not what transformers takes: {why}") from None
    config.use_cache = False
    _stretch_context(config, model=model)
    return config


def config_at_hand(model: ModelConfig) -> Any | None:
    """As `read_config` of a folder that is there; None if the model must be made or downloaded first, or is none: its own
    refusals come later, from `read_config`."""
    folder = Path(model.path).expanduser()
    try:
        return read_config(folder, model=model) if (folder / "config.json").is_file() else None
    except ValueError:
        return None


def read_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; ValueError if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(f"{folder.absolute()} has no tokenizer that transformers can load: {first_line}") from None


def config_changes(config: Any, *, model: ModelConfig) -> dict[str, Any]:
    """Keys of config.json that the task changed, as the export writes them."""
    changes: dict[str, Any] = {}
    if model.max_position_embeddings is not None:
        changes["max_position_embeddings"] = config.max_position_embeddings
    if model.rope_scaling.rope_type is not None:
        changes["rope_parameters"] = config.rope_parameters
    return changes


def attention_implementation(config: Any, *, model: ModelConfig) -> str:
    """`auto`: sdpa, or eager for models whose logit soft-cap sdpa does not have."""
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if model.attn_implementation == "auto":
        return "eager" if capped else "sdpa"
    if capped and model.attn_implementation == "sdpa":
        raise ValueError(
            f"model.attn_implementation=sdpa has no soft-cap, and {config.model_type} caps attention logits at "
            f"{config.attn_logit_softcapping}: use eager or flash_attention_2."
        )
    return model.attn_implementation


def _download(model: ModelConfig, *, tried: Path, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=patterns))
    except HFValidationError:
        reason = "it is not a hub id either"
    except Exception as error:
        reason = f"the hub did not give it either ({type(error).__name__}: {str(error).splitlines()[0]})"
    raise ValueError(f"model.path={model.path}: there is no folder {tried.absolute()}, and {reason}.")


def _refuse_other_kinds(raw: dict[str, Any], *, folder: Path) -> None:
    kind = raw.get("model_type", "unknown")
    supported = ", ".join(SUPPORTED)
    experts = next((key for key in EXPERTS if raw.get(key)), None)
    if experts:
        raise ValueError(
            f"{folder.name} ({kind}) is a mixture of experts ({experts}={raw[experts]}), which is not supported yet. "
            f"Supported model types: {supported}."
        )
    if raw.get("is_encoder_decoder"):
        raise ValueError(f"{folder.name} ({kind}) is an encoder-decoder; supported are causal LMs: {supported}.")
    if kind not in SUPPORTED:
        hint = " (its text part alone has model_type gemma3_text)" if kind == "gemma3" else ""
        raise ValueError(f"{folder.name} has model_type {kind}{hint}; supported are causal LMs: {supported}.")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "?")
        raise ValueError(
            f"{folder.name} is quantised ({method}): full fine-tuning needs floating-point weights; bring the "
            f"unquantised checkpoint."
        )


def _stretch_context(config: Any, *, model: ModelConfig) -> None:
    scaling = {key: value for key, value in asdict(model.rope_scaling).items() if value is not None}
    original = config.max_position_embeddings
    if model.max_position_embeddings is not None:
        config.max_position_embeddings = model.max_position_embeddings
    if not scaling:
        return
    if model.rope_scaling.rope_type is None:
        raise ValueError(
            f"model.rope_scaling={scaling} says no rope_type: use linear, dynamic, yarn, longrope or llama3."
        )
    if scaling.get("rope_type") in ("yarn", "llama3", "longrope"):
        scaling.setdefault("original_max_position_embeddings", original)
    nested = config.nested_rope_parameter_keys(config.rope_parameters)
    if nested:  # sliding layers never look further than their window: only full attention is stretched
        stretched = {"full_attention": {**config.rope_parameters["full_attention"], **scaling}}
        config.rope_parameters = {**config.rope_parameters, **stretched}
    else:
        config.rope_parameters = {"rope_theta": config.rope_parameters.get("rope_theta"), **scaling}
    try:
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"model.rope_scaling={scaling} does not fit {config.model_type}: {error}") from None
