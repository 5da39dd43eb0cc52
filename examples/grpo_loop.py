"""GRPO written out on razona's public parts, without `run()`: the page to copy for a loop of your own.

    python examples/grpo_loop.py                                   # the demo's task, from the bundled model
    python examples/grpo_loop.py --model my/model --steps 2

A short cold start shows the model the form of an answer, as in `razona demo`; then it samples, is scored, and
is trained on what it sampled. Nothing is saved and nothing resumes: that is what `razona.train.grpo.run` adds.
"""

from __future__ import annotations

import argparse

import torch

from razona.batch import collate, collate_demonstrations
from razona.config import BUNDLED_MODEL, DataConfig, OptimizerConfig
from razona.data import PromptSource, build_demonstrations, build_prompts, load_rows
from razona.engines.native import NativeEngine
from razona.losses.supervised import negative_log_likelihood
from razona.losses.weights import masked_sum, per_token
from razona.models import load
from razona.objective import grpo
from razona.policy import Policy
from razona.rewards import exact_answer
from razona.tasks import addition
from razona.types import Sampling, seed_for

SAMPLING = Sampling(group_size=4, max_completion_length=48, temperature=1.0)
VERIFIER = exact_answer()
PROMPTS_PER_STEP, ROWS_PER_STEP, TOKENS = 16, 8, 1280  # TOKENS: of a micro-batch; it changes memory only


def cold_start(policy, demonstrations, steps):
    """Supervised training: the mean negative log-likelihood of the demonstrated tokens."""
    for _ in range(steps):
        rows = demonstrations.take(ROWS_PER_STEP)
        batch = collate_demonstrations([(row.token_ids, row.loss_mask) for row in rows])
        batch = batch.to(policy.device).weighted(per_token)
        for micro in batch.split(TOKENS):
            loss = negative_log_likelihood(policy.logprobs(micro, temperature=1.0), micro.loss_mask)
            masked_sum(loss, micro.weights).backward()
        policy.update()


def sample(engine, prompts, step):
    """One group of completions per prompt; a completion's seed depends on nothing but what it is."""
    seeds = [[seed_for(0, step, prompt.id, g) for g in range(SAMPLING.group_size)] for prompt in prompts]
    return engine.generate(prompts, SAMPLING, seeds=seeds)


def score(groups):
    """Rewards [P, G, 1] of the verifier, which knows the answer of each prompt."""
    texts = [completion.text for group in groups for completion in group.completions]
    answers = [group.prompt.columns["answer"] for group in groups for _ in group.completions]
    rewards = VERIFIER(completions=texts, answer=answers)
    return torch.tensor([float("nan") if r is None else r for r in rewards]).reshape(len(groups), -1, 1)


def train(policy, engine, source, objective, steps):
    """Prompts -> rollouts -> rewards -> advantages -> loss -> update, one update per rollout."""
    for step in range(steps):
        engine.load_weights(policy, version=step)
        groups = sample(engine, source.take(PROMPTS_PER_STEP), step)
        rollout = collate(groups, score(groups)).to(policy.device)
        rollout = rollout.with_advantages(objective.advantage_fn, reward_weights=(1.0,))
        rollout = rollout.weighted(objective.weight_fn)  # counts of the whole update, before it is cut
        for micro in rollout.split(TOKENS):
            logprobs = policy.logprobs(micro, temperature=SAMPLING.temperature)  # [b, T]
            old = logprobs.detach()  # one update per rollout: the sampler is this very policy
            token_loss = objective.loss_fn(logprobs, old, micro.advantages, micro.loss_mask)  # [b, T]
            masked_sum(token_loss, micro.weights).backward()
        grad_norm = policy.update()
        reward = rollout.rewards.nanmean()
        print(f"step {step + 1}: reward {reward:.2f}  grad_norm {grad_norm:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=BUNDLED_MODEL, help="a hub id or a folder")
    parser.add_argument("--cold-start-steps", type=int, default=16)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="fp32")
    args = parser.parse_args()

    loaded = load(args.model, dtype=torch.float32)
    tokenizer, stops = loaded.tokenizer, loaded.stop_token_ids

    def policy_with(learning_rate):
        optimizer = OptimizerConfig(learning_rate=learning_rate)
        return Policy(loaded.model, tokenizer, optimizer=optimizer, precision=args.precision)

    policy = policy_with(5e-5)
    shown, held_out, practice = addition.split(0, demonstrations=32, held_out=64)
    rows = load_rows(addition.rows(shown, demonstrated=True))
    found = build_demonstrations(rows, tokenizer, DataConfig(), max_length=512, stop_token_ids=stops)
    cold_start(policy, PromptSource(found.demonstrations, seed=0), args.cold_start_steps)
    policy.release()  # the model is the trained one; another optimizer takes it over

    policy = policy_with(1.5e-5)
    engine = NativeEngine(policy, stop_token_ids=stops)
    tests = build_prompts(load_rows(addition.rows(held_out)), tokenizer, DataConfig()).prompts
    prompts = build_prompts(load_rows(addition.rows(practice)), tokenizer, DataConfig()).prompts
    print(f"held-out sums before GRPO: {score(sample(engine, tests, step=-1)).nanmean():.1%}", flush=True)
    train(policy, engine, PromptSource(prompts, seed=0), grpo(weights="per_token"), args.steps)
    print(f"held-out sums after GRPO: {score(sample(engine, tests, step=-1)).nanmean():.1%}")


if __name__ == "__main__":
    main()
