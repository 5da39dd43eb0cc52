"""Exercise 2 of the course, as printed: reward functions tested by hand before any training."""

from course_rewards import reward_correctitud, reward_formato

casos = [
    "<think>48 en abril, la mitad en mayo: 24. Total 72.</think> 72",   # bien
    "<think></think> 72",                                            # reward hacking: formato sin contenido
    "La respuesta es 72",                                              # correcta, sin formato
    "<think>48 + 24</think> 84",                                       # formato ok, incorrecta
]
esperadas = ["72"] * len(casos)

print("formato:   ", reward_formato(casos))
print("correccion:", reward_correctitud(casos, respuesta_correcta=esperadas))

# mismo test en formato conversacional: cada completion es una lista de mensajes
conv = [[{"role": "assistant", "content": c}] for c in casos]
assert reward_formato(conv) == reward_formato(casos)
assert reward_correctitud(conv, respuesta_correcta=esperadas) == reward_correctitud(casos, respuesta_correcta=esperadas)
print("ok: mismo resultado en ambos formatos")

# What razona brings along: a thought of at least ten characters that are not space.
from razona.rewards import think_format

print("razona:    ", think_format(min_characters=10)(conv))
