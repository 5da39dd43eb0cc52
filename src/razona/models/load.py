"""From a name to a model and its tokenizer: safetensors and GGUF only, no dropout, no surprise at saving."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from razona.data.chat import chat_text, tokenizer_of
from razona.errors import ModelError
from razona.models.lora import CONFIG, FOUND_BY, base_of, load_adapter
from razona.models.multimodal import frozen_notice, processor_in, set_dtype
from razona.models.quant import (
    check_installed,
    check_quantized,
    made_ready,
    read_record,
    return_freed,
    settings_for,
)
from razona.models.resolve import Source, resolve
from razona.models.save import quiet


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, its tokenizer, lines to print, and the ids that end a completion, sorted.

    With an adapter, ``model`` is a `peft.PeftModel`. ``processor`` is what is saved with the model: the one
    that the tokenizer is part of, or None for the tokenizer itself.
    """

    model: Any
    tokenizer: Any
    name: str
    notices: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    processor: Any = None


def load(
    name: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    quantization: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Load a hub id, a folder, a .gguf file or the bundled default, with all dropout off. A folder with a
    LoRA adapter is loaded on its base, in 4 bits where it was trained on such a one.

    ``quantization``: settings such as `razona.models.quant.NF4` put the decoder's linear layers in 4 bits; a
    model that is so already keeps its own. ``dtype`` is that of the rest.

    Raises ModelError when the name leads nowhere, when weights are missing, pickled or quantized in another
    way, and when the model is not a decoder.
    """
    source = resolve(name, trust_remote_code=trust_remote_code)
    if source.is_adapter:
        base = base_of(source.path)
        try:
            loaded = load(
                base,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                quantization=quantization or read_record(source.path),
            )
        except ModelError as error:
            raise ModelError(
                f"{name} is an adapter for '{base}', which cannot be loaded: {error} If the base lies "
                f"elsewhere, give {FOUND_BY}."
            ) from error
        return with_adapter(loaded, name)
    try:
        with quiet(), _gguf_read_once() if source.is_gguf else contextlib.nullcontext():
            config, tokenizer = _config_and_tokenizer(source, trust_remote_code)
            processor = None if source.is_gguf else processor_in(source.path, tokenizer)
            how = _how(name, config, dtype, device, quantization, trust_remote_code)
            notices = [*source.notices, *_no_dropout(config)]
            if source.is_gguf:
                model = _load_gguf(source, config, how)
            else:
                model, more = _load_safetensors(name, source, config, how)
                notices += more
        if how.quantized:
            return_freed(model)
    except ModelError:
        raise
    except Exception as error:  # the readers below raise what they like: SafetensorError, struct.error, ...
        raise ModelError(f"'{name}' ({source.path}) cannot be loaded: {error}") from error
    return _ready(model.to(device), tokenizer, name, notices, processor)


def from_model(model: Any, tokenizer: Any, name: str = "handed in") -> LoadedModel:
    """A transformers model or a `peft.PeftModel` that is there already, with all dropout off. ``tokenizer``
    may be a processor. ModelError for what is no decoder or has quantized weights.
    """
    _check_config(name, model.config)
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    notices = [*_no_dropout(model.config), *frozen_notice(name, inner)]
    return _ready(model, tokenizer_of(tokenizer), name, notices, tokenizer)


def _ready(model: Any, tokenizer: Any, name: str, notices: Sequence[str], processor: Any) -> LoadedModel:
    """Dropout off, a pad token, the stop tokens known, 4-bit layers with the forward pass they have here."""
    notices = [
        *notices,
        *made_ready(name, model.get_base_model() if hasattr(model, "peft_config") else model),
    ]
    dropouts = [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
    if dropouts:
        notices = [*notices, f"Dropout is off in every pass ({len(dropouts)} layers had {dropouts[0].p:g})."]
    for module in dropouts:
        module.p = 0.0
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    stops = stop_token_ids(model, tokenizer)
    if not stops:
        notices = [
            *notices,
            f"{name}: no token ends a completion; every one will have max_completion_length tokens.",
        ]
    return LoadedModel(model.eval(), tokenizer, name, tuple(notices), stops, processor)


def with_adapter(loaded: LoadedModel, name: str) -> LoadedModel:
    """The same with the LoRA adapter ``name`` on it, and the adapter's tokenizer where it has one. Raises
    ModelError where there is no adapter or it does not fit.
    """
    source = resolve(name)
    if not source.is_adapter:
        raise ModelError(f"{name} is no adapter: it has no {CONFIG}. To train a model, give it as --model.")
    if hasattr(loaded.model, "peft_config"):
        raise ModelError(f"{loaded.name} is an adapter already, and {name} a second one. Give one of them.")
    base_of(source.path)  # refuses what is no LoRA
    with quiet():
        wrapped = load_adapter(loaded.model, source.path)
        own = (source.path / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(str(source.path)) if own else loaded.tokenizer
    processor = processor_in(source.path, tokenizer, base=loaded.processor) if own else loaded.processor
    notices = [*loaded.notices, f"{name}: a LoRA adapter on {loaded.name}."]
    return _ready(wrapped, tokenizer, name, notices, processor)


def stop_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: of generation config, config, tokenizer and chat template."""
    found: set[int] = set()
    generation = model.generation_config
    for value in (
        generation.eos_token_id if generation is not None else None,
        getattr(model.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
        end_of_turn_id(tokenizer),
    ):
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return tuple(sorted(found))


def end_of_turn_id(tokenizer: Any) -> int | None:
    """The special token that the chat template puts after what the assistant says; None without one."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    said = "razonaSAID"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
    try:
        text = chat_text(tokenizer, turns)
    except Exception:  # a template may refuse any conversation it likes; then it tells us nothing
        return None
    after = text.rpartition(said)[2].lstrip()
    ids = tokenizer.encode(after, add_special_tokens=False) if said in text and after else []
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return ids[0] if ids and ids[0] in special else None


def _config_and_tokenizer(source: Source, trust_remote_code: bool) -> tuple[Any, Any]:
    if source.is_gguf:
        folder, file = str(source.path.parent), source.path.name
        # PreTrainedTokenizerFast reads the file's tokenizer in a tenth of the time that AutoTokenizer takes
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file)
        return AutoConfig.from_pretrained(folder, gguf_file=file), tokenizer
    folder = str(source.path)
    return (
        AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code),
        AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code),
    )


def _check_config(name: str, config: Any) -> bool:
    """Whether its weights are in 4 bits already."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"'{name}' is an encoder-decoder ({config.model_type}). Only decoders can be trained here."
        )
    return check_quantized(name, config)


@dataclass(frozen=True)
class _How:
    """How weights are read. ``settings``: put in 4 bits; ``quantized``: they are, or will be."""

    dtype: torch.dtype
    device: str | torch.device
    trust_remote_code: bool
    settings: Mapping[str, Any] | None
    quantized: bool

    def options(self, auto: Any, config: Any) -> dict[str, Any]:
        """What transformers has to know about 4 bits, to make them of each weight as soon as it is read."""
        if not self.quantized:
            return {}
        options: dict[str, Any] = {"device_map": {"": str(self.device)}}
        if self.settings is not None:
            options["quantization_config"] = settings_for(
                auto, config, self.settings, trust_remote_code=self.trust_remote_code
            )
        return options


def _how(
    name: str,
    config: Any,
    dtype: torch.dtype,
    device: str | torch.device,
    settings: Mapping[str, Any] | None,
    trust_remote_code: bool,
) -> _How:
    """Raises ModelError for what cannot be read so."""
    already = _check_config(name, config)
    if settings is not None:
        check_installed(name)
    return _How(
        dtype, device, trust_remote_code, None if already else settings, already or settings is not None
    )


def _no_dropout(config: Any) -> list[str]:
    """Set every dropout probability in the config, and in those within it, to 0; a line when one was not."""
    changed: list[str] = []
    parts = [
        config,
        *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig)),
    ]
    for part in parts:
        for key, value in list(vars(part).items()):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value != 0 and any(word in key for word in ("dropout", "pdrop", "layerdrop")):
                setattr(part, key, 0.0)
                changed.append(f"{key} {value:g}")
    return [f"Dropout is off in every pass (the config had {', '.join(changed)})."] if changed else []


def _load_safetensors(name: str, source: Source, config: Any, how: _How) -> tuple[PreTrainedModel, list[str]]:
    """The model and lines to print. 4 bits are made of the weights as they are stored, whatever ``how.dtype``
    is: every run has the same ones."""
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    declared = config.dtype
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    dtype = how.dtype
    if how.quantized:
        dtype = declared or torch.float32
    elif multimodal and declared != dtype:
        dtype = torch.float32  # the towers lose nothing
    model, report = auto.from_pretrained(
        str(source.path),
        config=config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=how.trust_remote_code,
        output_loading_info=True,
        **how.options(auto, config),
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"'{name}' lacks {len(missing)} weights of a {type(model).__name__}, {missing[0]} for one; they "
            "would be random. The folder is incomplete, or its config.json belongs to another model."
        )
    if multimodal or how.quantized:
        set_dtype(model, how.dtype, towers_as=declared)
    notices = frozen_notice(name, model)
    unused = sorted(report["unexpected_keys"])
    if not unused:
        return model, notices
    kind = type(model).__name__
    return model, [
        *notices,
        f"{name}: {len(unused)} weights in the file have no place in a {kind}, {unused[0]} for one.",
    ]


def _load_gguf(source: Source, config: Any, how: _How) -> PreTrainedModel:
    """A plain model: what transformers loads from GGUF is marked as quantized and cannot be saved."""
    dtype = torch.float32 if how.quantized else how.dtype
    options = {"quantization_config": transformers.GgufConfig(dequantize=True)} if _HAS_GGUF_CONFIG else {}
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar knows no off switch
        loaded = AutoModelForCausalLM.from_pretrained(
            str(source.path.parent), gguf_file=source.path.name, config=config, dtype=dtype, **options
        )
    plain = loaded.config
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    made = type(loaded).from_pretrained(
        None,
        config=plain,
        state_dict=loaded.state_dict(),
        dtype=dtype,
        **how.options(AutoModelForCausalLM, plain),
    )
    if how.quantized:
        set_dtype(made, how.dtype)
    return made


_HAS_GGUF_CONFIG = hasattr(transformers, "GgufConfig")  # without it, weights are always dequantized


@contextlib.contextmanager
def _gguf_read_once() -> Iterator[None]:
    """While it lasts, remember what transformers asks the gguf package for again and again.

    Each reading of the file takes seconds, and a table of names is built once per module of the model.
    """
    import gguf

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in slow.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)
