"""Exercise 3 of the course on the bundled model: every reward is zero, and why. See docs/exercise.md."""

from course_rewards import reward_correctitud, reward_formato, texto

# The block as printed, but for its second import line.
from datasets import Dataset

from razona.trl import GRPOConfig, GRPOTrainer

SISTEMA = "Pensá dentro de <think>...</think> y después escribí solo el número."
cuentas = [("¿Cuánto es 7 × 6?", "42"), ("¿Cuánto es 15 + 27?", "42"),
           ("¿Cuánto es 100 − 58?", "42"), ("¿Cuánto es 84 ÷ 2?", "42")]
ds = Dataset.from_list([
    {"prompt": [{"role": "system", "content": SISTEMA}, {"role": "user", "content": q}],
     "respuesta_correcta": a}
    for q, a in cuentas
])

trainer = GRPOTrainer(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=[reward_formato, reward_correctitud],
    train_dataset=ds,
    args=GRPOConfig(output_dir="mini-grpo", num_generations=4, per_device_train_batch_size=4,
                    max_completion_length=48, max_steps=5, logging_steps=1,
                    temperature=1.0, report_to="none"),
)
trainer.train()

# What the log says, step by step.
for entry in trainer.state.log_history[:-1]:
    print(f"step {entry['step']}: formato {entry['rewards/reward_formato/mean']:.2f},",
          f"correctitud {entry['rewards/reward_correctitud/mean']:.2f},",
          f"reward_std {entry['reward_std']:.2f}, grad_norm {entry['grad_norm']:.2f}")


# Why: 64 completions of each prompt, looked at with two more functions.
def opens_think(completions, **kwargs):
    return [float("<think>" in texto(c)) for c in completions]

def says_42(completions, **kwargs):
    return [float("42" in texto(c)) for c in completions]

second = GRPOTrainer(
    model=trainer.model,
    processing_class=trainer.processing_class,
    reward_funcs=[reward_formato, reward_correctitud, opens_think, says_42],
    train_dataset=ds,
    args=GRPOConfig(num_generations_eval=64, max_completion_length=48),
)
for name, value in second.evaluate(ds).items():
    print(f"{name}: {value:.4f}")
