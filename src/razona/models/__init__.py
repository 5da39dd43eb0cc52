"""A name becomes a model and a tokenizer; a trained model becomes a folder that plain transformers loads."""

from razona.models.load import LoadedModel, from_model, load, with_adapter
from razona.models.lora import attach
from razona.models.resolve import HubSilent
from razona.models.save import save

__all__ = ["HubSilent", "LoadedModel", "attach", "from_model", "load", "save", "with_adapter"]
