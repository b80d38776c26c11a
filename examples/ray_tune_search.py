"""The search of optuna_search.py with Ray Tune: trials side by side on a cluster of Ray, bad ones stopped early.

    pip install -e '.[tune]'      # in Farandole's folder
    python ray_tune_search.py --trials 12

Each trial is a job of its own (search_job.py), started by a worker of Ray that reserves one CPU for each rank.
"""

import argparse
import sys
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

sys.path.insert(0, str(Path(__file__).parent))
from search_job import REPORTS, held_out_losses

parser = argparse.ArgumentParser()
parser.add_argument("--storage", type=Path, default=Path("tune"), help="directory of the results")
parser.add_argument("--name", default="batch-size", help="of the search: the same name goes on where it ended")
parser.add_argument("--trials", type=int, default=12)
parser.add_argument("--ranks", type=int, default=2, help="of a trial's job")
parser.add_argument("--seconds", type=float, default=2.0, help="that a trial trains")
arguments = parser.parse_args()
storage, here = arguments.storage.resolve(), str(Path(__file__).resolve().parent)


def trial(config: dict[str, float]) -> None:
    """Report the held-out losses of a job."""
    sys.path.insert(0, here)  # a worker of Ray is another process
    directory = Path(tune.get_context().get_trial_dir()) / "run"
    losses = held_out_losses(
        int(config["batch_size"]), config["lr"], directory, ranks=arguments.ranks, seconds=arguments.seconds
    )
    try:
        for loss in losses:
            tune.report({"loss": loss})
    finally:
        losses.close()


ray.init(log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
trainable = tune.with_resources(trial, {"cpu": arguments.ranks})
path = str(storage / arguments.name)
if tune.Tuner.can_restore(path):
    tuner = tune.Tuner.restore(path, trainable, restart_errored=True)
else:
    tuner = tune.Tuner(
        trainable,
        param_space={
            "batch_size": tune.choice([8, 16, 32, 64, 128, 256]),
            "lr": tune.loguniform(1e-3, 30.0),
        },
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=arguments.trials,
            scheduler=ASHAScheduler(max_t=REPORTS, grace_period=1, reduction_factor=2),
        ),
        run_config=tune.RunConfig(name=arguments.name, storage_path=str(storage), verbose=0),
    )
results = tuner.fit()
best = results.get_best_result()
stopped = sum(result.metrics["training_iteration"] < REPORTS for result in results if result.metrics)
print(f"{len(results)} trials, {stopped} stopped early, {results.num_errors} failed")
print(
    f"best: batch {best.config['batch_size']} a rank, lr {best.config['lr']:.3g}, loss {best.metrics['loss']:.4f}"
)
