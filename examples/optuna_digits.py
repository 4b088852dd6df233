"""Optuna proposes, a population answers: a whole round of candidates in one program.

Each round asks the study for as many candidates as there are members, trains them all at once on
handwritten digits, and tells it every result. The compiled program is the same in every round.

    python examples/optuna_digits.py --rounds 5 --members 40
"""

import runpy
import time
from pathlib import Path

import jax
import optuna
import tyro

import plurax as px

DIGITS = Path(__file__).with_name("digits_ensemble.py")


def propose(trial: optuna.Trial) -> dict[str, float]:
    """The hyperparameters of one candidate."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-4, 1.0, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.7),
    }


def search(rounds: int, members: int, epochs: int, plan: px.Plan) -> optuna.Study:
    """Run some rounds, and return the study."""
    digits = runpy.run_path(str(DIGITS))
    train, held_out = digits["load_data"](400)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=members)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    for number in range(rounds):
        began = time.perf_counter()
        trials = [study.ask() for _ in range(members)]
        proposed = [propose(trial) for trial in trials]
        hyper = {name: [one[name] for one in proposed] for name in proposed[0]}
        result = px.fit(
            digits["make_task"],
            digits["make_optimizer"],
            train,
            members=px.Members([0] * members, hyper),
            plan=plan,
            epochs=epochs,
            report_every=epochs,
            batch_size=128,
            evaluation=held_out,
            progress=False,
        )
        plan = result.program.plan  # what was chosen by measurement is chosen once
        losses = result.history[-1]["members"]["eval_loss"]
        for trial, loss in zip(trials, losses, strict=True):
            study.tell(trial, loss)
        print(
            f"round {number + 1}: {members} candidates in {time.perf_counter() - began:.1f} s, "
            f"best of the round {min(losses):.4f}, best so far {study.best_value:.4f}"
        )
    return study


def main(rounds: int = 5, members: int = 40, epochs: int = 15) -> None:
    """Search learning rate, weight decay and dropout of an MLP on handwritten digits."""
    plan = px.Plan(member=jax.device_count())
    study = search(rounds, members, epochs, plan)
    print("best setting:", {name: f"{value:.3g}" for name, value in study.best_params.items()})


if __name__ == "__main__":
    tyro.cli(main)
