"""What is handed to schedulers: scripts, lines and manifests; and what is refused."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.host.process_status import catches
from farandole.launch.schedulers.kubernetes import to_yaml
from farandole.launch.supervise.job_loop import ENDING, handling
from tests.unit.cli.test_cli import call

FOUR = ("-np", "8", "--nodes", "2", "--gpus-per-node", "4")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "Train Me.py").write_text("print(1)\n")
    (tmp_path / "train.py").write_text("print(1)\n")


def dry(*words: str) -> str:
    code, out, err = call("run", "--dry-run", *words)
    assert (code, err) == (0, "")
    return out


def test_a_batch_script() -> None:
    text = dry(
        "--on", "slurm", "-o", "sbatch", *FOUR, "--queue", "gpu", "--priority", "7", "--qos=low",
        "--account", "lab", "--time", "2:00:00", "--warn-before", "60", "--cpus-per-rank", "3",
        "--set", "codec=int8", "--tcp", "--", "python", "train.py", "--nodes", "9; rm -rf",
    )  # fmt: skip
    *head, last = text.splitlines()
    assert head == [
        "#!/bin/bash", "#SBATCH --job-name=train", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=12", "#SBATCH --gpus-per-node=4", "#SBATCH --qos=low", "#SBATCH --account=lab",
        "#SBATCH --time=2:00:00", "#SBATCH --priority=7", "#SBATCH --partition=gpu", "#SBATCH --signal=USR1@60",
    ]  # fmt: skip
    assert last.startswith("exec srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=12 ")
    assert last.endswith(" -m farandole run -np 8 --set codec=int8 --tcp -- python train.py --nodes '9; rm -rf'")


def test_the_shape_of_a_job_follows_from_what_is_said() -> None:
    assert "--nodes=3\n" in dry("--on", "slurm", "-np", "9", "--gpus-per-node", "4", "train.py")
    assert " -np 8 " in dry("--on", "slurm", "--nodes", "2", "--gpus-per-node", "4", "train.py")
    assert "#SBATCH --nodes=1\n" in dry("--on", "slurm", "-np", "2", "train.py")
    assert "--job-name=Train-Me\n" in dry("--on", "slurm", "-np", "2", "Train Me.py")


def test_the_line_of_mpirun() -> None:
    words = dry("--on", "mpi", "-np", "4", "-H", "a:2,b:2", "python", "train.py", "-x").split()
    assert words[:3] == ["mpirun", "-np", "4"]
    assert words[words.index("--host") + 1] == "a:2,b:2"
    assert words[-3:] == ["python", "train.py", "-x"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--image", "i"], "--image is for schedulers; add --on {slurm,mpi,kubernetes,ray}"),
        (["--nodes", "2"], "--nodes is for schedulers"),
        (["-o", "yaml"], "-o is for schedulers"),
        (["--on", "slurn"], "invalid choice: 'slurn'"),
        (["--on", "slurm"], "how many ranks?; give -np, or --gpus-per-node"),
        (["--on", "slurm", "-np", "0"], "-np 0: expected at least 1"),
        (["--on", "slurm", "-np", "3", "--nodes", "2"], "every node takes the same number of ranks"),
        (["--on", "slurm", "-np", "8", "--nodes", "1", "--gpus-per-node", "4"], "give --nodes 2"),
        (["--on", "slurm", "-np", "8", "--nodes", "0"], "--nodes 0: expected 1 to 65536"),
        (["--on", "slurm", "-np", "2", "--cpus-per-rank", "0"], "--cpus-per-rank 0: expected at least 1"),
        (["--on", "slurm", "-np", "2", "--image", "i"], "--image means nothing to --on slurm"),
        (["--on", "slurm", "-np", "2", "--qos", "a\n#SBATCH --x"], "expected letters, digits and any of"),
        (["--on", "slurm", "-np", "2", "--queue", "a", "--partition", "b"], "a queue is a partition in Slurm"),
        (
            ["--on", "slurm", "-np", "2", "--warn-before", "soon"],
            "--warn-before soon: expected 1 to 65535 seconds",
        ),
        (["--on", "slurm", "-np", "2", "-o", "yaml"], "-o yaml: --on slurm writes sbatch"),
        (["--on", "slurm", "-np", "2", "-H", "a:2"], "--hosts: --on slurm chooses the hosts"),
        (
            ["--on", "slurm", "-np", "2", "--min-np", "1"],
            "--min-np with --on slurm: a scheduler's job has a fixed",
        ),
        (["--on", "mpi"], "--on mpi: how many ranks?; give -np"),
        (["--on", "mpi", "-np", "2", "--nodes", "2"], "--on mpi starts ranks on the hosts that it is given"),
        (["--on", "mpi", "-np", "2", "--set", "codec=int8"], "--set has no meaning with --on mpi"),
        (["--on", "kubernetes", "-np", "2"], "--on kubernetes needs the image of the pods; give --image NAME"),
        (
            ["--on", "kubernetes", "-np", "2", "--image", "i", "--qos", "x"],
            "--qos means nothing to --on kubernetes",
        ),
        (["--on", "kubernetes", "-np", "2", "--image", "i", "--priority", "p"], "read by Kueue only; add --queue"),
        (["--on", "kubernetes", "-np", "2", "--image", "i", "--queue", "Q!"], "--queue 'Q!': expected a name of"),
        (
            ["--on", "kubernetes", "-np", "2", "--image", "i", "--kind", "job", "--runtime", "r"],
            "is for --kind trainjob",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(words: list[str], text: str) -> None:
    code, out, err = call("run", "--dry-run", *words, "--", "python", "train.py")
    assert (code, out) == (2, ""), err
    assert text in err
    assert err.count("\n") == 1 or "\n#SBATCH" in words[-1]


@pytest.mark.parametrize("time", ["0", "-1", "unlimited", "1-0", "1-2:30", "11", "10:01", "0:10:01"])
def test_a_warning_within_the_limit_is_taken_in_each_of_slurms_spellings(time: str) -> None:
    words = ["--on", "slurm", "-np", "2", f"--time={time}", "--warn-before", "600", "--priority", "top"]
    code, out, err = call("run", "--dry-run", *words, "--", "python", "train.py")
    assert code == 0, err
    assert f"#SBATCH --time={time}\n" in out


@pytest.mark.parametrize("time", ["10", "10:00", "0:10:00", "0-0:10"])
def test_a_warning_that_is_no_earlier_than_the_job_is_refused(time: str) -> None:
    words = ["--on", "slurm", "-np", "2", "--time", time, "--warn-before", "600"]
    code, _, err = call("run", "--dry-run", *words, "--", "python", "train.py")
    assert code == 2
    assert "the job ends after 600 s" in err


def test_interfaces_of_nodes_are_not_looked_for_here() -> None:
    words = ["--on", "slurm", "-np", "2", "--set", "zero=1", "--network-interfaces", "ib77"]
    code, out, err = call("run", "--dry-run", *words, "--", "python", "train.py")
    assert code == 0, err
    assert "ib77" in out


def test_a_plan_in_the_image_is_not_looked_for_here() -> None:
    words = ["--on", "kubernetes", "--image", "i", "-np", "2", "--plan", "in-the-image.toml"]
    code, _, err = call("run", "--dry-run", *words, "--", "python", "train.py")
    assert code == 0, err


def test_no_cluster_of_kubernetes_is_asked() -> None:
    code, _, err = call("run", "--on", "kubernetes", "-np", "2", "--image", "i", "--", "python", "train.py")
    assert code == 2
    assert "--dry-run -o yaml ... | kubectl apply -f -" in err
    code, _, err = call("run", "--on", "slurm", "-o", "sbatch", "-np", "2", "--", "python", "train.py")
    assert code == 2
    assert "-o says what a dry run prints; add --dry-run" in err


def manifests(*words: str) -> list[Any]:
    text = dry("--on", "kubernetes", "-o", "yaml", *words, "--", "python", "train.py", "--lr", "0.1")
    return list(yaml.safe_load_all(text))


def test_a_train_job_says_what_kubeflow_tells_the_nodes() -> None:
    (job,) = manifests("--image", "lab/train:1", *FOUR, "--queue", "q", "--priority", "high", "--namespace", "lab")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"] == {
        "name": "train", "namespace": "lab",
        "labels": {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "high"},
    }  # fmt: skip
    assert job["spec"] == {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": "lab/train:1",
            "command": ["farandole"],
            "args": ["run", "-np", "8", "--", "python", "train.py", "--lr", "0.1"],
            "numNodes": 2,
            "numProcPerNode": 4,
            "resourcesPerNode": {"limits": {"nvidia.com/gpu": "4"}},
        },
    }


def test_a_plain_job_numbers_its_pods_and_a_service_names_them() -> None:
    service, job = manifests("--kind", "job", "--image", "i", *FOUR, "--priority", "high", "--cpus-per-rank", "2")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["subdomain"] == "train"
    assert pod["priorityClassName"] == "high"
    (node,) = pod["containers"]
    told = {each["name"]: each["value"] for each in node["env"]}
    assert told["FARANDOLE_ADDRESS"] == "train-0.train"
    assert node["resources"]["requests"] == {"cpu": "8"}

    from farandole.launch.start.placing import read_node_info

    place = read_node_info({**told, "JOB_COMPLETION_INDEX": "1"})
    assert place is not None
    assert (place.node_rank, place.node_count, place.slots, place.port) == (1, 2, 4, 29500)


def test_pods_have_the_time_that_their_ranks_have() -> None:
    words = ("--image", "i", "-np", "2", "--grace", "90.5")
    (job,) = manifests("--kind", "job", *words)
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 96
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][:5] == ["run", "-np", "2", "--grace", "90.5"]
    code, _, err = call("run", "--dry-run", "--on", "kubernetes", *words, "--", "python", "train.py")
    assert code == 0
    assert "set terminationGracePeriodSeconds to 96 there, or use --kind job" in err


def test_a_job_of_one_node_needs_no_names() -> None:
    (job,) = manifests("--kind", "job", "--image", "i", "-np", "2")
    assert "subdomain" not in job["spec"]["template"]["spec"]
    assert "env" not in job["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("kind", ["trainjob", "jobset", "job"])
def test_manifests_are_what_the_schemas_of_kubernetes_allow(kind: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs pip install kubeflow-trainer-api")
    known = {
        "TrainJob": models.TrainerV1alpha1TrainJob, "JobSet": models.JobsetV1alpha2JobSet,
        "Job": models.IoK8sApiBatchV1Job, "Service": models.IoK8sApiCoreV1Service,
    }  # fmt: skip
    extra = () if kind == "trainjob" else ("--priority", "high")
    for manifest in manifests("--kind", kind, "--image", "i", *FOUR, "--queue", "q", *extra):
        model = known[manifest["kind"]].from_dict(manifest)
        # What the schema does not know would be missing from what comes back.
        assert without_empty(model.to_dict()) == without_empty(manifest)


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_empty(each) for key, each in value.items() if each is not None}
    return [without_empty(each) for each in value] if isinstance(value, list) else value


TEXT = st.text(max_size=12) | st.sampled_from(
    ["yes", "no", "null", "1", "1.5", "a: b", "- a", "#", "i:1", "'", "~"]
)
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(DATA)
def test_yaml_is_read_back_as_it_was(value: Any) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


def test_who_catches_a_signal() -> None:
    import os
    import signal
    import subprocess

    previous = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, previous)
    with subprocess.Popen(["sleep", "60"]) as other:
        assert not catches(other.pid, signal.SIGUSR1)
        other.kill()
    assert not catches(other.pid, signal.SIGUSR1), "it is gone"


def test_handlers_stay_for_a_while_and_an_ignored_hangup_stays_ignored() -> None:
    def handler(number: int, _: object) -> None:
        """Do nothing."""

    before = {number: signal.getsignal(number) for number in ENDING}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with handling(ENDING, handler):
            assert [signal.getsignal(number) for number in ENDING] == [handler, handler, signal.SIG_IGN]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with handling(ENDING, handler):
            assert signal.getsignal(signal.SIGHUP) is handler
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        assert [signal.getsignal(number) for number in ENDING[:2]] == [before[number] for number in ENDING[:2]]
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
