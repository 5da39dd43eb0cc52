"""The reward functions of the course, section 4, as printed."""

import re


def texto(c):
    """Las completions llegan como str, o como lista de mensajes si el prompt era conversacional."""
    return c[0]["content"] if isinstance(c, list) else c

def extraer_respuesta(s):
    m = re.search(r"</think>\s*(.+?)\s*$", s, re.DOTALL)
    return m.group(1).strip() if m else None

def reward_formato(completions, **kwargs):
    """1.0 si respeta <think>...</think> seguido de la respuesta, 0.0 si no."""
    patron = re.compile(r"^<think>.*?</think>\s*\S+", re.DOTALL)
    return [1.0 if patron.match(texto(c)) else 0.0 for c in completions]

def reward_correctitud(completions, respuesta_correcta, **kwargs):
    """2.0 si el resultado final coincide con la respuesta esperada."""
    return [2.0 if extraer_respuesta(texto(c)) == esperada else 0.0
            for c, esperada in zip(completions, respuesta_correcta)]
