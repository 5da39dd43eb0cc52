"""A name becomes a model and a tokenizer; a trained model becomes a folder that plain transformers loads."""

from razona.models.load import LoadedModel, load
from razona.models.save import save

__all__ = ["LoadedModel", "load", "save"]
