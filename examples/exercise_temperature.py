"""Exercise 3 of the course from the demo's cold start, at two temperatures. See docs/exercise.md.

`make demo` saves the cold start; another folder can be given on the command line.
"""

import sys

from course_rewards import reward_correctitud, reward_formato
from datasets import Dataset
from razona.tasks.addition import SYSTEM
from razona.trl import GRPOConfig, GRPOTrainer

COLD_START = sys.argv[1] if len(sys.argv) > 1 else "runs/demo/seed-0/cold-start"
cuentas = [("What is 16 + 49?", "65"), ("What is 49 + 18?", "67"),
           ("What is 49 + 72?", "121"), ("What is 63 + 65?", "128")]
ds = Dataset.from_list([
    {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": q}],
     "respuesta_correcta": a}
    for q, a in cuentas
])

for temperature in (1.0, 0.01):
    trainer = GRPOTrainer(
        model=COLD_START,
        reward_funcs=[reward_formato, reward_correctitud],
        train_dataset=ds,
        args=GRPOConfig(output_dir=f"mini-grpo-{temperature}", num_generations=4,
                        per_device_train_batch_size=4, max_completion_length=48, max_steps=5,
                        logging_steps=1, temperature=temperature, report_to="none"),
    )
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        print(f"temperature {temperature}, step {entry['step']}: reward {entry['reward']:.2f},",
              f"reward_std {entry['reward_std']:.2f}, grad_norm {entry['grad_norm']:.2f}")
