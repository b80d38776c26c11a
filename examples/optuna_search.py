"""Search batch size and learning rate with Optuna: bad trials are pruned, and a killed search goes on.

    pip install -e '.[optuna]'    # in Farandole's folder
    python optuna_search.py --trials 12 --study search.db

Each trial is a job of its own (search_job.py) with its own run directory, so `farandole report` and `farandole
compare` show them. Everything that is known lies in one SQLite file: the same command goes on where it ended.
"""

import argparse
import sys
from pathlib import Path

import optuna
from search_job import held_out_losses

parser = argparse.ArgumentParser()
parser.add_argument("--study", type=Path, default=Path("search.db"), help="SQLite file of the study")
parser.add_argument("--trials", type=int, default=12, help="trials in all, those of earlier calls included")
parser.add_argument("--ranks", type=int, default=2, help="of a trial's job")
parser.add_argument("--seconds", type=float, default=2.0, help="that a trial trains")
parser.add_argument("--first", nargs=2, action="append", default=[], metavar=("BATCH", "LR"),
                    help="try these first; may be given several times")  # fmt: skip
arguments = parser.parse_args()
runs = arguments.study.with_suffix(".runs")
BATCHES = [8, 16, 32, 64, 128, 256]


def objective(trial: optuna.Trial) -> float:
    """Return the held-out loss after the time of a trial."""
    batch_size = trial.suggest_categorical("batch_size", BATCHES)
    lr = trial.suggest_float("lr", 1e-3, 30.0, log=True)
    directory = runs / f"trial-{trial.number:03d}"
    losses = held_out_losses(batch_size, lr, directory, ranks=arguments.ranks, seconds=arguments.seconds)
    loss = float("inf")
    try:
        for step, loss in enumerate(losses):
            trial.report(loss, step)
            if trial.should_prune():
                raise optuna.TrialPruned
    finally:
        losses.close()  # ends the job of a trial that is pruned
    return loss


study = optuna.create_study(
    study_name="batch size and learning rate",
    storage=f"sqlite:///{arguments.study}",
    sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=4),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0),
    load_if_exists=True,
)
State = optuna.trial.TrialState
for trial in study.get_trials(states=[State.RUNNING]):  # of a search that was killed
    study.tell(trial.number, state=State.FAIL)
    study.enqueue_trial(trial.params)
    print(f"trial {trial.number} was cut short: {trial.params} is tried again", flush=True)
if not study.trials:
    for batch, lr in arguments.first:
        study.enqueue_trial({"batch_size": int(batch), "lr": float(lr)})


def finished() -> int:
    """Return how many trials have a result."""
    return len(study.get_trials(states=[State.COMPLETE, State.PRUNED], deepcopy=False))


def say(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
    """Print one line for a trial that is over."""
    loss = "" if trial.value is None else f", loss {trial.value:.4f}"
    words = f"batch {trial.params['batch_size']}, lr {trial.params['lr']:.3g}"
    print(f"trial {trial.number} {trial.state.name.lower()}: {words}{loss}", flush=True)


optuna.logging.set_verbosity(optuna.logging.WARNING)
failures = 0
while finished() < arguments.trials:
    before = finished()
    study.optimize(objective, n_trials=1, catch=(RuntimeError,), callbacks=[say])
    failures = 0 if finished() > before else failures + 1
    if failures == 3:
        sys.exit(f"three trials failed one after the other: see {runs}/*/output.txt")
if not study.get_trials(states=[State.COMPLETE]):
    sys.exit("no trial went to its end")
best = study.best_trial
print(f"best: batch {best.params['batch_size']} a rank, lr {best.params['lr']:.3g}, loss {best.value:.4f}")
print(f"farandole report {runs / f'trial-{best.number:03d}'}")
